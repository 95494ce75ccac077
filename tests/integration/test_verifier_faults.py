"""What may go wrong around the verifier: links, slow peers, poison, storms, a loop that dies."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from paceline.engine.target import TargetEngine
from paceline.errors import CapacityExceeded, InvalidArgument
from paceline.messages import (
    Close,
    Closed,
    Evicted,
    Failed,
    Opened,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.runtime.connect import ConnectLimits
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.runtime.replica_actor import ActorLimits
from paceline.speculation.tree import DraftTree
from paceline.v1 import verifier_pb2, verifier_pb2_grpc
from tests.fakes.toy_runner import ToyRunner, cycle_law, poisoned_law
from tests.integration.replicas import GatedRunner, Link, VerifierReplica, Writer, verifier_replica, wait_for

CYCLE = (3, 5, 7, 11, 13)
PROMPT = (1, 2, 4)
SOON = ActorLimits(orphan_ttl_s=0.02, idle_check_s=0.01)
VerifierLink = Link[VerifierCommand, VerifierEvent]


def toy() -> GatedRunner:
    return GatedRunner(cycle_law(CYCLE))


async def start(link: VerifierLink, writer: Writer) -> Verified:
    await link.send(writer.open(), writer.verify())
    await link.receive(Opened)
    verdict = await link.receive(Verified)
    writer.log.extend(verdict.tokens)
    return verdict


# --- links ----------------------------------------------------------------------------------------------------------


async def test_link_broken_mid_round_and_back_runs_the_round_once() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica:
        writer = Writer.start("s", PROMPT)
        async with replica.connect() as link:
            await start(link, writer)
            runner.gate.clear()
            command = writer.verify()
            await link.send(command)
            await runner.pass_entered()
        async with replica.connect() as link:
            await link.send(command)
            runner.gate.set()
            assert (await link.receive(Verified)).round == 2
            assert len(runner.passes) == 2


async def test_answer_lost_with_the_link_is_sent_again() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica:
        writer = Writer.start("s", PROMPT)
        async with replica.connect() as link:
            await start(link, writer)
            command = writer.verify(DraftTree.chain((13, 3)))
            await link.send(command)
            await replica.until(lambda: len(runner.passes) == 2)
        async with replica.connect() as link:
            verdict = await link.ask(command, Verified)
            assert verdict.accepted_path == (1, 2)
            assert len(runner.passes) == 2


async def test_orphans_are_closed_when_their_time_is_over() -> None:
    async with verifier_replica(toy(), limits=SOON) as replica:
        async with replica.connect() as link:
            await start(link, Writer.start("s", PROMPT))
        await replica.quiet()
        async with replica.connect() as link:
            assert await link.ask(Writer.start("s", PROMPT).verify(), Evicted) == Evicted("s", 1, 1)


async def test_session_taken_to_another_stream_is_no_orphan_of_the_old_one() -> None:
    async with verifier_replica(toy(), limits=SOON) as replica, replica.connect() as new:
        writer = Writer.start("moves", PROMPT)
        async with replica.connect() as old:
            await start(old, writer)
            await start(old, Writer.start("stays", PROMPT))
            writer.log.extend((await new.ask(writer.verify(), Verified)).tokens)
        await replica.until(lambda: replica.actor.num_sessions == 1)
        assert replica.actor.sessions() == ["moves"]
        assert (await new.ask(writer.verify(), Verified)).round == 3


async def test_half_closed_stream_still_gets_its_answers() -> None:
    async with verifier_replica(toy(), limits=SOON) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await link.send(writer.open(), writer.verify())
        await link.call.done_writing()
        await link.receive(Opened)
        assert (await link.receive(Verified)).round == 1
        assert await wait_for(link.call.read()) is grpc.aio.EOF
        assert await link.call.code() is grpc.StatusCode.OK
        await replica.quiet()


async def test_peer_that_does_not_read_is_cut_off_and_stalls_nobody() -> None:
    limits = ConnectLimits(outbox_events=200, unread_timeout_s=0.2)
    async with verifier_replica(toy(), connect_limits=limits) as replica, replica.connect() as good:
        writer = Writer.start("good", PROMPT)
        await start(good, writer)
        async with replica.connect() as deaf, asyncio.TaskGroup() as tasks:
            name = "x" * 250

            async def flood() -> None:
                with contextlib.suppress(asyncio.InvalidStateError, asyncio.CancelledError, grpc.aio.AioRpcError):
                    for number in range(100_000):
                        await deaf.send(*(Verify(name, 1, number + 1, 1, 0) for _ in range(50)))

            tasks.create_task(flood())
            while replica.num_streams > 1:
                writer.log.extend((await good.ask(writer.verify(), Verified)).tokens)
                if len(writer.log) > 400:
                    await good.ask(Close("good", 1), Closed)
                    writer = Writer.start("good", PROMPT)
                    await start(good, writer)
            # What was on its way still arrives; then comes the end.
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await wait_for(deaf.call.read()) is not grpc.aio.EOF:
                    pass
            # RESOURCE_EXHAUSTED, unless the client library has noticed a failed write of its own first.
            assert await wait_for(deaf.call.code()) is not grpc.StatusCode.OK
        await good.ask(writer.verify(), Verified)


async def test_bytes_that_are_no_protobuf_end_their_stream_only() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as good:
        raw: Any = replica.channel.stream_stream("/paceline.v1.Verifier/Connect")()
        await wait_for(raw.read())  # Hello
        await raw.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await wait_for(raw.read())
        assert isinstance(error_from_rpc(caught.value), InvalidArgument)
        await start(good, Writer.start("s", PROMPT))
        await good.ask(Close("s", 1), Closed)


# --- commands during a pass -----------------------------------------------------------------------------------------


async def test_closing_a_session_cancels_its_queued_verify() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        first, second = Writer.start("first", PROMPT), Writer.start("second", PROMPT)
        await start(link, first)
        await start(link, second)
        runner.gate.clear()
        await link.send(first.verify())
        await runner.pass_entered()
        await link.send(second.verify(), Close("second", 1))
        runner.gate.set()
        assert (await link.receive(Verified)).session == "first"
        failed = await link.receive(Failed)
        assert (failed.session, failed.command_id, failed.failure.code) == ("second", 2, "cancelled")
        assert await link.receive(Closed) == Closed("second", 1)
        assert runner.passes[2:] == [(1,)]


async def test_a_close_over_a_new_stream_does_not_fail_the_round_that_is_said_again_there() -> None:
    """A gateway whose link was broken for long closes what it had, opens it anew and repeats its round."""
    runner = toy()
    async with verifier_replica(runner) as replica:
        async with replica.connect() as old:
            first, second = Writer.start("first", PROMPT), Writer.start("second", PROMPT)
            await start(old, first)
            await start(old, second)
            runner.gate.clear()
            await old.send(first.verify())
            await runner.pass_entered()
            command = second.verify()
            await old.send(command)
            await replica.until(lambda: replica.actor.num_waiting == 1)
        async with replica.connect() as new:
            await new.send(Close("second", 1), second.open(), command)
            await replica.until(lambda: replica.actor.num_waiting == 5)
            runner.gate.set()
            assert await new.receive(Closed) == Closed("second", 1)
            await new.receive(Opened)
            assert (await new.receive(Verified)).round == command.round
            assert replica.actor.sessions() == ["first", "second"]


async def test_full_mailbox_refuses_with_numbers_but_takes_a_close() -> None:
    runner = toy()
    limits = ActorLimits(mailbox_items=2)
    async with verifier_replica(runner, limits=limits) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        runner.gate.clear()
        await link.send(writer.verify())
        await runner.pass_entered()
        others = [Writer.start(f"other{number}", PROMPT).open() for number in range(3)]
        await link.send(*others, Close("s", 1))
        refused = await link.receive(Failed)
        assert (refused.session, refused.failure.code) == ("other2", "capacity_exceeded")
        assert "2 of 2" in refused.failure.message
        runner.gate.set()
        await link.receive(Verified)
        await link.receive(Opened)
        await link.receive(Opened)
        assert await link.receive(Closed) == Closed("s", 1)


async def test_a_flood_of_closes_leaves_room_for_the_end_of_its_stream() -> None:
    """Else the stream's sessions would never become orphans, and keep their slots for good."""
    runner = toy()
    limits = replace(SOON, mailbox_items=2, max_sessions=1)
    async with verifier_replica(runner, limits=limits) as replica:
        async with replica.connect() as link:
            writer = Writer.start("s", PROMPT)
            await start(link, writer)
            runner.gate.clear()
            await link.send(writer.verify())
            await runner.pass_entered()
            await link.send(*[Close(f"nobody{number}", 1) for number in range(10)])
            assert (await link.receive(Failed)).failure.code == "capacity_exceeded"
        await replica.until(lambda: replica.num_streams == 0)
        runner.gate.set()
        await replica.quiet()


# --- poison ---------------------------------------------------------------------------------------------------------


async def test_poisoned_row_fails_its_own_session_only() -> None:
    law = poisoned_law(cycle_law(CYCLE), lambda prefix: prefix[0] == 2)
    async with verifier_replica(ToyRunner(law)) as replica, replica.connect() as link:
        good, bad = Writer.start("good", PROMPT), Writer.start("bad", (2, 3))
        await link.send(good.open(), bad.open(), good.verify(), bad.verify())
        await link.receive(Opened)
        await link.receive(Opened)
        events = {type(event): event for event in (await link.receive(object), await link.receive(object))}
        assert set(events) == {Verified, Failed}
        assert events[Failed].session == "bad"  # type: ignore[attr-defined]
        assert events[Failed].failure.code == "model_error"  # type: ignore[attr-defined]


class _BreakingEngine(TargetEngine):
    """Raises in the pass that holds a session named "poison"."""

    def step(self) -> list[Verified | Failed]:
        if self.kv_len("poison") is not None:
            raise RuntimeError("scripted fault with a secret in it")
        return super().step()


async def test_broken_pass_fails_its_sessions_and_the_loop_goes_on() -> None:
    runner = toy()
    async with verifier_replica(runner, engine_class=_BreakingEngine) as replica, replica.connect() as link:
        idle = Writer.start("idle", PROMPT)
        await start(link, idle)
        poison = Writer.start("poison", PROMPT)
        await link.send(poison.open(), poison.verify())
        await link.receive(Opened)
        failed = await link.receive(Failed)
        assert (failed.session, failed.command_id, failed.failure.code) == ("poison", 1, "internal")
        assert "secret" not in failed.failure.message
        assert replica.actor.healthy
        assert (await link.ask(idle.verify(), Verified)).tokens == (13,)
        assert await link.ask(poison.verify(), Evicted) == Evicted("poison", 1, 2)


class _DamagedEngine(TargetEngine):
    """Finds its tables damaged after the first pass."""

    def check_integrity(self) -> None:
        if self.num_sessions:
            raise AssertionError("scripted damage")
        super().check_integrity()


async def _health(replica: VerifierReplica) -> int:
    stub = health_pb2_grpc.HealthStub(replica.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service="paceline.v1.Verifier"))
    return int(answer.status)


async def test_dead_loop_is_unhealthy_and_ends_the_service() -> None:
    actors: list[Any] = []

    async def serve_until_it_dies() -> None:
        serving = verifier_replica(toy(), engine_class=_DamagedEngine, limits=SOON)
        async with serving as replica, replica.connect() as link:
            actors.append(replica.actor)
            await replica.until(lambda: replica.actor.healthy)
            assert await _health(replica) == health_pb2.HealthCheckResponse.SERVING
            await link.send(Writer.start("s", PROMPT).open(), Writer.start("s", PROMPT).verify())
            await asyncio.Event().wait()

    with pytest.raises(AssertionError, match="scripted damage"):
        await wait_for(serve_until_it_dies())
    assert not actors[0].healthy


# --- storms and ends ------------------------------------------------------------------------------------------------


async def test_quiescence_after_a_storm() -> None:
    source = random.Random(3)
    runner = toy()
    async with verifier_replica(runner, limits=SOON) as replica:

        async def client(number: int) -> None:
            for turn in range(6):
                async with replica.connect() as link:
                    writer = Writer.start(f"s{number % 5}", (1, 2, 3, number % 7), epoch=turn + 1)
                    commands: list[VerifierCommand] = [
                        writer.open(),
                        writer.verify(),
                        writer.verify(DraftTree.chain((3, 5))),
                        Close(writer.name, source.randrange(1, 8)),
                    ]
                    chosen = source.sample(commands, source.randrange(1, len(commands) + 1))
                    # late rounds are dropped in silence; this one is always answered
                    await link.send(*chosen, Writer.start(f"own{number}", PROMPT).open())
                    if source.random() < 0.7:
                        await link.receive(object)

        async with asyncio.TaskGroup() as clients:
            for number in range(12):
                clients.create_task(client(number))
        await replica.quiet()
        async with replica.connect() as link:
            await start(link, Writer.start("after", PROMPT))
            await link.ask(Close("after", 1), Closed)


async def test_draining_refuses_new_sessions_and_waits_for_old_ones() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        draining = asyncio.create_task(replica.service.drain())
        await replica.until(lambda: replica.actor.draining)
        refused = await link.ask(Writer.start("new", PROMPT).open(), Failed)
        assert refused.failure.code == "unavailable"
        writer.log.extend((await link.ask(writer.verify(), Verified)).tokens)
        assert not draining.done()
        await link.ask(Close("s", 1), Closed)
        await wait_for(draining)


async def test_stopping_answers_every_waiter() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer, waiting = Writer.start("s", PROMPT), Writer.start("waiting", PROMPT)
        await start(link, writer)
        runner.gate.clear()
        await link.send(writer.verify())
        await runner.pass_entered()
        await link.send(waiting.open())
        await replica.until(lambda: replica.actor.num_waiting == 1)
        stopping = asyncio.create_task(replica.service.stop())
        runner.gate.set()
        assert (await link.receive(Verified)).session == "s"
        assert (await link.receive(Failed)).session == "waiting"
        await wait_for(stopping)
        assert await wait_for(link.call.read()) is grpc.aio.EOF


async def test_errors_reach_clients_as_their_own_class() -> None:
    async with verifier_replica(toy()) as replica:
        answer = await verifier_pb2_grpc.VerifierStub(replica.channel).GetModelInfo(
            verifier_pb2.VerifierGetModelInfoRequest()
        )
        assert (answer.info.model, answer.info.boot_id, answer.info.vocab_size) == ("toy", "boot-1", 64)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with verifier_replica(toy(), connect_limits=ConnectLimits(outbox_events=0)) as replica:
            await replica.open_link(replica.channel).call.read()
    error = error_from_rpc(caught.value)
    assert isinstance(error, CapacityExceeded)
    assert "does not read" in error.message
