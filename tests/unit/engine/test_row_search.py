from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.row_search import best_id, ids_near_best

SIZES = st.sampled_from([1, 5, 127, 128, 129, 1000, 1024])


def random_row(seed: int, size: int, spread: float) -> torch.Tensor:
    """A row with many equal values."""
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread).round()


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), size=SIZES, spread=st.sampled_from([0.0, 0.6, 3.0, 1e30]))
def test_best_id_is_the_lowest_of_the_best(seed: int, size: int, spread: float) -> None:
    row = random_row(seed, size, spread)
    assert best_id(row) == int((row == row.amax()).nonzero()[0])


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
    assert best_id(row) == size - 2
    assert ids_near_best(row, 1e30).tolist() == [size - 2]
