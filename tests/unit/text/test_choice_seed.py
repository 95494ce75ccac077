"""Seeds of choices: pure, apart from one another, and the first is the request's own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text.choice_seed import choice_seed

SEEDS = st.integers(-(2**63), 2**63 - 1)


@given(SEEDS)
def test_first_choice_has_the_requests_seed(seed: int) -> None:
    assert choice_seed(seed, 0, 0) == seed


@given(SEEDS, st.integers(0, 1000), st.integers(0, 1000))
def test_is_pure_and_fits_a_seed(seed: int, prompt_index: int, choice_index: int) -> None:
    made = choice_seed(seed, prompt_index, choice_index)
    assert made == choice_seed(seed, prompt_index, choice_index)
    assert -(2**63) <= made < 2**63


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63)])
def test_all_differ(seed: int) -> None:
    places = [(prompt, choice) for prompt in range(20) for choice in range(20)]
    made = {choice_seed(other, *place) for place in places for other in (seed, seed ^ 1)}
    assert len(made) == 2 * len(places)


def test_never_changes() -> None:
    """Whoever keeps a seed gets the same choices from a later version."""
    assert choice_seed(7, 0, 1) == 7_834_934_529_958_241_145
    assert choice_seed(7, 1, 0) == 1_823_599_112_239_777_827
