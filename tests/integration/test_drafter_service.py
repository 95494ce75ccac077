"""The drafter over real gRPC: drafts, supersession, prefixes, epochs, broken links, poison."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from paceline_drafter.draft_limits import DraftLimits

from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.messages import (
    Close,
    Closed,
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    Evicted,
    Failed,
    NeedTokens,
    Open,
    Opened,
    SamplingParams,
)
from paceline.runtime.replica_actor import ActorLimits
from paceline.token_log import TokenLog
from paceline.v1 import drafter_pb2, drafter_pb2_grpc
from tests.fakes.scripted_drafter import ScriptedDrafter, StepGate, broken, perfect, put_at, too_long
from tests.integration.replicas import GREEDY, Link, drafter_replica, wait_for

CYCLE = (3, 5, 7, 11, 13)
PROMPT = (1, 2, 4)
SOON = ActorLimits(orphan_ttl_s=0.02, idle_check_s=0.01)
DrafterLink = Link[DrafterCommand, DrafterEvent]


def law(context: Sequence[int], _sampling: SamplingParams) -> int:
    return CYCLE[len(context) % len(CYCLE)]


def cycle_from(position: int, count: int) -> tuple[int, ...]:
    return tuple(CYCLE[index % len(CYCLE)] for index in range(position, position + count))


def opening(name: str, tokens: Sequence[int] = PROMPT, epoch: int = 1) -> Open:
    return Open(name, epoch, tuple(tokens), len(tokens), GREEDY)


def draft(name: str, draft_id: int, tokens: Sequence[int] = PROMPT, depth: int = 4, **changes: Any) -> Draft:
    log = TokenLog(tokens)
    fields: dict[str, Any] = {"epoch": 1, "catch_up": (), "assumed": ()} | changes
    return Draft(
        session=name,
        draft_id=draft_id,
        base_len=len(log),
        prefix_hash=log.hash_at(len(log)),
        max_depth=depth,
        **fields,
    )


async def test_draft_and_draft_ahead() -> None:
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter) as replica, replica.connect() as link:
        await link.send(opening("s"), draft("s", 1))
        await link.receive(Opened)
        drafted = await link.receive(Drafted)
        assert drafted.block.tokens == cycle_from(3, 4)
        assert drafted.block.is_chain
        assert drafted.confidences == (1.0,) * 4
        assert (drafted.draft_id, drafted.method) == (1, "scripted")
        # three rows of context, and one per fed draft; the last draft was not fed
        assert drafted.kv_len == 3 + 3
        assert drafted.timing.total_us >= drafted.timing.forward_us >= 0
        ahead = await link.ask(draft("s", 2, depth=5, assumed=cycle_from(3, 4)), Drafted)
        assert ahead.block.tokens == cycle_from(7, 5)
        assert drafter.contexts[-1] == (*PROMPT, *cycle_from(3, 4))
        await link.ask(Close("s", 1), Closed)
        assert drafter.fed == {}


def two_methods() -> FallbackMethod:
    """A chain whose first method always finds something: the second drafts only where it is asked for by name."""
    second = ScriptedDrafter(perfect(lambda context, _: 17), info=MethodInfo(name="second"))
    return FallbackMethod([ScriptedDrafter(perfect(law)), second])


@pytest.mark.parametrize(
    ("method", "used", "tokens"),
    [("", "scripted", cycle_from(3, 4)), ("scripted", "scripted", cycle_from(3, 4)), ("second", "second", (17,) * 4)],
)
async def test_a_session_may_name_one_method_of_the_chain(method: str, used: str, tokens: tuple[int, ...]) -> None:
    async with drafter_replica(two_methods()) as replica, replica.connect() as link:
        info = await drafter_pb2_grpc.DrafterStub(replica.channel).GetModelInfo(
            drafter_pb2.DrafterGetModelInfoRequest()
        )
        assert list(info.info.methods) == ["scripted", "second"]
        await link.send(replace(opening("s"), method=method), draft("s", 1))
        await link.receive(Opened)
        drafted = await link.receive(Drafted)
        assert (drafted.method, drafted.block.tokens) == (used, tokens)


async def test_a_session_that_names_a_method_which_is_not_there_is_refused() -> None:
    async with drafter_replica(two_methods()) as replica, replica.connect() as link:
        failed = await link.ask(replace(opening("s"), method="eagle"), Failed)
        assert (failed.failure.code, failed.failure.field) == ("invalid_argument", "method")
        for name in ("'eagle'", "scripted, second"):
            assert name in failed.failure.message
        failed = await link.ask(replace(opening("s"), method="x" * 65), Failed)
        assert (failed.failure.code, failed.failure.field) == ("invalid_argument", "method")
        assert replica.actor.num_sessions == 0
        # An open session goes on as it was.
        await link.ask(opening("s"), Opened)
        await link.ask(replace(opening("s"), method="eagle"), Failed)
        assert (await link.ask(draft("s", 1), Drafted)).method == "scripted"


async def test_newer_draft_supersedes_a_running_one_which_is_answered_with_what_it_has() -> None:
    gate = StepGate()
    async with drafter_replica(ScriptedDrafter(perfect(law), gate=gate)) as replica, replica.connect() as link:
        await link.send(opening("s"), draft("s", 1, depth=8))
        await link.receive(Opened)
        gate.release(2)
        for _ in range(3):
            await asyncio.to_thread(gate.wait_entered)
        await link.send(draft("s", 2, (*PROMPT, 9), depth=2, catch_up=(9,)))
        await replica.until(lambda: replica.actor.num_waiting == 1)
        gate.open()
        first = await link.receive(Drafted)
        assert (first.draft_id, first.block.tokens) == (1, cycle_from(3, 3))
        second = await link.receive(Drafted)
        assert (second.draft_id, second.block.tokens) == (2, cycle_from(4, 2))


async def test_two_drafts_in_one_frame_the_newer_runs() -> None:
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter) as replica, replica.connect() as link:
        await link.send(opening("s"), draft("s", 1), draft("s", 2, depth=2))
        await link.receive(Opened)
        assert (await link.receive(Drafted)).block.tokens == ()
        assert (await link.receive(Drafted)).block.tokens == cycle_from(3, 2)
        assert len(drafter.contexts) == 1


async def test_sessions_share_steps() -> None:
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter) as replica, replica.connect() as link:
        names = [f"s{number}" for number in range(4)]
        await link.send(*map(opening, names))
        for _ in names:
            await link.receive(Opened)
        await link.send(*(draft(name, 1) for name in names))
        answers = [await link.receive(Drafted) for _ in names]
        assert {answer.session for answer in answers} == set(names)
        assert {answer.timing.batch_sessions for answer in answers} == {4}
        assert drafter.steps == 4


# --- prefixes, replays, epochs --------------------------------------------------------------------------------------


async def test_replica_behind_ahead_and_disagreeing() -> None:
    async with drafter_replica(ScriptedDrafter(perfect(law))) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        longer = (*PROMPT, 9, 8)
        assert await link.ask(draft("s", 1, longer), NeedTokens) == NeedTokens("s", 1, 1, 3)
        assert (await link.ask(draft("s", 1, longer, catch_up=(9, 8)), Drafted)).block.tokens == cycle_from(5, 4)
        assert (await link.ask(draft("s", 2, PROMPT), Drafted)).block.tokens == cycle_from(3, 4)
        other = (5, 5, 5, 5)
        # A longer prefix looks as if the replica were behind, until its tail does not fit.
        assert (await link.ask(draft("s", 3, other), NeedTokens)).have_len == 3
        assert (await link.ask(draft("s", 3, other, catch_up=(5,)), NeedTokens)).have_len == 0
        assert (await link.ask(draft("s", 3, other[:3]), NeedTokens)).have_len == 0
        assert (await link.ask(draft("s", 3, other, catch_up=other), Drafted)).block.tokens == cycle_from(4, 4)


async def test_replayed_draft_is_answered_from_memory_and_an_older_one_dropped() -> None:
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        await link.ask(draft("s", 4), Drafted)
        steps = drafter.steps
        answer = await link.ask(draft("s", 5, depth=1), Drafted)
        await link.send(draft("s", 4))
        assert await link.ask(draft("s", 5, depth=1), Drafted) == answer
        assert drafter.steps == steps + 1


async def test_epochs() -> None:
    async with drafter_replica(ScriptedDrafter(perfect(law))) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        await link.ask(draft("s", 7), Drafted)
        assert (await link.ask(draft("s", 1, epoch=2), Drafted)).epoch == 2
        for command in (draft("s", 8), opening("s"), Close("s", 1)):
            assert (await link.ask(command, Failed)).failure.code == "fenced"
        await link.ask(opening("s", epoch=3), Opened)
        assert (await link.ask(draft("s", 1, epoch=3), Drafted)).block.tokens == cycle_from(3, 4)


async def test_unknown_session_is_evicted() -> None:
    async with drafter_replica(ScriptedDrafter(perfect(law))) as replica, replica.connect() as link:
        assert await link.ask(draft("s", 3), Evicted) == Evicted("s", 1, 3)
        assert await link.ask(Close("s", 1), Closed) == Closed("s", 1)


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "depth", "expected_depth"),
    [
        (DraftLimits(max_draft_tokens=3), 9, 3),
        (DraftLimits(max_model_len=5), 4, 2),
        (DraftLimits(max_model_len=3), 4, 0),
        (DraftLimits(), 0, 0),
    ],
)
async def test_depth_is_cut_to_what_fits(limits: DraftLimits, depth: int, expected_depth: int) -> None:
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter, draft_limits=limits) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        drafted = await link.ask(draft("s", 1, depth=depth), Drafted)
        assert drafted.block.tokens == cycle_from(3, expected_depth)


async def test_method_that_drafts_too_much_is_cut() -> None:
    drafter = ScriptedDrafter(too_long(law, 5), at_once=True)
    async with drafter_replica(drafter) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        drafted = await link.ask(draft("s", 1), Drafted)
        assert drafted.block.tokens == cycle_from(3, 4)
        assert len(drafted.confidences) == 4


async def test_ids_out_of_the_vocabulary() -> None:
    drafter = ScriptedDrafter(put_at(law, 1, -1))
    limits = DraftLimits(vocab_size=64)
    async with drafter_replica(drafter, draft_limits=limits) as replica, replica.connect() as link:
        refused = await link.ask(opening("s", (1, 64)), Failed)
        assert (refused.failure.code, refused.failure.field) == ("invalid_argument", "tokens")
        await link.ask(opening("s"), Opened)
        assert (await link.ask(draft("s", 1, assumed=(64,)), Failed)).failure.field == "assumed"
        # What a method proposes is the verifier's to judge.
        assert (await link.ask(draft("s", 1), Drafted)).block.tokens[1] == -1


async def test_session_slots_are_bounded_by_actor_and_method() -> None:
    drafter = ScriptedDrafter(perfect(law), info=MethodInfo("scripted", max_sessions=2))
    async with drafter_replica(drafter, limits=ActorLimits(max_sessions=3)) as replica, replica.connect() as link:
        await link.ask(opening("a"), Opened)
        await link.ask(opening("b"), Opened)
        assert (await link.ask(opening("c"), Failed)).failure.code == "capacity_exceeded"
        await link.ask(Close("a", 1), Closed)
        await link.ask(opening("c"), Opened)


async def test_malformed_command_hurts_itself_only() -> None:
    async with drafter_replica(ScriptedDrafter(perfect(law))) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        bad = drafter_pb2.DrafterCommand(draft=drafter_pb2.Draft(session="s", epoch=1, draft_id=5, base_len=0))
        log = TokenLog(PROMPT)
        good = drafter_pb2.Draft(session="s", epoch=1, draft_id=6, base_len=3, prefix_hash=log.hash_at(3), max_depth=1)
        commands = [bad, drafter_pb2.DrafterCommand(draft=good)]
        await link.send_raw(drafter_pb2.DrafterConnectRequest(commands=commands))
        refused = await link.receive(Failed)
        assert (refused.command_id, refused.failure.field) == (5, "base_len")
        assert (await link.receive(Drafted)).draft_id == 6


# --- links, poison, storms ------------------------------------------------------------------------------------------


async def test_link_broken_mid_draft_and_back() -> None:
    gate = StepGate()
    drafter = ScriptedDrafter(perfect(law), gate=gate)
    async with drafter_replica(drafter) as replica:
        async with replica.connect() as link:
            await link.send(opening("s"), draft("s", 1))
            await link.receive(Opened)
            await asyncio.to_thread(gate.wait_entered)
        async with replica.connect() as link:
            await link.send(draft("s", 1))
            await replica.until(lambda: replica.actor.num_waiting > 0)
            gate.open()
            assert (await link.receive(Drafted)).block.tokens == cycle_from(3, 4)
            assert len(drafter.contexts) == 1


async def test_orphans_are_closed_when_their_time_is_over() -> None:
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter, limits=SOON) as replica:
        async with replica.connect() as link:
            await link.ask(opening("s"), Opened)
        await replica.quiet()
        assert drafter.fed == {}


async def test_broken_method_fails_the_draft_and_the_next_one_works() -> None:
    drafter = ScriptedDrafter(broken("scripted fault"))
    async with drafter_replica(drafter) as replica, replica.connect() as link:
        await link.ask(opening("s"), Opened)
        failed = await link.ask(draft("s", 1), Failed)
        assert (failed.command_id, failed.failure.code) == (1, "model_error")
        drafter.script = perfect(law)
        assert (await link.ask(draft("s", 1), Drafted)).block.tokens == cycle_from(3, 4)


class _CrashingDrafter(ScriptedDrafter):
    def advance(self, jobs: Sequence[DraftJob]) -> None:
        if any(job.session == "poison" for job in jobs):
            raise RuntimeError("a secret")
        super().advance(jobs)


async def test_crash_of_a_step_leaves_the_loop_alive() -> None:
    async with drafter_replica(_CrashingDrafter(perfect(law))) as replica, replica.connect() as link:
        await link.send(opening("poison"), opening("good"))
        await link.receive(Opened)
        await link.receive(Opened)
        failed = await link.ask(draft("poison", 1), Failed)
        assert failed.failure.code == "internal"
        assert "secret" not in failed.failure.message
        assert (await link.ask(draft("good", 1), Drafted)).block.tokens == cycle_from(3, 4)


async def test_closing_answers_the_running_draft() -> None:
    gate = StepGate()
    async with drafter_replica(ScriptedDrafter(perfect(law), gate=gate)) as replica, replica.connect() as link:
        await link.send(opening("s"), draft("s", 1, depth=8))
        await link.receive(Opened)
        await asyncio.to_thread(gate.wait_entered)
        await link.send(Close("s", 1))
        await replica.until(lambda: replica.actor.num_waiting > 0)
        gate.open()
        assert (await link.receive(Drafted)).block.tokens == cycle_from(3, 1)
        await link.receive(Closed)


async def test_quiescence_after_a_storm() -> None:
    source = random.Random(5)
    drafter = ScriptedDrafter(perfect(law))
    async with drafter_replica(drafter, limits=SOON) as replica:

        async def client(number: int) -> None:
            for turn in range(6):
                async with replica.connect() as link:
                    name, epoch = f"s{number % 5}", source.randrange(1, 8)
                    commands: list[DrafterCommand] = [
                        opening(name, epoch=epoch),
                        draft(name, turn + 1, epoch=epoch, depth=8),
                        draft(name, turn + 2, epoch=epoch, assumed=(3,)),
                        Close(name, epoch),
                    ]
                    chosen = source.sample(commands, source.randrange(1, len(commands) + 1))
                    await link.send(*chosen, opening(f"own{number}"))
                    if source.random() < 0.7:
                        await link.receive(object)

        async with asyncio.TaskGroup() as clients:
            for number in range(12):
                clients.create_task(client(number))
        await replica.quiet()
        assert drafter.fed == {}
        async with replica.connect() as link:
            await link.ask(opening("after"), Opened)
            await wait_for(link.ask(draft("after", 1), Drafted))
            await link.ask(Close("after", 1), Closed)
