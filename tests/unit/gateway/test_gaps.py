"""How long a session goes without a replica that it has lost: what is decided, when, and what is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_gateway.effects import Lane
from paceline_gateway.round_record import Fallback, RoundRecord

from tests.unit.gateway.laws import hash_law, perfect, plain_text_of
from tests.unit.gateway.simulation import Simulation, deliver_verdict, verifies

LAW = hash_law(7)
NUM_TOKENS = 60
TRAVEL_S = 2.0


def running(folder: Path, rounds: int = 2, **options: object) -> Simulation:
    """A generation that is between two verdicts."""
    simulation = Simulation(folder, LAW, perfect(LAW), max_tokens=NUM_TOKENS, **options)  # type: ignore[arg-type]
    simulation.start()
    while len(simulation.records) < rounds:
        simulation.step()
    return simulation


def with_gaps(simulation: Simulation, lane: Lane) -> list[RoundRecord]:
    """Runs to the end; the rounds that tell of a gap."""
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], NUM_TOKENS)
    name = f"{lane.value}_gap_s"
    return [record for record in simulation.records if getattr(record, name) is not None]


def test_without_a_loss_there_is_no_gap(tmp_path: Path) -> None:
    for lane in Lane:
        assert with_gaps(running(tmp_path), lane) == []


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_lost_verifiers_gap_ends_with_the_next_verdict(tmp_path: Path, comes_back: bool) -> None:
    simulation = running(tmp_path)
    simulation.available[Lane.VERIFIER] = ["v1"]
    simulation.break_link(Lane.VERIFIER)
    if comes_back:
        simulation.wait(0.5)
        simulation.mend_link(Lane.VERIFIER)
        assert simulation.attached[Lane.VERIFIER] == "v0"
    else:
        simulation.wait(simulation.patience.return_window_s)
        assert simulation.attached[Lane.VERIFIER] == "v1"
    without_s = 0.5 if comes_back else simulation.patience.return_window_s
    simulation.wait(TRAVEL_S)
    deliver_verdict(simulation)
    (record,) = with_gaps(simulation, Lane.VERIFIER)
    assert record.verifier_gap_s == pytest.approx(without_s + TRAVEL_S)
    assert record.overhead_s is None, "a gap is no overhead of a round"


def test_a_silent_verifiers_gap_begins_with_the_command_that_it_does_not_answer(tmp_path: Path) -> None:
    simulation = running(tmp_path)
    simulation.available[Lane.VERIFIER] = ["v1"]
    simulation.waiting[Lane.VERIFIER].clear()
    deadline = simulation.loop.deadline
    silence_s = simulation.patience.verifier_silence_s
    assert deadline == pytest.approx(simulation.now + silence_s)
    simulation.wait(silence_s)
    assert simulation.attached[Lane.VERIFIER] == "v1"
    (record,) = with_gaps(simulation, Lane.VERIFIER)
    assert record.verifier_gap_s == pytest.approx(silence_s)


# --- drafters ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rounds", [1, 2, 3, 4])
@pytest.mark.parametrize("draft_ahead", [True, False])
def test_after_the_loss_of_its_drafter_a_session_decodes_plainly_within_one_rounds_deadline(
    tmp_path: Path, frozen: bool, rounds: int, draft_ahead: bool
) -> None:
    simulation = running(tmp_path, rounds, draft_ahead=draft_ahead)
    patience = simulation.patience
    if frozen:
        simulation.drafter.handle = lambda command: []  # type: ignore[method-assign]
        simulation.waiting[Lane.DRAFTER].clear()
    else:
        simulation.available[Lane.DRAFTER] = []
        simulation.break_link(Lane.DRAFTER)
    while not simulation.terminal:
        verdict_at, asked = simulation.now, len(verifies(simulation))
        while simulation.waiting[Lane.VERIFIER]:
            simulation.deliver(Lane.VERIFIER)
        while not simulation.terminal and len(verifies(simulation)) == asked:
            simulation.step()
        # A drafter that is gone is not waited for at all, one that only says nothing for one wait of bounded length.
        assert simulation.now - verdict_at <= (patience.draft_ceiling_s if frozen else 0.0)
    assert any(record.fallback for record in simulation.records)
    expected = {Fallback.LATE_DRAFT} if frozen else {Fallback.DRAFTER_LOST}
    assert {record.fallback for record in simulation.records} <= {None, *expected}
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], NUM_TOKENS)


def test_another_drafter_goes_on_in_the_same_request_and_the_gap_is_told(tmp_path: Path) -> None:
    simulation = running(tmp_path)
    simulation.available[Lane.DRAFTER] = ["d1"]
    simulation.break_link(Lane.DRAFTER)
    simulation.wait(simulation.patience.return_window_s)
    assert simulation.attached[Lane.DRAFTER] == "d1"
    (record,) = with_gaps(simulation, Lane.DRAFTER)
    assert record.drafter_gap_s == pytest.approx(simulation.patience.return_window_s)
    later = simulation.records[simulation.records.index(record) :]
    assert sum(one.accepted_tokens for one in later) > 0
