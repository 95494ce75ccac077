"""Traces: what the governor makes of a world that changes, against plain decoding and against the best fixed size.

A phase counts from its first moment, with all that the governor has yet to find out. The best fixed size is that of the
phase alone, with hindsight.
"""

import dataclasses
from collections.abc import Sequence

import pytest

from tests.unit.speculation.fleet_model import FleetModel, Phase, goodputs

PLAIN_SHARE = 0.97
BEST_SHARE = 0.93
MOST_CHANGES_PER_MINUTE = 60


def check(phases: Sequence[Phase], fixed: Sequence[int]) -> None:
    """Compares with plain decoding and the fixed sizes given, drafted in turn and ahead.

    Fixed sizes are run for a part of a phase only: nothing changes in it.
    """
    results = FleetModel().run(phases)
    for phase, result in zip(phases, results, strict=True):
        short = dataclasses.replace(phase, seconds=3.0)
        plain = goodputs([short], pinned=0)[0]
        best = max(plain, *[goodputs([short], size, ahead)[0] for size in fixed for ahead in (False, True)])
        assert result.goodput >= PLAIN_SHARE * plain, (phase, result, plain)
        assert result.goodput >= BEST_SHARE * best, (phase, result, best)
        assert result.changes_per_minute <= MOST_CHANGES_PER_MINUTE


def test_acceptance_collapses_and_comes_back() -> None:
    check([Phase(40.0, acceptance=acceptance) for acceptance in (0.9, 0.2, 0.9)], fixed=(1, 2, 5, 8))


def test_the_drafter_becomes_slow_and_recovers() -> None:
    usual, slow = 0.003, 0.060
    check(
        [Phase(30.0, draft_token_s=usual), Phase(40.0, draft_token_s=slow), Phase(60.0, draft_token_s=usual)],
        fixed=(1, 5, 6),
    )


def test_a_drafter_that_is_slow_from_the_start() -> None:
    check([Phase(40.0, draft_token_s=0.060)], fixed=(1, 4))


@pytest.mark.parametrize(("sessions", "fixed"), [((1, 4, 16), (3, 5, 6)), ((32, 16), (2, 3))])
def test_load_rises_until_passes_are_bound_by_arithmetic(sessions: tuple[int, ...], fixed: tuple[int, ...]) -> None:
    check([Phase(6.0, count, per_token_s=0.001) for count in sessions], fixed)


def test_beyond_saturation_there_is_nothing_to_gain_and_nothing_is_lost() -> None:
    check([Phase(16.0, 16, acceptance=0.5, fixed_s=0.002, per_token_s=0.006)], fixed=(1, 4))
