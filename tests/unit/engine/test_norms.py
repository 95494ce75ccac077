"""Normalisation is that of the library, in every number format."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from paceline.engine.native.norms import Norm


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 4, 9])
@pytest.mark.parametrize("size", [16, 576])
def test_hidden_rows(num_rows: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = (torch.randn(num_rows, size) * torch.logspace(-4, 4, num_rows)[:, None]).to(dtype)
    weight = torch.randn(size).to(dtype)
    expected = functional.rms_norm(rows, (size,), weight, 1e-5)
    torch.testing.assert_close(Norm(weight, 1e-5)(rows), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_of_joined_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    joined = torch.randn(5, 6, 8).to(dtype)
    heads, weight = joined[:, :4], torch.randn(4, 8).to(dtype)
    expected = torch.stack([functional.rms_norm(heads[:, i], (8,), weight[i], 1e-6) for i in range(4)], dim=1)
    before = joined.clone()
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-5  # rounded to 16 bits once more
    torch.testing.assert_close(Norm(weight, 1e-6)(heads), expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(joined, before)


def test_rows_of_zeros_stay_zeros_and_a_broken_row_stays_alone() -> None:
    rows = torch.zeros(3, 8)
    rows[1, 2] = torch.inf
    rows[2] = 1.0
    result = Norm(torch.ones(8), 1e-5)(rows)
    assert torch.equal(result[0], torch.zeros(8))
    assert result[1].isnan().any()
    torch.testing.assert_close(result[2], torch.ones(8))


def test_a_row_is_the_same_to_the_bit_alone_and_among_others() -> None:
    torch.manual_seed(0)
    rows, norm = torch.randn(64, 576), Norm(torch.randn(576), 1e-5)
    together = norm(rows)
    for stop in (4, 5, 8, 17):
        assert torch.equal(norm(rows[:stop].clone()), together[:stop])
