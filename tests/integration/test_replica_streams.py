"""Streams of both services: every command of a frame is answered, however many there are and whoever ends first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
import pytest

from paceline.messages import Close, Closed, Draft, Open, Opened
from paceline.runtime.connect import ConnectLimits
from paceline.token_log import TokenLog
from tests.fakes.scripted_drafter import ScriptedDrafter, StepGate, empty
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.replicas import (
    GREEDY,
    GatedRunner,
    Link,
    RunningReplica,
    Writer,
    drafter_replica,
    verifier_replica,
    wait_for,
)

Serve = Callable[[ConnectLimits | None], AbstractAsyncContextManager[RunningReplica[Any, Any]]]

SERVICES: dict[str, Serve] = {
    "verifier": lambda limits: verifier_replica(ToyRunner(cycle_law((3, 5, 7))), connect_limits=limits),
    "drafter": lambda limits: drafter_replica(ScriptedDrafter(empty()), connect_limits=limits),
}
both = pytest.mark.parametrize("serve", SERVICES.values(), ids=SERVICES)


def opening(name: str) -> Open:
    return Open(name, 1, (1, 2, 4), 3, GREEDY)


async def _ends_its_side_during_a_pass(
    replica: RunningReplica[Any, Any], link: Link[Any, Any], end_pass: Callable[[], None]
) -> None:
    """Two short sessions in one frame and the end of the peer's side, all known before any of it is applied."""
    await link.send(opening("a"), Close("a", 1), opening("b"), Close("b", 1))
    await link.call.done_writing()
    await replica.until(lambda: replica.actor.num_waiting == 5)
    end_pass()
    for name in ("a", "b"):
        assert (await link.receive(Opened)).session == name
        assert await link.receive(Closed) == Closed(name, 1)
    assert await wait_for(link.call.read()) is grpc.aio.EOF
    assert await link.call.code() is grpc.StatusCode.OK


async def test_a_verifiers_peer_that_ends_its_side_behind_its_last_close_gets_every_answer() -> None:
    runner = GatedRunner(cycle_law((3, 5, 7)))
    async with verifier_replica(runner) as replica, replica.connect() as other, replica.connect() as link:
        busy = Writer.start("busy", (1, 2, 4))
        runner.gate.clear()
        await other.send(busy.open(), busy.verify())
        await runner.pass_entered()
        await _ends_its_side_during_a_pass(replica, link, runner.gate.set)


async def test_a_drafters_peer_that_ends_its_side_behind_its_last_close_gets_every_answer() -> None:
    gate = StepGate()
    drafter = ScriptedDrafter(empty(), gate=gate)
    async with drafter_replica(drafter) as replica, replica.connect() as other, replica.connect() as link:
        log = TokenLog((1, 2, 4))
        await other.send(opening("busy"), Draft("busy", 1, 1, len(log), log.hash_at(len(log)), 4))
        await asyncio.to_thread(gate.wait_entered)
        await _ends_its_side_during_a_pass(replica, link, gate.open)


@both
async def test_a_frame_of_more_commands_than_an_outbox_holds_is_answered_whole(serve: Serve) -> None:
    number = 20_000
    async with serve(ConnectLimits(outbox_events=1000)) as replica, replica.connect() as link:
        await link.send(*(Close(f"nobody{index}", 1) for index in range(number)))
        for index in range(number):
            assert await link.receive(Closed) == Closed(f"nobody{index}", 1)
