"""How sessions share passes: all together, in halves, or as it comes. The times are those that arithmetic gives."""

from __future__ import annotations

import math

import pytest

from paceline.speculation.replica_times import DrafterTimes, DraftTimes, PassTimes, Users, VerifierTimes

SESSIONS = 8
FIXED_S, TOKEN_S = 0.030, 0.0005


class Session:
    """One that uses a replica."""


USERS = [Session() for _ in range(SESSIONS)]


def verifier(gather_window_s: float = 0.020) -> VerifierTimes:
    """One whose passes take `FIXED_S` and `TOKEN_S` per token, with `SESSIONS` sessions that are back at once."""
    times = VerifierTimes(gather_window_s)
    for session in USERS:
        times.users.add(session)
    for drafts in (0, 3) * 200:
        tokens = SESSIONS * (1 + drafts)
        times.observe(
            PassTimes(FIXED_S + TOKEN_S * tokens, batch_sessions=SESSIONS, batch_tokens=tokens), num_draft_tokens=drafts
        )
    return times


def pass_s(tokens: float) -> float:
    return FIXED_S + TOKEN_S * tokens


def test_all_together_is_the_wait_and_then_the_pass_of_all() -> None:
    assert verifier().round_s(3, wait_s=0.015) == pytest.approx(0.015 + pass_s(4 * SESSIONS), rel=0.01)


def test_a_verifier_that_does_not_wait_so_long_has_halves_at_best() -> None:
    times = verifier(gather_window_s=0.010)
    assert times.together_s(3, 0.015, 0.015) == math.inf
    halves_s = 2 * pass_s(4 * SESSIONS / 2)
    assert times.halves_s(3, 0.015, slack_s=0.0) == pytest.approx(halves_s, rel=0.01)
    assert times.round_s(3, wait_s=0.015) == pytest.approx(halves_s, rel=0.01)


def test_halves_are_no_halves_when_a_draft_takes_longer_than_a_pass() -> None:
    times, longer_s = verifier(), pass_s(4 * SESSIONS / 2) + 0.005
    assert times.halves_s(3, longer_s, slack_s=0.001) == math.inf
    assert times.halves_s(3, longer_s, slack_s=0.006) == pytest.approx(2 * longer_s, rel=0.01)


def test_plain_sessions_that_are_back_at_once_are_in_every_pass() -> None:
    assert verifier().round_s(0) == pytest.approx(pass_s(SESSIONS), rel=0.01)


def test_drafts_in_step_wait_for_no_step_of_others() -> None:
    times = DrafterTimes()
    for batch in (1, 8) * 100:
        times.observe(4, DraftTimes(4 * (0.002 + 0.001 * batch), batch_sessions=batch))
    assert times.draft_s(4, 8.0, in_step=True) == pytest.approx(0.040, rel=0.02)
    assert times.draft_s(4, 8.0, in_step=False) == pytest.approx(0.045, rel=0.02)


def test_a_step_of_a_drafter_that_stalls_is_one_pause_however_many_drafts_share_it() -> None:
    times = DrafterTimes()
    for _ in range(100):
        times.observe(4, DraftTimes(0.020, batch_sessions=8))
    for _ in range(8):
        times.observe(4, DraftTimes(1.0, batch_sessions=8))
    assert times.step_time.at(8) < 2 * 0.005


def test_a_session_that_is_dropped_without_a_word_is_no_user_any_more() -> None:
    users, stays, goes = Users(), Session(), Session()
    users.add(stays)
    users.add(goes)
    assert users.count == 2
    del goes
    users.add(stays)
    assert users.count == 1
    users.discard(stays)
    assert users.count == 0


def test_a_pass_with_more_sessions_than_this_gateway_has_is_shared_with_another_gateway() -> None:
    times = verifier()
    for _ in range(40 * 16):
        times.observe(PassTimes(pass_s(16), batch_sessions=16, batch_tokens=16), num_draft_tokens=0)
    assert times.sessions == pytest.approx(16, rel=0.05)
