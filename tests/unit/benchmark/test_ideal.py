"""The discrete-event model, where its result can be written down."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, cycle, repeat

import pytest

from paceline.benchmark.ideal import IdealFleet, IdealResult, ideal, ideal_of_text
from paceline.engine.simulated.pass_time import PassTime

NO_GATHER = {"gather_window_ms": 0.0}
ALPHA, BLOCK, RTT_S = 0.8, 4, 0.0002
VERIFY_S, DRAFT_S = 0.030 + 0.00005 * (BLOCK + 1), 0.00305
TOKENS_PER_ROUND = (1 - ALPHA ** (BLOCK + 1)) / (1 - ALPHA)


def _rate(seconds: float = 500.0, **fields: object) -> IdealResult:
    return ideal(replace(IdealFleet(), **fields), seconds)  # type: ignore[arg-type]


@pytest.mark.parametrize("rtt_ms", [0.0, 0.2, 20.0])
def test_plain_decoding_is_one_token_per_pass_and_round_trip(rtt_ms: float) -> None:
    found = _rate(60.0, num_draft_tokens=0, rtt_ms=rtt_ms)
    assert found.tokens_per_second == pytest.approx(1 / (0.03005 + rtt_ms / 1e3), rel=0.002)
    assert found.verifier_busy == pytest.approx(0.03005 / (0.03005 + rtt_ms / 1e3), rel=0.002)
    assert found.drafter_busy == 0.0


def test_plain_sessions_of_a_verifier_share_its_passes() -> None:
    found = _rate(60.0, num_draft_tokens=0, num_sessions=8, num_verifiers=2)
    assert found.tokens_per_second == pytest.approx(8 / (0.030 + 4 * 0.00005 + RTT_S), rel=0.002)


def test_one_session_without_ahead_is_the_formula_of_a_sequential_loop() -> None:
    found = _rate(ahead=False)
    # After a block that was accepted whole the drafter is fed two tokens: its last draft and the extra token.
    drafting_s = BLOCK * DRAFT_S + 0.00005 * ALPHA**BLOCK
    round_s = VERIFY_S + drafting_s + 2 * RTT_S
    assert found.tokens_per_second == pytest.approx(TOKENS_PER_ROUND / round_s, rel=0.01)
    assert found.rounds_per_second == pytest.approx(1 / round_s, rel=0.002)
    assert found.drafter_busy == pytest.approx(drafting_s / round_s, rel=0.01)


def test_drafting_ahead_saves_the_draft_whenever_block_and_guess_are_right() -> None:
    found = _rate()
    missed = 1 - ALPHA ** (BLOCK + 1)
    # Where they are right the verifier has the next block already, and no way is gone.
    round_s = VERIFY_S + missed * (RTT_S + BLOCK * DRAFT_S + RTT_S)
    assert found.tokens_per_second == pytest.approx(TOKENS_PER_ROUND / round_s, rel=0.01)
    assert found.rounds_per_second == pytest.approx(1 / round_s, rel=0.002)


@pytest.mark.parametrize("ahead", [False, True])
def test_with_a_perfect_drafter_rounds_are_exact(ahead: bool) -> None:
    found = _rate(60.0, acceptance=1.0, ahead=ahead)
    round_s = VERIFY_S + (0.0 if ahead else RTT_S + BLOCK * DRAFT_S + 0.00005 + RTT_S)
    assert found.tokens_per_second == pytest.approx((BLOCK + 1) / round_s, rel=0.002)


def test_with_a_hopeless_drafter_ahead_changes_nothing() -> None:
    on, off = _rate(60.0, acceptance=0.0), _rate(60.0, acceptance=0.0, ahead=False)
    assert (
        on.tokens_per_second
        == off.tokens_per_second
        == pytest.approx(1 / (VERIFY_S + 4 * DRAFT_S + 2 * RTT_S), rel=2e-3)
    )


def test_a_drafter_slower_than_the_verifier_sets_the_pace_and_a_late_draft_is_waited_for() -> None:
    found = _rate(60.0, acceptance=1.0, draft_pass=PassTime(10.0, 0.0))
    assert found.tokens_per_second == pytest.approx((BLOCK + 1) / ((BLOCK + 1) * 0.010 + RTT_S), rel=0.002)
    assert found.drafter_busy > 0.99
    # With a wrong guess the late draft was for nothing, and another one is made.
    some = _rate(draft_pass=PassTime(10.0, 0.0))
    whole, hit = ALPHA**BLOCK, ALPHA ** (BLOCK + 1)
    late_s, redraft_s = 0.050 + RTT_S, 0.040 + RTT_S
    # A rejection finds the drafter in the middle of a pass: 10 ms passes begin with the verify, which takes 30.25.
    rejected_s = VERIFY_S + RTT_S + redraft_s + 0.00955
    assert some.rounds_per_second == pytest.approx(
        1 / (hit * late_s + (whole - hit) * (late_s + redraft_s) + (1 - whole) * rejected_s), rel=0.01
    )


def test_pools_that_share_nothing_double_the_rate() -> None:
    one = _rate(250.0)
    two = _rate(250.0, num_sessions=2, num_verifiers=2, num_drafters=2)
    assert two.tokens_per_second == pytest.approx(2 * one.tokens_per_second, rel=0.02)


def test_many_sessions_hide_drafting_and_saturate_the_verifier() -> None:
    found = _rate(60.0, num_sessions=64, num_drafters=4, verify_pass=PassTime(0.0, 1.0), ahead=False)
    # 1 ms per token whatever the batch: the verifier computes all the time, and that is the whole law.
    assert found.verifier_busy == pytest.approx(1.0, abs=0.01)
    assert found.rounds_per_second == pytest.approx(1 / (5 * 0.001), rel=0.01)
    assert found.tokens_per_second == pytest.approx(TOKENS_PER_ROUND * 200, rel=0.02)


def test_a_long_batch_is_cut() -> None:
    found = _rate(60.0, num_draft_tokens=0, num_sessions=8, max_batch_tokens=2, **NO_GATHER)
    assert found.tokens_per_second == pytest.approx(2 / (0.030 + 2 * 0.00005), rel=0.01)


def test_equal_arguments_give_equal_results() -> None:
    fleet = IdealFleet(num_sessions=5, num_verifiers=2, num_drafters=2)
    assert ideal(fleet, 20.0) == ideal(fleet, 20.0)
    assert ideal(fleet, 20.0) != ideal(fleet, 20.0, seed=1)


def test_the_luck_of_a_run_can_be_given() -> None:
    # yes, yes, no: a block of four gives three tokens, for ever
    found = ideal(IdealFleet(ahead=False), 60.0, agreements=[cycle([True, True, False])])
    assert found.tokens_per_second == pytest.approx(3 * found.rounds_per_second, rel=0.005)
    # whole blocks and a wrong guess behind each: position four of five is never one that a block has
    found = ideal(IdealFleet(), 60.0, agreements=[cycle([True, True, True, True, False])])
    assert found.tokens_per_second == pytest.approx(5 / (VERIFY_S + 2 * RTT_S + BLOCK * DRAFT_S), rel=0.005)


CERTAIN = (1.0,) * (BLOCK + 1)


def test_where_every_outcome_is_foreseen_a_rejection_costs_a_way_and_no_draft() -> None:
    found = _rate(200.0, outcomes=8, outcome_chances=CERTAIN)
    hit = ALPHA ** (BLOCK + 1)
    assert found.rounds_per_second == pytest.approx(1 / (VERIFY_S + RTT_S + (1 - hit) * RTT_S), rel=0.005)


def test_outcomes_that_never_come_true_cost_their_passes_only() -> None:
    # The drafter is done before the verdict either way.
    plain, never = _rate(60.0), _rate(60.0, outcomes=8, outcome_chances=(0.0,) * (BLOCK + 1))
    assert never.rounds_per_second == pytest.approx(plain.rounds_per_second, rel=0.001)
    assert never.drafter_busy > plain.drafter_busy


def test_a_draft_that_is_half_made_when_its_outcome_comes_true_is_finished() -> None:
    # Passes of 9 ms: the fourth runs when a rejection comes. All but the first draft after outcomes: one is left to do.
    never, always = (
        _rate(120.0, acceptance=0.0, draft_pass=PassTime(9.0, 0.0), outcomes=1, outcome_chances=chances)
        for chances in ((0.0,) * (BLOCK + 1), CERTAIN)
    )
    assert 1 / never.rounds_per_second - 1 / always.rounds_per_second == pytest.approx(3 * 0.009, rel=0.01)


def test_a_drafter_that_is_never_alone_with_a_session_foresees_nothing() -> None:
    fleet = IdealFleet(num_sessions=64, num_verifiers=4, num_drafters=2)
    with_outcomes = replace(fleet, outcomes=8, outcome_chances=CERTAIN)
    assert ideal(with_outcomes, 2.0).tokens_per_second == pytest.approx(ideal(fleet, 2.0).tokens_per_second, rel=0.01)


def test_a_stretch_of_text_takes_the_time_of_its_own_luck() -> None:
    # Ten rounds of five tokens, then rounds of one.
    def luck() -> list[Iterator[bool]]:
        return [chain(repeat(True, 10 * (BLOCK + 1)), repeat(False))]

    in_turn = IdealFleet(ahead=False, **NO_GATHER)  # type: ignore[arg-type]
    round_s = 2 * RTT_S + in_turn.verify_pass.seconds(BLOCK + 1)
    round_s += BLOCK * in_turn.draft_pass.seconds(1)
    good = ideal_of_text(in_turn, 10, 45, agreements=luck())
    assert good.tokens_per_second == pytest.approx(5 / round_s, rel=0.02)
    bad = ideal_of_text(in_turn, 51, 90, agreements=luck())
    assert bad.tokens_per_second == pytest.approx(1 / round_s, rel=0.02)
    assert bad.rounds_per_second == pytest.approx(good.rounds_per_second, rel=0.02)


def test_a_long_stretch_is_what_a_long_time_is() -> None:
    fleet = IdealFleet(num_sessions=8, num_verifiers=2)
    stretch, time = ideal_of_text(fleet, 1000, 40_000), ideal(fleet, 100.0)
    assert stretch.tokens_per_second == pytest.approx(time.tokens_per_second, rel=0.02)
    assert stretch.verifier_busy == pytest.approx(time.verifier_busy, rel=0.02)
    assert stretch.drafter_busy == pytest.approx(time.drafter_busy, rel=0.02)


def test_no_text_is_no_stretch() -> None:
    with pytest.raises(ValueError, match="no stretch"):
        ideal_of_text(IdealFleet(), 5, 5)
    with pytest.raises(ValueError, match="all come at once"):
        ideal_of_text(IdealFleet(ahead=False), 1, 2)
