import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation.estimates import ChainAcceptance, Level, LinearTime, TreeGain

# --- acceptance -------------------------------------------------------------------------------------------------------


def accepted_chains(*verdicts: tuple[int, int]) -> ChainAcceptance:
    acceptance = ChainAcceptance()
    for depth, accepted in verdicts:
        acceptance.observe(depth, accepted)
    return acceptance


def test_each_place_has_its_own_acceptance() -> None:
    acceptance = accepted_chains(*[(3, 2)] * 200)
    first, second, third = acceptance.conditional(3)
    assert first > 0.95
    assert second > 0.95
    assert third < 0.1
    assert acceptance.survival(3) == pytest.approx((first, first * second, first * second * third))


def test_a_place_that_was_not_judged_does_not_count() -> None:
    """Places after the first wrong draft were not looked at: a thousand of them change nothing."""
    short = accepted_chains(*[(1, 0)] * 50)
    long = accepted_chains(*[(8, 0)] * 50)
    assert short.conditional(8) == long.conditional(8)


def test_a_short_chain_accepted_as_a_whole_says_nothing_of_later_places() -> None:
    known = accepted_chains(*[(4, 2)] * 5).conditional(3)
    after_short = accepted_chains(*[(4, 2)] * 5, (2, 2)).conditional(3)
    after_long = accepted_chains(*[(4, 2)] * 5, (3, 3)).conditional(3)
    assert after_short[1] > known[1]
    assert after_short[2] == pytest.approx(known[2], abs=0.01)
    assert after_long[2] > known[2] + 0.1


def test_a_place_that_is_not_judged_any_more_is_thought_to_be_like_the_one_before_it() -> None:
    acceptance = accepted_chains(*[(4, 1)] * 50, *[(1, 1)] * 300)
    first, second, *_ = acceptance.conditional(4)
    assert second == pytest.approx(first, abs=0.05)


def test_acceptance_follows_a_collapse_within_its_window() -> None:
    acceptance = accepted_chains(*[(1, 1)] * 200, *[(1, 0)] * 32)
    assert acceptance.conditional(1)[0] < 0.4


def test_acceptance_is_thought_to_be_that_of_others_as_long_as_it_may_be() -> None:
    others = (0.5, 0.5)
    assert ChainAcceptance().conditional(2, others) == others
    alike = accepted_chains((2, 1), (2, 0), (2, 0), (2, 2))
    assert alike.conditional(2, others) == pytest.approx(others, abs=0.05)
    unlike = accepted_chains(*[(2, 2)] * 20)
    assert alike.unlike(others) < 1 < 9 < unlike.unlike(others)
    assert min(unlike.conditional(2, others)) > 0.9


def test_who_does_worse_than_others_at_one_place_is_thought_to_do_so_at_the_next() -> None:
    first, second = accepted_chains(*[(1, 0)] * 40).conditional(2, (0.8, 0.8))
    assert second == pytest.approx(first, abs=0.02)
    assert first < 0.1


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30))
def test_survival_is_a_probability_that_never_grows(verdicts: list[tuple[int, int]]) -> None:
    survival = accepted_chains(*[(max(pair), min(pair)) for pair in verdicts]).survival(20)
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in itertools.pairwise(survival))


def test_a_tree_tells_what_each_of_its_first_nodes_brings() -> None:
    """Nodes 1 and 2 under the root, node 3 under node 2: half the time 1 is right, else 2 and 3."""
    tree = TreeGain()
    for _ in range(100):
        tree.observe(3, (1,))
        tree.observe(3, (2, 3))
    assert tree.gains(3) == pytest.approx((0.5, 0.5, 0.5), abs=0.05)


def test_nodes_that_were_not_sent_keep_what_is_known_of_them() -> None:
    tree = TreeGain()
    for _ in range(100):
        tree.observe(4, (1, 4))
    before = tree.gains(4)[3]
    for _ in range(50):
        tree.observe(2, (1,))
    assert tree.gains(4)[3] == pytest.approx(before, abs=0.02)


# --- times ------------------------------------------------------------------------------------------------------------


def test_a_line_is_found() -> None:
    time = LinearTime(window=12, prior_share=0.1)
    for tokens in (1, 5, 9, 3, 7) * 10:
        time.observe(tokens, 0.030 + 0.002 * tokens)
    assert time.per_token_s == pytest.approx(0.002, rel=0.02)
    assert time.at(65) == pytest.approx(0.160, rel=0.02)


def test_samples_of_one_size_give_the_prior_slope() -> None:
    time = LinearTime(window=12, prior_share=0.5)
    for _ in range(20):
        time.observe(4, 0.040)
    assert time.at(4) == pytest.approx(0.040)
    assert time.per_token_s == pytest.approx(0.005)


def test_a_slope_that_was_learned_outlives_a_thousand_samples_of_one_size() -> None:
    time = LinearTime(window=12, prior_share=0.1)
    for tokens in (1, 5) * 10:
        time.observe(tokens, 0.010 + 0.003 * tokens)
    for _ in range(1000):
        time.observe(5, 0.025)
    assert time.per_token_s == pytest.approx(0.003, rel=0.1)


def test_a_pause_is_not_a_trend_but_two_in_a_row_are() -> None:
    time = LinearTime(window=12, prior_share=0.1)
    for tokens in (1, 5) * 20:
        time.observe(tokens, 0.010 + 0.001 * tokens)
    usual = time.at(5)
    time.observe(5, 1.0)
    assert time.at(5) < 1.3 * usual
    time.observe(5, 0.015)
    time.observe(5, 1.0)
    assert time.at(5) < 1.5 * usual
    time.observe(5, 1.0)
    assert time.at(5) > 0.8
    assert time.at(1) > 0.4  # the whole line has changed, not its height alone


def test_a_pause_that_several_tell_of_is_one_pause() -> None:
    time = LinearTime(window=12, prior_share=0.1)
    for tokens in (8, 40) * 20:
        time.observe(tokens, 0.010 + 0.001 * tokens)
    usual = time.at(8)
    for _ in range(8):
        time.observe(8, 1.0, weight=1 / 8)
    assert time.at(8) < 1.5 * usual
    for _ in range(8):
        time.observe(8, 1.0, weight=1 / 8)
    assert time.at(8) > 0.8


@settings(max_examples=80)
@given(
    st.lists(
        st.tuples(st.integers(-1, 10_000), st.floats(-1.0, 1e4), st.floats(0.001, 1.0)),
        max_size=40,
    ),
    st.integers(1, 10_000),
)
def test_times_never_fall_below_zero_and_never_fall_with_tokens(
    samples: list[tuple[int, float, float]], tokens: int
) -> None:
    time = LinearTime(window=12, prior_share=0.1)
    for count, seconds, weight in samples:
        time.observe(count, seconds, weight)
    assert time.per_token_s >= 0.0
    assert -1e-6 <= time.at(tokens) <= time.at(tokens + 1) + 1e-9


def test_a_level_follows_its_samples() -> None:
    level = Level(8)
    assert level.get(5.0) == 5.0
    level.observe(1.0)
    assert level.value == 1.0
    for _ in range(40):
        level.observe(3.0)
    assert level.value == pytest.approx(3.0, abs=0.02)


def test_samples_that_several_tell_of_count_once() -> None:
    alone, shared = Level(8), Level(8)
    for sample in (1.0, 2.0, 3.0, 4.0):
        alone.observe(sample)
        for _ in range(16):
            shared.observe(sample, weight=1 / 16)
    assert shared.get(0.0) == pytest.approx(alone.get(0.0), rel=0.15)
