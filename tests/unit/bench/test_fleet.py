"""Figures of the fleet beside one process, and of drafting ahead, from what was generated."""

from __future__ import annotations

import math

import pytest

from bench.fleet import AHEAD, FLEET, FLEET_PLAIN, PROCESS, PROCESS_PLAIN, Generated, quantile, results


def _generated(seconds: float, rounds: int = 2, token: int = 1) -> Generated:
    return Generated((token,) * 8, seconds, verify_s=seconds / 2, draft_s=seconds / 4, rounds=rounds, draft_tokens=6)


def test_ratios_are_medians_over_runs_of_pairs() -> None:
    runs = {
        FLEET: [[_generated(1.0)], [_generated(2.0)], [_generated(1.25)]],
        PROCESS: [[_generated(0.9)], [_generated(1.0)], [_generated(1.0)]],
        AHEAD: [[_generated(0.5)]] * 3,
        FLEET_PLAIN: [[_generated(1.0, rounds=8)]] * 3,
        PROCESS_PLAIN: [[_generated(1.0, rounds=8, token=2)]] * 3,
    }
    found = results("target", 4, 8, runs, 2.5, 3.5)
    assert [ratio.value for ratio in found.ratios] == pytest.approx([0.8, 1.0, 2.0, 2.5, 3.5])
    assert [ratio.kept for ratio in found.ratios] == [False, True, True, True, False]
    assert (found.same_rounds, found.generations, found.repeats) == (3, 6, 3)
    fleet = next(row for row in found.rows if row.way == FLEET)
    assert fleet.tokens_per_second == pytest.approx(8 / 1.25)
    assert (fleet.round_ms, fleet.verify_ms, fleet.draft_ms, fleet.rest_ms) == pytest.approx(
        (625.0, 312.5, 156.25, 156.25)
    )


def test_a_quantile_lies_within_its_bucket() -> None:
    buckets = {0.001: 0.0, 0.002: 4.0, 0.003: 8.0, math.inf: 10.0}
    assert quantile(buckets, 0.5) == pytest.approx(0.00225)
    assert quantile(buckets, 0.4) == pytest.approx(0.002)
    assert quantile(buckets, 0.95) == pytest.approx(0.003)
    assert quantile({}, 0.5) == 0.0
