"""Replicas that come back as new processes, perhaps with other limits than before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from paceline_gateway.effects import Lane

from tests.unit.gateway.laws import hash_law, perfect, plain_text_of
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drafts, drain, verifies

LAW = hash_law(7)
PLAIN = plain_text_of(LAW, [1, 2, 3], 24)


def begun(folder: Path) -> Simulation:
    """A generation in its second round."""
    simulation = Simulation(folder, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    return simulation


@pytest.mark.parametrize("lane", list(Lane))
def test_a_restarted_replica_is_told_everything(tmp_path: Path, lane: Lane) -> None:
    simulation = begun(tmp_path)
    simulation.break_link(lane, restart=True)
    simulation.mend_link(lane, restarted=True)
    simulation.run()
    assert simulation.committed == PLAIN


def test_a_restarted_verifier_gets_blocks_as_large_as_it_takes_now(tmp_path: Path) -> None:
    simulation = begun(tmp_path)
    assert verifies(simulation)[-1].block.num_draft_tokens > 2
    simulation.break_link(Lane.VERIFIER, restart=True)
    simulation.infos[Lane.VERIFIER] = replace(simulation.infos[Lane.VERIFIER], max_draft_tokens=2)
    simulation.mend_link(Lane.VERIFIER, restarted=True)
    repeated = len(verifies(simulation))  # it cuts what it was asked before
    simulation.run()
    assert simulation.committed == PLAIN
    assert {command.block.num_draft_tokens for command in verifies(simulation)[repeated:]} <= {0, 1, 2}


def test_a_restarted_verifier_that_drafts_by_itself_now_needs_no_drafter(tmp_path: Path) -> None:
    simulation = begun(tmp_path)
    simulation.break_link(Lane.VERIFIER, restart=True)
    simulation.verifiers["v0"].self_draft = perfect(LAW)
    simulation.mend_link(Lane.VERIFIER, restarted=True)
    assert simulation.attached[Lane.DRAFTER] is None
    simulation.run()
    assert simulation.committed == PLAIN
    assert verifies(simulation)[-1].next_depth == 0
    assert max(command.next_depth for command in verifies(simulation)) > 0


def test_a_restarted_drafter_is_asked_for_as_much_as_it_drafts_now(tmp_path: Path) -> None:
    simulation = begun(tmp_path)
    assert max(command.max_depth for command in drafts(simulation)) > 1
    simulation.break_link(Lane.DRAFTER, restart=True)
    before = len(drafts(simulation))
    simulation.infos[Lane.DRAFTER] = replace(simulation.infos[Lane.DRAFTER], max_draft_tokens=1)
    simulation.mend_link(Lane.DRAFTER, restarted=True)
    simulation.run()
    assert simulation.committed == PLAIN
    assert {command.max_depth for command in drafts(simulation)[before:]} == {1}
