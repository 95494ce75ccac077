"""The decisions of a session, without I/O: simulated replicas, the test delivers what it wants when it wants."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paceline_gateway.effects import Lane
from paceline_gateway.plan import Patience

from paceline.errors import CapacityExceeded, Failure, Fenced, InvalidArgument, PacelineError, Unavailable
from paceline.messages import Draft, Drafted, Failed, FinishReason, NeedTokens, Open, TokenOrigin, Verified, Verify
from paceline.speculation.tree import DraftTree
from tests.unit.gateway.simulation import (
    EOS,
    Script,
    Simulation,
    bushy,
    hash_law,
    nothing,
    perfect,
    plain_text_of,
    wrong_at,
    wrong_at_position,
)

LAW = hash_law(7)
SCRIPTS: dict[str, Script] = {
    "perfect": perfect(LAW),
    "wrong_at_0": wrong_at(LAW, 0),
    "wrong_at_2": wrong_at(LAW, 2),
    "wrong_sometimes": wrong_at_position(LAW, 5),
    "tree": bushy(LAW),
    "nothing": nothing,
    "too_long": lambda context, depth: perfect(LAW)(context, depth + 5),
    "out_of_vocab": lambda context, depth: DraftTree.chain([99, *perfect(LAW)(context, depth).tokens][:depth]),
}


def verifies(simulation: Simulation) -> list[Verify]:
    return [command for command in simulation.sent if isinstance(command, Verify)]


def drafts(simulation: Simulation) -> list[Draft]:
    return [command for command in simulation.sent if isinstance(command, Draft)]


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
    assert not drafts(simulation)
    simulation.deliver(Lane.DRAFTER)  # Opened
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
    assert len(verifies(simulation)) == 3
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


def test_a_restarted_verifier_is_told_everything(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    simulation.break_link(Lane.VERIFIER, restart=True)
    simulation.mend_link(Lane.VERIFIER, restarted=True)
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 24)


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


# --- boundaries inside an accepted block --------------------------------------------------------------------------


def text_law(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_string_ends_at_the_same_token_wherever_it_falls(
    tmp_path: Path, position: int, num_draft_tokens: int
) -> None:
    script = text_law("abcdefghijk")
    script[position : position + 2] = text_law("lm")

    def law(tokens: object) -> int:
        assert isinstance(tokens, list | tuple) or hasattr(tokens, "__len__")
        return script[(len(tokens) - 3) % len(script)]

    simulation = Simulation(tmp_path, law, perfect(law), num_draft_tokens=num_draft_tokens, stop=("lm",))
    simulation.start()
    simulation.run()
    assert simulation.finish is not None
    assert simulation.finish.stop_string == "lm"
    assert simulation.text == "abcdefghijk"[:position]
    assert simulation.committed == tuple(script[: position + 2])


def test_tokens_after_the_end_never_leave(tmp_path: Path) -> None:
    script = [1, 2, EOS, 4, 5, 6]

    def law(tokens: object) -> int:
        return script[(len(tokens) - 3) % len(script)]  # type: ignore[arg-type]

    simulation = Simulation(tmp_path, law, perfect(law), max_tokens=5)
    simulation.start()
    simulation.run()
    assert simulation.committed == (1, 2, EOS)
    assert simulation.finish is not None
    assert simulation.finish.reason is FinishReason.STOP
    evidence = simulation.loop.report(simulation.now)
    assert evidence.accepted_tokens == sum(
        origin is TokenOrigin.ACCEPTED for commit in simulation.commits for origin in commit.origins
    )


# --- everything at once --------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 255), script_index=st.integers(0, 4), ahead=st.booleans())
def test_no_order_of_events_and_no_fault_changes_the_text(
    tmp_path: Path, data: st.DataObject, seed: int, script_index: int, ahead: bool
) -> None:
    law = hash_law(seed, eos=3 if seed % 3 == 0 else None)
    scripts = [perfect(law), wrong_at(law, 1), wrong_at_position(law, 4), bushy(law), nothing]
    simulation = Simulation(
        tmp_path,
        law,
        scripts[script_index],
        max_tokens=20,
        draft_ahead=ahead,
        num_draft_tokens=data.draw(st.sampled_from([1, 3, 4])),
        patience=Patience(verifier_s=1e6, first_verifier_s=1e6),
    )
    simulation.start()
    for _ in range(data.draw(st.integers(0, 40))):
        if simulation.terminal:
            break
        _random_step(simulation, data)
    for lane in Lane:
        simulation.mend_link(lane)
    simulation.available = {Lane.VERIFIER: ["v0", "v1"], Lane.DRAFTER: ["d0"]}
    simulation.settle()
    simulation.run()
    assert simulation.error is None
    assert simulation.committed == plain_text_of(law, [1, 2, 3], 20)
    assert not simulation.verifiers["v0"].sessions.keys() | simulation.verifiers["v1"].sessions.keys()
    assert not simulation.drafter.sessions


def _random_step(simulation: Simulation, data: st.DataObject) -> None:
    lane = data.draw(st.sampled_from(list(Lane)))
    match data.draw(st.sampled_from(["deliver"] * 6 + ["twice", "break", "mend", "restart", "forget", "wait", "move"])):
        case "deliver" if simulation.waiting[lane]:
            simulation.deliver(lane)
        case "twice" if simulation.waiting[lane]:
            simulation.deliver(lane, copies=2)
        case "break":
            simulation.break_link(lane)
        case "mend":
            simulation.mend_link(lane)
        case "restart":
            simulation.break_link(lane, restart=True)
            simulation.mend_link(lane, restarted=True)
        case "forget":
            simulation.forget(lane)
        case "wait":
            simulation.wait(data.draw(st.sampled_from([0.01, 0.06, 1.1])))
        case "move":
            simulation.available[Lane.VERIFIER] = data.draw(st.sampled_from([["v0"], ["v1"], ["v1", "v0"]]))


def drain(simulation: Simulation, lane: Lane) -> None:
    while simulation.waiting[lane]:
        simulation.deliver(lane)


def deliver_verdict(simulation: Simulation) -> None:
    """Delivers the verifier's events up to and with the next verdict."""
    while simulation.waiting[Lane.VERIFIER]:
        is_verdict = isinstance(simulation.waiting[Lane.VERIFIER][0], Verified)
        simulation.deliver(Lane.VERIFIER)
        if is_verdict:
            return
    raise AssertionError("no verdict is on its way")
