"""Replicas that are late, lost, full or confused: what a session decides, without I/O."""

from __future__ import annotations

from pathlib import Path

import pytest
from paceline_gateway.effects import Lane

from paceline.errors import CapacityExceeded, Failure, Fenced, InvalidArgument, PacelineError, Unavailable
from paceline.messages import Drafted, Failed, NeedTokens, Open, Verified
from paceline.speculation.tree import DraftTree
from tests.unit.gateway.laws import (
    hash_law,
    perfect,
    plain_text_of,
    wrong_at_position,
)
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drafts, drain, verifies

LAW = hash_law(7)


def test_late_and_repeated_answers_change_nothing(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, wrong_at_position(LAW, 5))
    simulation.start()
    seen: list[Verified | Drafted] = []
    while not simulation.terminal:
        for lane in Lane:
            for event in list(simulation.waiting[lane]):
                if isinstance(event, Verified | Drafted) and event not in seen:
                    seen.append(event)
        for event in seen[:-1]:
            simulation.say(Lane.VERIFIER if isinstance(event, Verified) else Lane.DRAFTER, event)
            if simulation.terminal:
                break
        else:
            simulation.step()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_answers_of_another_epoch_change_nothing(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    simulation.say(Lane.VERIFIER, Verified("s", 0, 1, 3, (), (9,), 3))
    simulation.say(Lane.VERIFIER, Failed("s", 0, 1, Failure("fenced", "old")))
    simulation.say(Lane.DRAFTER, Drafted("s", 0, 1, DraftTree.chain([9]), 3))
    assert simulation.commits == []
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


@pytest.mark.parametrize("path_and_tokens", [((), ()), ((), (1, 2)), ((9,), (1, 2)), ((), (-1,))])
def test_a_verdict_that_makes_no_sense_ends_this_request(
    tmp_path: Path, path_and_tokens: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    path, tokens = path_and_tokens
    simulation.say(Lane.VERIFIER, Verified("s", 1, 1, 3, path, tokens, 3))
    assert isinstance(simulation.error, PacelineError)
    assert simulation.attached == {Lane.VERIFIER: None, Lane.DRAFTER: None}


def test_need_tokens_is_answered_with_the_same_round_and_the_missing_tokens(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    first = verifies(simulation)[0]
    simulation.say(Lane.VERIFIER, NeedTokens("s", 1, 1, have_len=1))
    again = verifies(simulation)[1]
    assert (again.round, again.base_len, again.block) == (first.round, first.base_len, first.block)
    assert again.catch_up == (2, 3)
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_a_drafter_that_is_behind_gets_the_tokens_it_lacks(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    simulation.drafter.sessions["s"].crop(1)
    simulation.run()
    assert any(len(draft.catch_up) == draft.base_len - 1 for draft in drafts(simulation))
    assert simulation.loop.report(simulation.now).accepted_tokens > 0
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


@pytest.mark.parametrize("lane", list(Lane))
def test_an_evicted_session_is_opened_again(tmp_path: Path, lane: Lane) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    for _ in range(6):
        simulation.step()
    simulation.forget(lane)
    simulation.run()
    opens = [command for command in simulation.sent if isinstance(command, Open)]
    assert len(opens) == 3
    assert len(opens[-1].tokens) > 3
    assert opens[-1].generation_start == 3
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_a_round_that_was_cancelled_on_the_verifier_is_asked_again_in_a_new_session(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    asked = verifies(simulation)[-1]
    simulation.waiting[Lane.VERIFIER].clear()
    simulation.forget(Lane.VERIFIER)
    simulation.say(Lane.VERIFIER, Failed("s", 1, asked.round, Failure("cancelled", "the session was closed")))
    opened, again = simulation.sent[-2:]
    assert isinstance(opened, Open)
    assert len(opened.tokens) == asked.base_len
    assert again == asked
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_a_verifier_that_cancels_for_ever_ends_the_request(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.verifiers["v0"].refusals.extend([Failure("cancelled", "the session was closed")] * 99)
    simulation.start()
    simulation.run()
    assert isinstance(simulation.error, PacelineError)
    assert len(verifies(simulation)) == 7


def test_a_verifier_that_evicts_for_ever_ends_the_request(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    while not simulation.terminal:
        simulation.forget(Lane.VERIFIER)
        simulation.say(Lane.VERIFIER, NeedTokens("s", 1, 1, 0))
    assert isinstance(simulation.error, PacelineError)


def test_a_refused_block_becomes_a_plain_round(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    simulation.verifiers["v0"].refusals.append(Failure("invalid_argument", "no such token", "block"))
    deliver_verdict(simulation)
    refused = verifies(simulation)[-1]
    assert refused.block.tokens
    simulation.deliver(Lane.VERIFIER)
    again = verifies(simulation)[-1]
    assert (again.base_len, again.block.tokens) == (refused.base_len, ())
    assert again.round == refused.round + 1
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_a_refused_plain_round_is_the_requests_error(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.verifiers["v0"].refusals.append(Failure("invalid_argument", "top_k is bad", "sampling.top_k"))
    simulation.start()
    simulation.run()
    assert isinstance(simulation.error, InvalidArgument)
    assert simulation.error.field == "sampling.top_k"


def test_a_full_verifier_is_asked_again_a_few_times(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    full = Failure("capacity_exceeded", "all pages are taken")
    simulation.verifiers["v0"].refusals.extend([full] * 5)
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_a_full_verifier_is_an_error_in_the_end(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    full = Failure("capacity_exceeded", "all pages are taken")
    simulation.verifiers["v0"].refusals.extend([full] * 99)
    simulation.start()
    simulation.run()
    assert isinstance(simulation.error, CapacityExceeded)
    assert simulation.error.message == "all pages are taken"
    assert len(verifies(simulation)) == 6


def test_a_full_verifier_is_left_for_another(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = ["v0", "v1"]
    simulation.verifiers["v0"].refusals.extend([Failure("capacity_exceeded", "all pages are taken")] * 99)
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)
    assert simulation.loop.report(simulation.now).verifier == "v1"


def test_a_draining_verifier_is_left_at_once(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    for _ in range(4):
        simulation.step()
    simulation.available[Lane.VERIFIER] = ["v0", "v1"]
    simulation.verifiers["v0"].refusals.append(Failure("unavailable", "draining"))
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)
    assert simulation.loop.report(simulation.now).verifier == "v1"
    assert simulation.now < 0.5


def test_the_only_verifier_drains(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.verifiers["v0"].refusals.extend([Failure("unavailable", "draining")] * 99)
    simulation.start()
    simulation.run()
    assert isinstance(simulation.error, Unavailable)
    assert len(verifies(simulation)) == 6
    assert simulation.now > 1.0  # with pauses


def test_a_verifier_that_judges_no_drafts_is_not_sent_any(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_draft_tokens=0)
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)
    assert not drafts(simulation)


def test_fenced_ends_the_request(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.verifiers["v0"].refusals.append(Failure("fenced", "newer epoch"))
    simulation.start()
    simulation.run()
    assert isinstance(simulation.error, Fenced)


def test_a_broken_link_replays_the_round(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    round_in_flight = verifies(simulation)[-1]
    simulation.break_link(Lane.VERIFIER)
    simulation.mend_link(Lane.VERIFIER)
    assert verifies(simulation)[-1] == round_in_flight
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)
    assert simulation.verifiers["v0"].passes == len(simulation.commits)  # answered from memory


def test_a_verifier_that_does_not_come_back_is_replaced(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    simulation.break_link(Lane.VERIFIER)
    simulation.available[Lane.VERIFIER] = ["v1"]
    simulation.wait(0.9)
    assert simulation.attached[Lane.VERIFIER] == "v0"
    simulation.wait(0.1)
    assert simulation.attached[Lane.VERIFIER] == "v1"
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_no_verifier_at_all_is_unavailable(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = []
    simulation.start()
    simulation.wait(1.9)
    assert simulation.error is None
    simulation.wait(0.1)
    assert isinstance(simulation.error, Unavailable)
    assert "toy" in simulation.error.message


def test_a_lost_verifier_and_no_other_is_unavailable_after_its_time(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    deliver_verdict(simulation)
    simulation.available[Lane.VERIFIER] = []
    simulation.break_link(Lane.VERIFIER)
    simulation.wait(9.9)
    assert simulation.error is None
    simulation.wait(0.1)
    assert isinstance(simulation.error, Unavailable)
    assert simulation.attached[Lane.DRAFTER] is None


def test_a_dead_drafter_means_plain_decoding_until_another_is_there(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=60)
    simulation.start()
    for _ in range(6):
        simulation.step()
    simulation.available[Lane.DRAFTER] = []
    simulation.break_link(Lane.DRAFTER)
    for _ in range(3):
        deliver_verdict(simulation)  # what was drafted before is still used
    assert verifies(simulation)[-1].block.tokens == ()
    simulation.wait(1.0)
    simulation.available[Lane.DRAFTER] = ["d0"]
    simulation.settle()
    simulation.run()
    assert verifies(simulation)[-2].block.tokens
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 60)


def test_a_drafter_that_fails_is_asked_again_and_then_left_alone_for_a_while(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=40)
    simulation.drafter.refuse = Failure("model_error", "scripted failure")
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 40)
    assert 0 < len(drafts(simulation)) <= 8
    assert simulation.attached[Lane.DRAFTER] is None


def test_a_drafter_whose_context_ends_first_stops_drafting(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=40, drafter_context=20)
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 40)
    for draft in drafts(simulation):
        assert draft.base_len + len(draft.assumed) + draft.max_depth <= 20


def test_a_prompt_beyond_the_drafters_context_is_decoded_plainly(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), prompt=[1] * 30, drafter_context=20)
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1] * 30, 24)
    assert not simulation.drafter.sessions
    assert not drafts(simulation)


def test_blocks_never_exceed_what_the_verifier_judges(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), num_draft_tokens=8, max_draft_tokens=3)
    simulation.start()
    simulation.run()
    assert max(command.block.num_draft_tokens for command in verifies(simulation)) == 3
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


def test_no_round_starts_while_held(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    simulation.loop.hold(True, simulation.now)
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    assert len(verifies(simulation)) == 1
    simulation.wait(60.0)
    assert len(verifies(simulation)) == 1
    simulation.loop.hold(False, simulation.now)
    simulation.settle()
    assert len(verifies(simulation)) == 2


@pytest.mark.parametrize("steps", range(12))
def test_cancel_frees_both_replicas_whenever_it_comes(tmp_path: Path, steps: int) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    for _ in range(steps):
        simulation.step()
    simulation.loop.fail(Unavailable("gone"), simulation.now)
    simulation.settle()
    assert len(simulation.terminal) == 1
    assert not simulation.verifiers["v0"].sessions
    assert not simulation.drafter.sessions
    assert simulation.loop.deadline is None
    simulation.loop.fail(Unavailable("gone"), simulation.now)
    assert simulation.loop.take_effects() == []
