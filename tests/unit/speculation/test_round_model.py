"""What is expected of a round against the discrete-event model of the same fleet (`benchmark/ideal.py`)."""

from __future__ import annotations

import dataclasses

import pytest

from paceline.benchmark.ideal import IdealFleet, ideal
from paceline.engine.simulated.pass_time import PassTime
from paceline.speculation.replica_times import DrafterTimes, DraftTimes, PassTimes, VerifierTimes
from paceline.speculation.round_model import RoundModel

_MS = 1e-3
_SIZE = 4
_SECONDS = 12.0
SLOW = IdealFleet(
    num_sessions=64,
    num_verifiers=4,
    num_drafters=2,
    num_draft_tokens=_SIZE,
    verify_pass=PassTime(120.0, 0.2),
    draft_pass=PassTime(12.0, 0.2),
)
"""Devices that are slow, so that drafts take longer than passes wait for company and shorter than a pass."""


class _Session:
    """One that uses a verifier or a drafter."""


def round_model(fleet: IdealFleet, users: list[_Session]) -> RoundModel:
    """Of one verifier and one drafter, whose passes and drafts were seen with few sessions and with all."""
    rtt_s = fleet.rtt_ms * _MS
    verifier = VerifierTimes(fleet.gather_window_ms * _MS)
    for session in users[: fleet.num_sessions // fleet.num_verifiers]:
        verifier.users.add(session)
    drafter = DrafterTimes()
    for session in users[: fleet.num_sessions // fleet.num_drafters]:
        drafter.users.add(session)
    for share in (0.5, 1.0) * 100:
        sessions = round(share * verifier.users.count)
        tokens = sessions * (1 + _SIZE)
        verify_s = fleet.verify_pass.seconds(tokens)
        verifier.observe(
            PassTimes(verify_s, period_s=verify_s + rtt_s, batch_sessions=sessions, batch_tokens=tokens), _SIZE
        )
        drafts = round(share * drafter.users.count)
        took_s = _SIZE * fleet.draft_pass.seconds(drafts) + rtt_s
        drafter.observe(_SIZE, DraftTimes(took_s, rest_s=rtt_s, batch_sessions=drafts))
    gains = [fleet.acceptance ** (place + 1) for place in range(_SIZE + 1)]
    return RoundModel(verifier, drafter, gains)


def test_ahead_sessions_whose_drafts_were_right_miss_no_pass() -> None:
    """Otherwise both ways were thought to be alike, and sessions that draft in turn stayed at 0.85 of the best."""
    fleet = SLOW
    users = [_Session() for _ in range(fleet.num_sessions)]
    model = round_model(fleet, users)
    ahead = fleet.num_sessions * model.block(_SIZE, ahead=True).rate
    in_turn = fleet.num_sessions * model.block(_SIZE, ahead=False).rate
    assert ahead > 1.1 * in_turn
    assert ahead == pytest.approx(ideal(fleet, _SECONDS).tokens_per_second, rel=0.05)
    in_turn_fleet = dataclasses.replace(fleet, ahead=False)
    assert in_turn == pytest.approx(ideal(in_turn_fleet, _SECONDS).tokens_per_second, rel=0.05)
