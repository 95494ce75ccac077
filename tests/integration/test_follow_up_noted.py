"""A follow-up that comes while the pass of its round runs is noted at once, and settled with the end of that pass."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from paceline.engine.target import TargetEngine
from paceline.messages import (
    Close,
    Closed,
    Evicted,
    Failed,
    NeedTokens,
    Opened,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.runtime.replica_actor import ActorLimits
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.toy_runner import cycle_law, poisoned_law
from tests.integration.replicas import GatedRunner, Writer
from tests.integration.test_follow_up import Judging, follow_up, judging
from tests.integration.test_verifier_service import CYCLE, PROMPT, cycle_from, start

OTHER = (*cycle_from(4, 2), 60)
"""Tokens that the verdict will not be."""


@contextlib.asynccontextmanager
async def passing(
    expected: tuple[int, ...] = cycle_from(4, 3),
    *,
    runner: GatedRunner | None = None,
    limits: ActorLimits | None = None,
    engine_class: type[TargetEngine] = TargetEngine,
) -> AsyncIterator[Judging]:
    """A session whose command is in a pass that waits for its gate."""
    async with judging(expected, runner=runner, limits=limits, engine_class=engine_class) as at:
        at.runner.gate.clear()
        try:
            await at.link.send(at.command)
            await at.runner.pass_entered()
            yield at
        finally:
            at.runner.gate.set()


async def arrive(at: Judging, *commands: VerifierCommand) -> list[object]:
    """Sends commands; once the verifier has them returns what it has answered already.

    What cannot be read is answered by the stream itself, after all that came before it.
    """
    await at.link.send(*commands, replace(at.command, round=99, follows=99))
    answers: list[object] = []
    while True:
        answer = await at.link.receive(object)
        if isinstance(answer, Failed) and answer.command_id == 99:
            at.link.frames.clear()
            return answers
        answers.append(answer)


async def end_pass(at: Judging, count: int) -> list[object]:
    """What the verifier answers with the end of the pass and behind it."""
    at.runner.gate.set()
    return [await at.link.receive(object) for _ in range(count)]


def failures(at: Judging, code: str) -> float | None:
    return at.replica.actor.meter.registry.get_sample_value("paceline_failed_commands_total", {"code": code})


async def test_one_that_comes_true_runs_and_its_times_count_from_the_verdict() -> None:
    async with passing() as at:
        assert await arrive(at, at.following) == []
        assert at.replica.actor.num_waiting == 0
        await asyncio.to_thread(time.sleep, 0.03)  # a pass that long; it must not count as time of the follow-up
        began_s = time.monotonic()
        first, second = await end_pass(at, 2)
        took_us = (time.monotonic() - began_s) * 1e6
        assert isinstance(first, Verified)
        assert isinstance(second, Verified)
        assert (first.round, first.tokens) == (2, cycle_from(4, 3))
        assert (second.round, second.tokens) == (3, cycle_from(7, 4))
        assert second.timing.queue_us <= second.timing.total_us <= took_us
        assert first.timing.total_us > 30_000


async def test_one_that_does_not_is_refused_in_the_frame_of_the_verdict() -> None:
    async with passing(expected=OTHER) as at:
        assert await arrive(at, at.following) == []
        verdict, refusal = await end_pass(at, 2)
        assert isinstance(verdict, Verified)
        assert verdict.tokens == cycle_from(4, 3)
        assert refusal == NeedTokens("s", 1, 3, 4)
        assert at.link.frames == [2]
        assert len(at.runner.passes) == 2


async def test_said_again_it_is_the_same_one_and_over_a_new_link_it_is_answered_there() -> None:
    async with passing() as at:
        assert await arrive(at, at.following, at.following) == []
        async with at.replica.connect() as link:
            again = replace(at, link=link)
            assert await arrive(again, at.command, at.following) == []
            first, second = await end_pass(again, 2)
            assert isinstance(first, Verified)
            assert isinstance(second, Verified)
            assert (first.round, second.round) == (2, 3)
        assert len(at.runner.passes) == 3


async def test_another_one_takes_its_place_while_the_pass_runs() -> None:
    async with passing() as at:
        other = replace(at.following, round=4, block=EMPTY_BLOCK)
        assert await arrive(at, at.following, other) == [NeedTokens("s", 1, 3, 4)]
        _, second = await end_pass(at, 2)
        assert isinstance(second, Verified)
        assert (second.round, second.tokens) == (4, cycle_from(7, 1))


async def test_the_session_of_a_stream_that_ends_meanwhile_is_still_an_orphan() -> None:
    async with passing(limits=ActorLimits(orphan_ttl_s=0.02)) as at:
        assert await arrive(at, at.following) == []
        await at.link.break_off()
        await at.replica.until(lambda: at.replica.num_streams == 0)
        at.runner.gate.set()
        await at.replica.quiet()
        assert len(at.runner.passes) >= 2


class Stalling:
    """A stream after whose first event the loop stands still until a pass has begun."""

    name = "test"

    def __init__(self, runner: GatedRunner) -> None:
        self.went_on: list[bool] = []
        self._runner = runner

    def finish(self) -> None:
        """Nothing is to be done."""

    def send(self, event: VerifierEvent) -> None:
        """Called with the end of a pass."""
        if not self.went_on:
            self._runner.entered.clear()
            self._runner.gate.clear()
            asyncio.get_running_loop().call_soon(self._stall)

    def _stall(self) -> None:
        self.went_on.append(self._runner.entered.wait(2.0))
        self._runner.gate.set()


async def test_its_pass_has_begun_before_the_verdict_is_on_its_way() -> None:
    async with passing() as at:
        stream = Stalling(at.runner)
        at.replica.actor.submit(stream, at.following, 100)
        at.runner.gate.set()
        await at.replica.until(lambda: len(at.runner.passes) == 3)
        assert stream.went_on == [True]


async def test_passes_of_follow_ups_are_counted_as_any_others() -> None:
    async with passing() as at:
        last = follow_up(at.following, cycle_from(7, 4), DraftTree.chain(cycle_from(11, 1)))
        assert await arrive(at, at.following) == []
        at.runner.gate.set()
        assert (await at.link.receive(Verified)).tokens == cycle_from(4, 3)
        await at.link.send(last)
        assert (await at.link.receive(Verified)).tokens == cycle_from(7, 4)
        assert (await at.link.receive(Verified)).tokens == cycle_from(11, 2)
        assert await at.link.ask(Close("s", 1), Closed) == Closed("s", 1)
        counted = at.replica.actor.meter.registry.get_sample_value
        assert counted("paceline_passes_total", {"outcome": "ok"}) == 4
        assert counted("paceline_pass_tokens_sum") == 3 + 3 + 4 + 2
        assert counted("paceline_queue_time_seconds_count") == 4
        assert counted("paceline_verified_tokens_total") == 1 + 3 + 4 + 2


# --- commands before it ---------------------------------------------------------------------------------------------


async def test_behind_a_command_of_another_session_it_keeps_its_turn() -> None:
    async with passing() as at:
        assert await arrive(at, Writer.start("t", PROMPT).open(), at.following) == []
        assert at.replica.actor.num_waiting == 2
        kinds = [type(answer) for answer in await end_pass(at, 3)]
        assert kinds == [Verified, Opened, Verified]


async def test_behind_a_close_its_session_is_gone() -> None:
    async with passing() as at:
        assert await arrive(at, Close("s", 1), at.following) == []
        assert at.replica.actor.num_waiting == 2
        verdict, *others = await end_pass(at, 3)
        assert isinstance(verdict, Verified)
        assert others == [Closed("s", 1), Evicted("s", 1, 3)]


async def test_behind_an_open_of_a_newer_epoch_its_own_is_over() -> None:
    async with passing() as at:
        assert await arrive(at, replace(at.writer.open(), epoch=2), at.following) == []
        assert at.replica.actor.num_waiting == 2
        verdict, opened, fenced = await end_pass(at, 3)
        assert isinstance(verdict, Verified)
        assert isinstance(opened, Opened)
        assert isinstance(fenced, Failed)
        assert (fenced.command_id, fenced.failure.code) == (3, "fenced")


@pytest.mark.parametrize("epoch", [0, 2])
async def test_one_of_another_epoch_waits_for_the_end_of_the_pass(epoch: int) -> None:
    async with passing() as at:
        assert await arrive(at, replace(at.following, epoch=epoch)) == []
        assert at.replica.actor.num_waiting == 1
        verdict, answer = await end_pass(at, 2)
        assert isinstance(verdict, Verified)
        if epoch:
            assert answer == NeedTokens("s", 2, 3, 4)
        else:
            assert isinstance(answer, Failed)
            assert answer.failure.code == "fenced"


async def test_behind_a_full_mailbox_it_is_refused() -> None:
    async with passing(limits=ActorLimits(mailbox_items=2)) as at:
        fillers = (Writer.start(name, PROMPT).open() for name in "tu")
        (refused,) = await arrive(at, *fillers, at.following)
        assert isinstance(refused, Failed)
        assert (refused.command_id, refused.failure.code) == (3, "capacity_exceeded")
        assert failures(at, "capacity_exceeded") == 1


async def test_one_that_is_larger_than_the_mailbox_is_refused() -> None:
    async with passing(limits=ActorLimits(mailbox_bytes=150)) as at:
        (refused,) = await arrive(at, replace(at.following, block=DraftTree.chain((60,) * 150)))
        assert isinstance(refused, Failed)
        assert (refused.command_id, refused.failure.code) == (3, "capacity_exceeded")


# --- what may happen while it waits ---------------------------------------------------------------------------------


async def test_a_stop_lets_the_verdict_go_and_answers_it() -> None:
    async with passing() as at:
        assert await arrive(at, at.following) == []
        stopping = asyncio.create_task(at.replica.actor.stop())
        await at.replica.until(lambda: at.replica.actor.draining)
        (late,) = await arrive(at, replace(at.following, round=4))
        assert isinstance(late, Failed)
        assert (late.command_id, late.failure.code) == (4, "unavailable")
        verdict, answer = await end_pass(at, 2)
        await stopping
        assert isinstance(verdict, Verified)
        assert isinstance(answer, Failed)
        assert (answer.command_id, answer.failure.code) == (3, "unavailable")


async def test_a_drain_lets_it_run() -> None:
    async with passing() as at:
        draining = asyncio.create_task(at.replica.actor.drain())
        await at.replica.until(lambda: at.replica.actor.draining)
        assert await arrive(at, at.following) == []
        assert at.replica.actor.num_waiting == 0
        first, second = await end_pass(at, 2)
        assert isinstance(first, Verified)
        assert isinstance(second, Verified)
        await at.link.ask(Close("s", 1), Closed)
        await draining


class Breaking(TargetEngine):
    """Whose pass of the second round raises when it is through."""

    def step(self) -> list[Verified | Failed]:
        answers = super().step()
        if any(isinstance(answer, Verified) and answer.round == 2 for answer in answers):
            raise RuntimeError("scripted fault")
        return answers


async def test_a_pass_that_fails_ends_its_session_and_answers_both() -> None:
    async with passing(engine_class=Breaking) as at:
        assert await arrive(at, at.following) == []
        failed, refusal = await end_pass(at, 2)
        assert isinstance(failed, Failed)
        assert (failed.command_id, failed.failure.code) == (2, "internal")
        assert refusal == NeedTokens("s", 1, 3, 4)
        assert at.link.frames == [2]
        await at.replica.quiet()


async def test_a_round_that_fails_alone_is_no_verdict_to_go_on_from() -> None:
    runner = GatedRunner(poisoned_law(cycle_law(CYCLE), lambda prefix: len(prefix) >= 5))
    async with passing(runner=runner) as at:
        assert await arrive(at, at.following) == []
        failed, refusal = await end_pass(at, 2)
        assert isinstance(failed, Failed)
        assert failed.command_id == 2
        assert refusal == NeedTokens("s", 1, 3, 4)
        await at.link.ask(Close("s", 1), Closed)


class Damaged(TargetEngine):
    """Which takes no third round."""

    def submit(self, command: Verify) -> NeedTokens | Evicted | Failed | None:
        if command.round == 3:
            raise AssertionError("scripted damage")
        return super().submit(command)


async def test_one_that_the_engine_cannot_take_fails_alone() -> None:
    async with passing(engine_class=Damaged) as at:
        assert await arrive(at, at.following) == []
        verdict, failed = await end_pass(at, 2)
        assert isinstance(verdict, Verified)
        assert isinstance(failed, Failed)
        assert (failed.command_id, failed.failure.code) == (3, "internal")
        assert failures(at, "internal") == 1
        await start(at.link, Writer.start("t", PROMPT))
        await at.link.ask(Close("s", 1), Closed)
