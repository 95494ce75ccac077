"""The short form of the chaos suite: every kind of fault once. The long form is `make test-chaos`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.run import ChaosOptions, run
from tests.chaos.schedule import SHORT_DECK

SHORT = ChaosOptions(
    seed=4,
    seconds=24.0,
    streams=12,
    deck=SHORT_DECK,
    mean_gap_s=1.7,
    longest_fault_s=2.5,
    longest_turn=100,
    warm_up_s=2.0,
    blackout=False,
)


@pytest.mark.timeout(600)
async def test_every_stream_is_as_if_nothing_had_happened_and_nothing_is_left(tmp_path: Path) -> None:
    report = await run(SHORT, tmp_path)
    shown = "\n".join(report.lines())
    print(shown)
    assert report.passed, shown
    # The torment was one, and the fleet went on working in it.
    assert all(report.faults_injected.values()), shown
    assert report.resumes, shown
    assert report.complete > 2 * SHORT.streams, shown
