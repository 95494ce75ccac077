"""The block after the one that is judged is sent before the verdict; whatever that is, the tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline_gateway.effects import Lane

from paceline.benchmark.ideal import VERIFY_PASS
from paceline.errors import InvalidArgument
from paceline.messages import Failed, NeedTokens, VerifierEvent, Verify
from paceline.speculation.governor import Reason
from tests.unit.gateway.laws import hash_law, perfect, plain_text_of, wrong_at_position
from tests.unit.gateway.simulated_devices import Devices
from tests.unit.gateway.simulated_fleet import Load, SimulatedFleet
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drain, verifies

LAW = hash_law(7)
PROMPT = (1, 2, 3)


def begun(
    folder: Path, period: int = 0, max_tokens: int = 24, stop: tuple[str, ...] = (), governed: bool = False
) -> Simulation:
    """The first block is judged, and everything that is known about the next one has come."""
    script = wrong_at_position(LAW, period) if period else perfect(LAW)
    simulation = Simulation(folder, LAW, script, prompt=PROMPT, max_tokens=max_tokens, stop=stop, governed=governed)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    drain(simulation, Lane.DRAFTER)
    return simulation


def follow_ups(simulation: Simulation) -> list[Verify]:
    return [command for command in verifies(simulation) if command.follows]


def test_a_verdict_that_was_hoped_for_begins_the_next_round_without_a_word(tmp_path: Path) -> None:
    simulation = begun(tmp_path)
    (sent,) = follow_ups(simulation)
    assert (sent.follows, sent.base_len, len(sent.block.tokens)) == (2, 9, 4)
    num_sent = len(verifies(simulation))
    deliver_verdict(simulation)
    assert simulation.committed == plain_text_of(LAW, PROMPT, 6)
    assert len(verifies(simulation)) == num_sent
    outstanding = simulation.loop.verifier.outstanding
    assert outstanding is not None
    assert (outstanding.round, outstanding.block, outstanding.follows) == (sent.round, sent.block, 0)
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, PROMPT, 24)
    assert simulation.loop.report(simulation.now).ahead_hits >= len(follow_ups(simulation)) > 1
    simulation.check_records()


def test_another_verdict_makes_it_void(tmp_path: Path) -> None:
    simulation = begun(tmp_path, period=6)
    (sent,) = follow_ups(simulation)
    assert any(
        isinstance(event, NeedTokens) and event.command_id == sent.round for event in simulation.waiting[Lane.VERIFIER]
    )
    deliver_verdict(simulation)
    newest = verifies(simulation)[-1]
    assert simulation.loop.verifier.follow_up is None
    assert (newest.round, newest.follows) == (sent.round + 1, 0) or simulation.loop.drafter.book.num_open
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, PROMPT, 24)


def test_none_is_sent_beyond_the_end(tmp_path: Path) -> None:
    simulation = begun(tmp_path, max_tokens=7)
    assert not follow_ups(simulation)  # one token would be left, which needs no draft
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, PROMPT, 7)


def test_it_is_said_again_after_a_broken_link_and_no_pass_is_lost(tmp_path: Path) -> None:
    simulation = begun(tmp_path)
    (sent,) = follow_ups(simulation)
    simulation.break_link(Lane.VERIFIER)
    simulation.mend_link(Lane.VERIFIER)
    assert verifies(simulation)[-1] == sent
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, PROMPT, 24)
    assert simulation.verifiers["v0"].passes == simulation.loop.report(simulation.now).target_passes


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("period", [0, 6])
def test_a_verifier_that_does_not_know_them_costs_nothing_but_the_hop(tmp_path: Path, period: int, late: bool) -> None:
    """One of the version before refuses them while it judges; a later one it takes for a round like any other."""
    simulation = begun(tmp_path, period)
    verifier = simulation.verifiers["v0"]
    judge = verifier._verify

    def without(command: Verify) -> list[VerifierEvent]:
        if command.follows and not late:
            return [Failed("s", 1, command.round, InvalidArgument("wait for its answer", field="round").to_failure())]
        return judge(replace(command, follows=0, expected=()))

    verifier._verify = without  # type: ignore[method-assign]
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, PROMPT, 24)
    assert simulation.finish is not None


def test_what_was_decided_for_it_is_what_its_verdict_teaches(tmp_path: Path) -> None:
    simulation = begun(tmp_path, governed=True)
    assert simulation.loop.verifier.follow_up is not None
    simulation.break_link(Lane.DRAFTER)
    deliver_verdict(simulation)
    deliver_verdict(simulation)
    last = simulation.records[-1]
    assert last.draft_tokens == 4
    assert last.decision is not None
    assert last.decision.reason is not Reason.NO_ROOM


def test_one_that_is_begun_when_the_generation_ends_is_no_hit(tmp_path: Path) -> None:
    simulation = begun(tmp_path)
    deliver_verdict(simulation)
    stop = simulation.commits[-1].texts[-1]
    simulation = begun(tmp_path, stop=("".join(simulation.commits[-1].texts[-3:-1]) + stop,))
    assert simulation.loop.verifier.follow_up is not None
    deliver_verdict(simulation)
    assert simulation.finish is not None
    assert all(record.target_passes for record in simulation.records if record.ahead_hit)


@pytest.mark.parametrize("rtt_s", [0.0002, 0.005])
def test_with_a_perfect_drafter_no_way_lies_between_two_passes(tmp_path: Path, rtt_s: float) -> None:
    fleet = SimulatedFleet(tmp_path, Devices(rtt_s=rtt_s, acceptance=1.0), Load(governed=False))
    fleet.run(1.0)
    assert fleet.run(5.0).goodput == pytest.approx(5 / VERIFY_PASS.seconds(5), rel=0.01)


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the tokenizer of all examples lies."""
    return tmp_path_factory.mktemp("letters")


@settings(max_examples=60, deadline=None)
@given(data=st.data(), period=st.integers(2, 12), size=st.integers(1, 5), max_tokens=st.integers(1, 30))
def test_any_order_of_events_and_faults_gives_the_same_tokens(
    letters: Path, data: st.DataObject, period: int, size: int, max_tokens: int
) -> None:
    simulation = Simulation(
        letters, LAW, wrong_at_position(LAW, period), prompt=PROMPT, max_tokens=max_tokens, num_draft_tokens=size
    )
    simulation.start()
    for _ in range(60):
        if simulation.terminal:
            break
        ready = [lane for lane in Lane if simulation.waiting[lane]]
        match data.draw(st.sampled_from(["deliver"] * 8 + ["twice", "forget", "break"])):
            case "forget":
                simulation.forget(Lane.VERIFIER)
            case "break" if not simulation.broken:
                lane = data.draw(st.sampled_from(list(Lane)))
                simulation.break_link(lane)
                simulation.mend_link(lane)
            case "twice" if ready:
                simulation.deliver(data.draw(st.sampled_from(ready)), copies=2)
            case _ if ready:
                simulation.deliver(data.draw(st.sampled_from(ready)))
            case _:
                simulation.step()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, PROMPT, max_tokens)
    simulation.check_records()
