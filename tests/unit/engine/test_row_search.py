from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.row_search import ids_near_best

SIZES = st.sampled_from([1, 5, 127, 128, 129, 1000, 1024])


def random_row(seed: int, size: int, spread: float) -> torch.Tensor:
    """A row with many equal values."""
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread).round()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    size=SIZES,
    spread=st.sampled_from([0.0, 0.6, 3.0, 1e30]),
    reach=st.sampled_from([0.0, 1.0, 2.5, 100.0]),
)
def test_ids_near_best_are_all_that_are_near(seed: int, size: int, spread: float, reach: float) -> None:
    row = random_row(seed, size, spread)
    assert torch.equal(ids_near_best(row, reach), (row >= row.amax() - reach).nonzero()[:, 0])


@pytest.mark.parametrize("size", [3, 130])
def test_what_was_masked_is_never_near(size: int) -> None:
    row = torch.full((size,), -torch.inf)
    row[size - 2] = -5.0
    assert ids_near_best(row, 1e30).tolist() == [size - 2]
