"""A verifier that drafts by itself: its next block rides on the verdict. Simulated replicas, no I/O."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_gateway.effects import Lane
from paceline_gateway.round_record import Fallback

from paceline.errors import Failure
from paceline.messages import AcceptanceRule, Failed, NeedTokens, Open, Verified
from paceline.speculation.tree import DraftTree
from tests.unit.gateway.laws import (
    Script,
    bushy,
    garbage,
    hash_law,
    nothing,
    perfect,
    plain_text_of,
    too_deep,
    wrong_at,
    wrong_at_position,
)
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drafts, verifies

LAW = hash_law(7)
PLAIN = plain_text_of(LAW, [1, 2, 3], 24)
SCRIPTS: dict[str, Script] = {
    "perfect": perfect(LAW),
    "wrong_at_0": wrong_at(LAW, 0),
    "wrong_sometimes": wrong_at_position(LAW, 5),
    "tree": bushy(LAW),
    "nothing": nothing,
    "too_deep": too_deep(LAW),
    "garbage": garbage(3),
}


def self_drafting(folder: Path, script: Script | None = None, **options: object) -> Simulation:
    """A generation on verifiers that draft by themselves, with a drafter that would be of use too."""
    return Simulation(folder, LAW, perfect(LAW), self_draft=script or perfect(LAW), **options)  # type: ignore[arg-type]


def opens(simulation: Simulation) -> list[Open]:
    return [command for command in simulation.sent if isinstance(command, Open)]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_do_not_depend_on_what_the_verifier_drafts(tmp_path: Path, script: str, num_draft_tokens: int) -> None:
    simulation = self_drafting(tmp_path, SCRIPTS[script], num_draft_tokens=num_draft_tokens)
    simulation.start()
    simulation.run()
    assert simulation.committed == PLAIN
    simulation.check_records()
    # Nothing is asked of a drafter, and none is held.
    assert len(opens(simulation)) == 1
    assert not drafts(simulation)
    for command in verifies(simulation):
        assert command.block.max_depth <= num_draft_tokens
        assert command.base_len + command.block.max_depth + 1 <= 3 + 24
        # One token comes with this verdict at least, and one with the next in any case.
        assert command.next_depth == max(min(num_draft_tokens, 3 + 24 - command.base_len - 2), 0)


def test_perfect_drafts_commit_a_whole_block_in_every_round(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, max_tokens=26)
    simulation.start()
    simulation.run()
    evidence = simulation.loop.report(simulation.now)
    assert evidence.target_passes == 1 + 5
    assert evidence.accepted_tokens == evidence.draft_tokens == 20
    assert evidence.accepted_per_position == evidence.drafted_per_position == (5, 5, 5, 5)
    assert (evidence.ahead_hits, evidence.wasted_draft_tokens) == (0, 0)
    assert evidence.methods == ("own",)
    assert (evidence.verifier, evidence.drafter, evidence.drafter_memory_bytes) == ("v0", "", 500)


def test_drafting_is_not_charged_to_verifying(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, max_tokens=8)
    simulation.start()
    simulation.run()
    evidence = simulation.loop.report(simulation.now)
    assert [command.next_depth for command in verifies(simulation)] == [4, 4, 0]
    assert evidence.draft_ms == pytest.approx(2 * 0.2)
    assert evidence.verify_ms == pytest.approx(3 * (1.2 - 0.1) - 2 * 0.2)
    assert evidence.draft_wait_ms == 0


def test_a_tree_is_judged_whole(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, bushy(LAW))
    simulation.start()
    deliver_verdict(simulation)
    assert verifies(simulation)[1].block == bushy(LAW)(simulation.loop.log.tokens, 4)


def test_ratio_judges_the_main_path(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, bushy(LAW), rule=AcceptanceRule.RATIO)
    simulation.start()
    deliver_verdict(simulation)
    command = verifies(simulation)[1]
    assert command.block.is_chain
    assert command.block.tokens == bushy(LAW)(simulation.loop.log.tokens, 4).tokens[:2]
    assert command.draft_probs == ()
    simulation.run()
    assert simulation.committed == PLAIN


def test_a_block_that_nobody_asked_for_is_ignored(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, num_draft_tokens=0)
    simulation.start()
    block = perfect(LAW)([1, 2, 3, PLAIN[0]], 4)
    simulation.say(Lane.VERIFIER, Verified("s", 1, 1, 3, (), PLAIN[:1], 3, next_block=block))
    assert not verifies(simulation)[1].block.tokens


@pytest.mark.parametrize(("method", "by_verifier"), [("", True), ("own", True), ("sim", False)])
def test_a_method_that_is_named_decides_who_drafts(tmp_path: Path, method: str, by_verifier: bool) -> None:
    simulation = self_drafting(tmp_path, method=method)
    simulation.start()
    simulation.run()
    assert simulation.committed == PLAIN
    evidence = simulation.loop.report(simulation.now)
    assert evidence.methods == (("own",) if by_verifier else ("sim",))
    assert bool(drafts(simulation)) != by_verifier
    assert any(command.next_depth for command in verifies(simulation)) == by_verifier


def test_a_verdict_that_is_said_again_brings_its_block_again(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path)
    simulation.start()
    deliver_verdict(simulation)
    simulation.break_link(Lane.VERIFIER)
    simulation.mend_link(Lane.VERIFIER)
    deliver_verdict(simulation)
    assert len(verifies(simulation)[-1].block.tokens) == 4
    simulation.run()
    assert simulation.committed == PLAIN
    assert simulation.verifiers["v0"].passes == len(simulation.commits)


def test_a_round_that_lacks_tokens_goes_on_with_drafts(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path)
    simulation.start()
    deliver_verdict(simulation)
    asked = verifies(simulation)[-1]
    simulation.say(Lane.VERIFIER, NeedTokens("s", 1, asked.round, have_len=1))
    again = verifies(simulation)[-1]
    assert (again.block, again.next_depth, len(again.catch_up)) == (asked.block, 4, asked.base_len - 1)
    simulation.run()
    assert simulation.committed == PLAIN


@pytest.mark.parametrize("drafts_first", [True, False])
def test_a_session_that_moves_is_drafted_for_as_its_new_verifier_does(tmp_path: Path, drafts_first: bool) -> None:
    simulation = self_drafting(tmp_path, max_tokens=60)
    simulation.verifiers["v1" if drafts_first else "v0"].self_draft = None
    simulation.start()
    for _ in range(5):
        simulation.step()
    assert simulation.attached[Lane.DRAFTER] == (None if drafts_first else "d0")
    simulation.available[Lane.VERIFIER] = ["v1"]
    simulation.break_link(Lane.VERIFIER)
    simulation.wait(1.0)
    moved_at = len(verifies(simulation))
    assert simulation.attached[Lane.DRAFTER] == ("d0" if drafts_first else None)
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 60)
    assert set(simulation.loop.report(simulation.now).methods) == {"own", "sim"}
    # The round in flight is said again as it was; all later ones are asked for as the new verifier can answer.
    assert all(bool(command.next_depth) != drafts_first for command in verifies(simulation)[moved_at:-2])
    simulation.check_records()


def test_rounds_without_a_block_say_why(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, nothing, max_tokens=10)
    simulation.start()
    simulation.run()
    causes = [record.fallback for record in simulation.records]
    # The first one reads the prompt; the last one has no room for a draft.
    assert causes == [None, *[Fallback.NOTHING_PROPOSED] * 8, None]


def test_a_verifier_that_refuses_its_own_blocks_is_asked_for_no_more(tmp_path: Path) -> None:
    simulation = self_drafting(tmp_path, lambda context, depth: DraftTree.chain([99]))
    refusal = Failure("invalid_argument", "no such token", "block")
    simulation.start()
    while not simulation.terminal:
        if simulation.loop.verifier.outstanding and verifies(simulation)[-1].block.tokens:
            simulation.waiting[Lane.VERIFIER].clear()
            simulation.say(Lane.VERIFIER, Failed("s", 1, verifies(simulation)[-1].round, refusal))
        else:
            simulation.step()
    assert simulation.committed == PLAIN
    assert sum(bool(command.block.tokens) for command in verifies(simulation)) == 3
