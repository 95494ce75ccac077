"""A verifier that is sent the next block while it judges goes on with it, if the verdict is the one it counts on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.messages import Close, Closed, Failed, NeedTokens, Verified, Verify
from paceline.speculation.tree import DraftTree
from paceline.token_log import TokenLog, extend_hash
from tests.integration.replicas import Writer, verifier_replica
from tests.integration.test_verifier_service import PROMPT, cycle_from, start, toy


def follow_up(command: Verify, expected: tuple[int, ...], block: DraftTree, log: TokenLog) -> Verify:
    """The block after a command whose verdict is expected to be these tokens."""
    return Verify(
        command.session,
        command.epoch,
        command.round + 1,
        command.base_len + len(expected),
        extend_hash(log.hash_at(command.base_len), expected),
        block=block,
        follows=command.round,
        expected=expected,
    )


def next_two(writer: Writer, expected: tuple[int, ...] | None = None) -> tuple[Verify, Verify]:
    """A block of two true drafts at position 4, and one of three that counts on all of it, or on other tokens."""
    command = writer.verify(DraftTree.chain(cycle_from(4, 2)))
    wanted = cycle_from(4, 3) if expected is None else expected
    return command, follow_up(command, wanted, DraftTree.chain(cycle_from(7, 3)), writer.log)


def round_of(answer: object) -> int:
    """Which round an answer belongs to; 0 for others."""
    match answer:
        case Verified():
            return answer.round
        case NeedTokens() | Failed():
            return answer.command_id
    return 0


async def test_the_block_that_follows_runs_at_once_and_its_verdict_is_what_it_would_have_been() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        command, following = next_two(writer)
        runner.gate.clear()
        await link.send(command)
        await runner.pass_entered()
        await link.send(following)
        runner.gate.set()
        first, second = await link.receive(Verified), await link.receive(Verified)
        assert (first.round, first.tokens) == (2, cycle_from(4, 3))
        assert (second.round, second.tokens, second.base_len) == (3, cycle_from(7, 4), 7)
        # A gateway that has lost its link asks for the first again, and knows nothing of the second.
        assert await link.ask(command, Verified) == first
        assert await link.ask(replace(following, follows=0, expected=()), Verified) == second
        assert len(runner.passes) == 3


async def test_another_verdict_is_what_ends_the_wait() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        command, following = next_two(writer, expected=(*cycle_from(4, 2), 60))
        await link.send(command, following)
        verdict = await link.receive(Verified)
        assert await link.receive(NeedTokens) == NeedTokens("s", 1, 3, 4)
        writer.log.extend(verdict.tokens)
        writer.round = 3
        assert (await link.ask(writer.verify(), Verified)).tokens == cycle_from(7, 1)
        assert len(runner.passes) == 3


@pytest.mark.parametrize("true", [True, False])
async def test_a_block_that_comes_after_the_verdict_is_judged_by_it_too(true: bool) -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        command, following = next_two(writer, expected=None if true else (1, 2, 3))
        await link.ask(command, Verified)
        if true:
            assert (await link.ask(following, Verified)).tokens == cycle_from(7, 4)
        else:
            assert (await link.ask(following, NeedTokens)).command_id == 3


async def test_a_newer_round_takes_the_place_of_a_block_that_runs_without_its_gateway_s_knowledge() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        command, following = next_two(writer)
        await link.send(command, following)
        verdict = await link.receive(Verified)
        writer.log.extend(verdict.tokens)
        writer.round = 3
        await link.send(writer.verify(DraftTree.chain(cycle_from(7, 1))))
        # The one before it was judged already, or is told that it will not be.
        assert round_of(await link.receive(object)) == 3
        assert (await link.receive(Verified)).tokens == cycle_from(7, 2)


async def test_a_session_that_is_closed_answers_both() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        command, following = next_two(writer)
        runner.gate.clear()
        await link.send(command)
        await runner.pass_entered()
        await link.send(following, Close("s", 1))
        runner.gate.set()
        answers = [await link.receive(object) for _ in range(3)]
        assert [round_of(answer) for answer in answers] == [2, 3, 0]
        assert answers[-1] == Closed("s", 1)
        assert replica.actor.num_sessions == 0
        replica.actor.check_integrity()


async def test_one_that_names_no_tokens_is_refused() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        refused = await link.ask(replace(writer.verify(), follows=1), Failed)
        assert (refused.failure.code, refused.failure.field) == ("invalid_argument", "follows")
