"""The decisions of a session, without I/O: simulated replicas, the test delivers what it wants when it wants."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_gateway.effects import Lane

from paceline.messages import Draft, FinishReason, Open, TokenOrigin, Verify
from paceline.speculation.tree import DraftTree
from tests.unit.gateway.laws import (
    Script,
    bushy,
    hash_law,
    nothing,
    perfect,
    plain_text_of,
    too_deep,
    wrong_at,
    wrong_at_position,
)
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drafts, drain, verifies

LAW = hash_law(7)
SCRIPTS: dict[str, Script] = {
    "perfect": perfect(LAW),
    "wrong_at_0": wrong_at(LAW, 0),
    "wrong_at_2": wrong_at(LAW, 2),
    "wrong_sometimes": wrong_at_position(LAW, 5),
    "tree": bushy(LAW),
    "nothing": nothing,
    "too_long": too_deep(LAW),
    "out_of_vocab": lambda context, depth: DraftTree.chain([99, *perfect(LAW)(context, depth).tokens][:depth]),
}


@pytest.mark.parametrize("draft_ahead", [True, False])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_do_not_depend_on_the_block_size(
    tmp_path: Path, script: str, num_draft_tokens: int, draft_ahead: bool
) -> None:
    simulation = Simulation(
        tmp_path, LAW, SCRIPTS[script], num_draft_tokens=num_draft_tokens, draft_ahead=draft_ahead, max_tokens=23
    )
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 23)
    assert simulation.finish is not None
    assert simulation.finish.reason is FinishReason.LENGTH
    evidence = simulation.loop.report(simulation.now)
    assert evidence.target_passes == simulation.verifiers["v0"].passes == len(simulation.commits)
    assert 0 <= evidence.accepted_tokens <= evidence.draft_tokens
    assert evidence.accepted_tokens == sum(evidence.accepted_per_position)
    origins = [origin for commit in simulation.commits for origin in commit.origins]
    assert len(origins) == 23
    assert origins.count(TokenOrigin.ACCEPTED) == evidence.accepted_tokens
    for command in verifies(simulation):
        assert command.block.max_depth <= num_draft_tokens
        assert command.base_len + command.block.max_depth + 1 <= 3 + 23


def test_perfect_drafts_ahead_commit_a_whole_block_in_every_round(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=26)
    simulation.start()
    simulation.run()
    evidence = simulation.loop.report(simulation.now)
    assert evidence.target_passes == 1 + 5
    assert evidence.ahead_hits == 5
    assert evidence.accepted_tokens == evidence.draft_tokens == 20
    assert evidence.accepted_per_position == evidence.drafted_per_position == (5, 5, 5, 5)
    assert evidence.wasted_draft_tokens == 0
    assert evidence.methods == ("sim",)
    # Each block is sent with the verdict before it; the drafter has gone on meanwhile.
    assert [draft.assumed for draft in drafts(simulation)][:2] == [(), verifies(simulation)[1].block.tokens]
    assert [draft.max_depth for draft in drafts(simulation)][:2] == [5, 5]


def test_first_commands_go_out_together(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    kinds = [type(command) for command in simulation.sent]
    assert kinds.count(Open) == 2
    assert set(kinds) == {Open, Verify, Draft}
    first = verifies(simulation)[0]
    assert (first.round, first.base_len, first.block.tokens) == (1, 3, ())
    assert drafts(simulation)[0].assumed == ()


def test_a_rejected_block_makes_a_fresh_draft_that_supersedes(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, wrong_at(LAW, 1))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)  # the guess was right, the first token after it is wrong
    stale = drafts(simulation)[-1]
    assert stale.assumed == verifies(simulation)[1].block.tokens != ()
    deliver_verdict(simulation)
    fresh = drafts(simulation)[-1]
    assert (fresh.base_len, fresh.assumed, fresh.max_depth) == (5, (), 4)
    assert fresh.draft_id == stale.draft_id + 1
    assert simulation.loop.drafter.book.num_open == 2
    simulation.deliver(Lane.DRAFTER)
    assert len(verifies(simulation)) == 2  # the stale one is of no use
    simulation.deliver(Lane.DRAFTER)
    assert len(verifies(simulation)) == 3
    assert simulation.loop.report(simulation.now).wasted_draft_tokens == 5


def test_sequential_never_drafts_while_verifying(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), draft_ahead=False)
    simulation.start()
    assert [(draft.base_len, draft.max_depth) for draft in drafts(simulation)] == [(3, 1)]  # both read the prompt
    drain(simulation, Lane.DRAFTER)
    while not simulation.terminal:
        assert not (simulation.loop.verifier.outstanding and simulation.loop.drafter.book.num_open)
        simulation.step()
    assert simulation.loop.report(simulation.now).ahead_hits == 0


def test_a_draft_that_still_fits_is_waited_for(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    assert len(verifies(simulation)) == 2
    simulation.now += 0.5
    deliver_verdict(simulation)  # block 1 is judged; the draft for block 2 is still on its way
    assert len(verifies(simulation)) == 2
    assert len(drafts(simulation)) == 2
    simulation.now += 0.01
    drain(simulation, Lane.DRAFTER)
    assert [command.follows for command in verifies(simulation)[2:]] == [0, 3]  # and what was drafted meanwhile
    assert len(verifies(simulation)[2].block.tokens) == 4
    evidence = simulation.loop.report(simulation.now)
    assert evidence.ahead_hits == 1
    assert evidence.draft_wait_ms == pytest.approx(10.0)


def test_a_late_draft_costs_one_bounded_wait_and_is_used_when_it_comes(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    simulation.deliver(Lane.DRAFTER)  # Opened; the draft stays away
    deliver_verdict(simulation)
    assert simulation.loop.deadline == pytest.approx(0.05)
    assert len(verifies(simulation)) == 1
    simulation.wait(0.05)
    assert len(verifies(simulation)) == 2
    assert verifies(simulation)[1].block.tokens == ()
    deliver_verdict(simulation)
    assert len(verifies(simulation)) == 3  # it is known to be late: no second wait
    simulation.deliver(Lane.DRAFTER)
    deliver_verdict(simulation)
    # Drafted for positions 3..7; three of them have been decoded meanwhile.
    assert len(verifies(simulation)[3].block.tokens) == 2
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_a_draft_is_worth_two_rounds_of_waiting(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    simulation.deliver(Lane.DRAFTER)  # Opened; the draft stays away
    simulation.now = 0.2
    deliver_verdict(simulation)
    assert simulation.loop.deadline == pytest.approx(0.2 + 0.4)
    simulation.wait(0.4)
    simulation.now = 0.6 + 0.7
    deliver_verdict(simulation)  # the second round says more than the first, which read the prompt
    drain(simulation, Lane.DRAFTER)
    assert simulation.loop.verifier.typical_s == pytest.approx(0.7)


def test_at_most_two_drafts_are_open(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=40)
    simulation.start()
    simulation.deliver(Lane.DRAFTER)
    while not simulation.terminal:
        if simulation.waiting[Lane.VERIFIER]:
            simulation.deliver(Lane.VERIFIER)
        else:
            simulation.wait(0.05)
        assert simulation.loop.drafter.book.num_open <= 2
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 40)


def test_a_silent_drafter_is_given_up_and_tried_again(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    simulation.waiting[Lane.DRAFTER].clear()
    simulation.wait(10.0)
    assert simulation.attached[Lane.DRAFTER] is None
    simulation.wait(1.0)
    assert simulation.attached[Lane.DRAFTER] == "d0"
    simulation.run()
    assert simulation.loop.report(simulation.now).accepted_tokens > 0


def test_a_drafter_that_finds_nothing_is_asked_once_per_context(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, nothing, max_tokens=10)
    simulation.start()
    simulation.run()
    contexts = [(draft.base_len, draft.assumed) for draft in drafts(simulation)]
    assert len(contexts) == len(set(contexts))
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 10)
