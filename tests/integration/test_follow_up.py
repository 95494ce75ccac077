"""A verifier that is sent the next block while it judges goes on with it, if the verdict is the one it counts on."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

from paceline.engine.target import TargetEngine
from paceline.messages import Close, Closed, Failed, NeedTokens, Verified, Verify
from paceline.runtime.replica_actor import ActorLimits
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import extend_hash
from tests.integration.replicas import GatedRunner, VerifierReplica, Writer, verifier_replica
from tests.integration.test_verifier_service import PROMPT, VerifierLink, cycle_from, start, toy


def follow_up(command: Verify, expected: tuple[int, ...], block: DraftTree) -> Verify:
    """The block after a command whose verdict is expected to be these tokens."""
    return Verify(
        command.session,
        command.epoch,
        command.round + 1,
        command.base_len + len(expected),
        extend_hash(command.prefix_hash, expected),
        block=block,
        follows=command.round,
        expected=expected,
    )


@dataclass(frozen=True)
class Judging:
    """A session whose verifier has the first token.

    Attributes:
        command: two true drafts at position 4, not sent yet.
        following: three behind them, which count on the verdict that is expected.
    """

    runner: GatedRunner
    replica: VerifierReplica
    link: VerifierLink
    writer: Writer
    command: Verify
    following: Verify


@contextlib.asynccontextmanager
async def judging(
    expected: tuple[int, ...] = cycle_from(4, 3),
    *,
    runner: GatedRunner | None = None,
    limits: ActorLimits | None = None,
    engine_class: type[TargetEngine] = TargetEngine,
) -> AsyncIterator[Judging]:
    runner = runner or toy()
    async with verifier_replica(runner, limits=limits, engine_class=engine_class) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        command = writer.verify(DraftTree.chain(cycle_from(4, 2)))
        following = follow_up(command, expected, DraftTree.chain(cycle_from(7, 3)))
        yield Judging(runner, replica, link, writer, command, following)


def round_of(answer: object) -> int:
    """Which round an answer belongs to; 0 for others."""
    match answer:
        case Verified():
            return answer.round
        case NeedTokens() | Failed():
            return answer.command_id
    return 0


async def test_the_block_that_follows_runs_at_once_and_its_verdict_is_what_it_would_have_been() -> None:
    async with judging() as at:
        at.runner.gate.clear()
        await at.link.send(at.command)
        await at.runner.pass_entered()
        await at.link.send(at.following)
        at.runner.gate.set()
        first, second = await at.link.receive(Verified), await at.link.receive(Verified)
        assert (first.round, first.tokens) == (2, cycle_from(4, 3))
        assert (second.round, second.tokens, second.base_len) == (3, cycle_from(7, 4), 7)
        # A gateway that has lost its link asks for the first again, and knows nothing of the second.
        assert await at.link.ask(at.command, Verified) == first
        assert await at.link.ask(replace(at.following, follows=0, expected=()), Verified) == second
        assert len(at.runner.passes) == 3


async def test_one_that_is_said_again_while_it_waits_is_still_the_same() -> None:
    async with judging() as at:
        await at.link.send(at.command, at.following, at.command, at.following)
        assert (await at.link.receive(Verified)).round == 2
        second = await at.link.receive(Verified)
        assert second.round == 3
        assert await at.link.ask(at.following, Verified) == second
        assert len(at.runner.passes) == 3


async def test_another_one_for_the_same_verdict_takes_its_place() -> None:
    async with judging() as at:
        await at.link.send(at.command, at.following, replace(at.following, round=4, block=EMPTY_BLOCK))
        assert (await at.link.receive(NeedTokens)).command_id == 3
        assert (await at.link.receive(Verified)).round == 2
        assert (await at.link.receive(Verified)).tokens == cycle_from(7, 1)


async def test_another_verdict_is_what_ends_the_wait() -> None:
    async with judging(expected=(*cycle_from(4, 2), 60)) as at:
        await at.link.send(at.command, at.following)
        verdict = await at.link.receive(Verified)
        assert await at.link.receive(NeedTokens) == NeedTokens("s", 1, 3, 4)
        at.writer.log.extend(verdict.tokens)
        at.writer.round = 3
        assert (await at.link.ask(at.writer.verify(), Verified)).tokens == cycle_from(7, 1)
        assert len(at.runner.passes) == 3


async def test_a_block_that_comes_after_the_verdict_is_judged_by_it_too() -> None:
    async with judging() as at:
        await at.link.ask(at.command, Verified)
        assert (await at.link.ask(at.following, Verified)).tokens == cycle_from(7, 4)
    async with judging(expected=(1, 2, 3)) as at:
        await at.link.ask(at.command, Verified)
        assert (await at.link.ask(at.following, NeedTokens)).command_id == 3


async def test_a_newer_round_takes_the_place_of_a_block_that_runs_without_its_gateway_s_knowledge() -> None:
    async with judging() as at:
        await at.link.send(at.command, at.following)
        verdict = await at.link.receive(Verified)
        at.writer.log.extend(verdict.tokens)
        at.writer.round = 3
        await at.link.send(at.writer.verify(DraftTree.chain(cycle_from(7, 1))))
        # The one before it was judged already, or is told that it will not be.
        assert round_of(await at.link.receive(object)) == 3
        assert (await at.link.receive(Verified)).tokens == cycle_from(7, 2)


async def test_a_session_that_is_closed_answers_both() -> None:
    async with judging() as at:
        at.runner.gate.clear()
        await at.link.send(at.command)
        await at.runner.pass_entered()
        await at.link.send(at.following, Close("s", 1))
        at.runner.gate.set()
        answers = [await at.link.receive(object) for _ in range(3)]
        assert [round_of(answer) for answer in answers] == [2, 3, 0]
        assert answers[-1] == Closed("s", 1)
        assert at.replica.actor.num_sessions == 0
        at.replica.actor.check_integrity()


async def test_one_that_names_no_tokens_is_refused() -> None:
    async with judging() as at:
        refused = await at.link.ask(replace(at.command, follows=1), Failed)
        assert (refused.failure.code, refused.failure.field) == ("invalid_argument", "follows")
