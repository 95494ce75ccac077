"""Clients that leave, in each phase of a request and at every door: within the round that runs everything is free.

A phase is reached step by step: passes and drafting steps wait for the test. When the client has left, the one pass or
step that had begun is let through, and no other may begin. What is held is read from the services' own gauges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from paceline.messages import SamplingParams
from paceline.text.request import GenerationRequest
from paceline.v1.gateway_pb2_grpc import GenerationStub
from paceline.wire.generation import generate_request_to_pb
from tests.fakes.scripted_drafter import ScriptedDrafter, StepGate
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import ToyRunner
from tests.integration.fleet import VOCAB, Fleet, perfect_method, until
from tests.integration.front_door import FrontDoor, Raw, body_of, content_of, front_door, post_bytes
from tests.integration.http_calls import COMPLETIONS
from tests.integration.node import Node
from tests.integration.paced import EXPECTED, LAW, PROMPT, Pace, request_of
from tests.integration.scraping import scrape

DOORS = ("grpc", "http", "http stream")
HELD = ("sessions", "num_requests_running", "num_requests_waiting", "kv_tokens_in_use", "kv_cache_usage_perc")
ROUNDS = 3
MAX_MODEL_LEN = 8192


class PacedRunner(ToyRunner):
    """A toy target at the test's pace, with room for long texts."""

    def __init__(self, law: Any, pace: Pace) -> None:
        super().__init__(law, VOCAB, max_model_len=MAX_MODEL_LEN, num_pages=4096)
        self._pace = pace

    def forward(self, batch: Any, *, wait: bool = True) -> Any:
        self._pace.pass_through()
        return super().forward(batch)


@dataclass
class World:
    """A fleet at the test's pace."""

    front: FrontDoor
    pace: Pace
    gate: StepGate

    @property
    def fleet(self) -> Fleet:
        return self.front.fleet

    @property
    def num_running(self) -> int:
        """Permits at the door."""
        return self.fleet.gateway.sessions.num_running

    @property
    def verifier(self) -> Node[ToyRunner]:
        return self.fleet.verifiers[0]

    @property
    def drafter(self) -> Node[Any]:
        return self.fleet.drafters[0]

    @property
    def passes(self) -> list[tuple[int, ...]]:
        return self.verifier.model.passes

    async def check_free(self) -> None:
        """Nobody holds anything: the services' gauges say so, and so do their tables."""
        await self.front.idle()
        for node in self.fleet.nodes:
            if not node.booted:
                continue
            await until(lambda node=node: not node.alive.actor.pass_due())  # type: ignore[misc]
            seen = await scrape(node.alive.service.registry)
            names = [f"paceline_{name}" for name in HELD]
            assert {name: seen.sum(name) for name in names} == dict.fromkeys(names, 0.0)
            assert seen.sum("paceline_open_streams") == 1, "the gateway's"
            node.alive.actor.check_integrity()
        assert isinstance(self.drafter.model, ScriptedDrafter)
        assert self.drafter.model.fed == {}


class Visitor:
    """A client that can be gone at any moment.

    Args:
        front: the doors.
        name: which one it takes.
    """

    def __init__(self, front: FrontDoor, name: str) -> None:
        self._front = front
        self._name = name
        self._stack = contextlib.AsyncExitStack()
        self._reading: asyncio.Task[None] | None = None
        self._call: Any = None
        self.pieces = 0
        """Messages that it has read."""

    async def come(self, request: GenerationRequest, reads: bool = True) -> None:
        if self._name == "grpc":
            # Without probing, the transport takes 64 KiB for a client that does not read.
            options = [("grpc.http2.bdp_probe", 0)]
            channel = grpc.aio.insecure_channel(self._front.fleet.address, options=options)
            await self._stack.enter_async_context(channel)
            self._call = GenerationStub(channel).Generate(generate_request_to_pb(request))
            work = self._read_call()
        else:
            connection = self._stack.enter_context(contextlib.closing(self._front.connect(receive_bytes=4096)))
            content = content_of(body_of(request, stream=self._name == "http stream"))
            await connection.send(post_bytes(COMPLETIONS, content))
            work = self._read_connection(connection)
        if reads:
            self._reading = asyncio.create_task(work)
        else:
            work.close()

    async def leave(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait({self._reading})
            assert self._reading.cancelled(), "it was served before it could leave"
        if self._call is not None:
            self._call.cancel()
        await self._stack.aclose()

    async def _read_call(self) -> None:
        while await self._call.read() is not grpc.aio.EOF:
            self.pieces += 1

    async def _read_connection(self, connection: Raw) -> None:
        while piece := await connection.read():
            self.pieces += piece.count(b"data: ")


@contextlib.asynccontextmanager
async def world(folder: Path, **settings: Any) -> AsyncIterator[World]:
    pace, gate = Pace(), StepGate()
    options: dict[str, Any] = {
        "runner": lambda law: PacedRunner(law, pace),
        "method": perfect_method(LAW, gate=gate),
        "write_model": lambda folder: write_letters(folder, VOCAB, max_model_len=MAX_MODEL_LEN),
    }
    async with front_door(folder, LAW, settings=settings, **options) as front:
        try:
            yield World(front, pace, gate)
        finally:
            pace.open()
            gate.open()


# --- the phases -------------------------------------------------------------------------------------------------------


async def before_a_verifier(made: World, visitor: Visitor) -> None:
    await made.verifier.kill()
    await until(lambda: not made.fleet.verifier_pool.snapshot.ready)
    await visitor.come(request_of(made.fleet))
    await until(lambda: made.num_running == 1)
    await visitor.leave()
    await made.check_free()
    made.gate.open()
    await made.verifier.boot()
    await until(lambda: bool(made.fleet.verifier_pool.snapshot.ready))


async def queued(made: World, visitor: Visitor) -> None:
    """It waits at a verifier whose only pass runs for another client."""
    made.gate.open()
    first = asyncio.create_task(made.front.door("grpc").generate(request_of(made.fleet)))
    await made.pace.entered()
    await visitor.come(request_of(made.fleet))
    await until(lambda: made.verifier.alive.actor.num_waiting == 2)  # to be opened, and to be verified
    await visitor.leave()
    await until(lambda: made.num_running == 1)
    await until(lambda: made.verifier.alive.actor.num_waiting == 3)  # and to be closed
    made.pace.open()
    assert list((await first).token_ids) == EXPECTED
    assert all(len(parts) == 1 for parts in made.passes), "no pass was for the one that had left"


async def verifying(made: World, visitor: Visitor, rounds: int = ROUNDS) -> None:
    made.gate.open()
    await visitor.come(request_of(made.fleet))
    for _ in range(rounds):
        await made.pace.entered()
        made.pace.allow()
    await made.pace.entered()
    await visitor.leave()
    # The drafter and the permit are free while the pass that had begun still runs.
    await until(lambda: made.num_running == 0)
    await until(lambda: made.drafter.num_sessions == 0)
    made.pace.allow()
    await made.check_free()
    assert len(made.passes) == rounds + 1


async def prefill(made: World, visitor: Visitor) -> None:
    await verifying(made, visitor, rounds=0)


async def drafting(made: World, visitor: Visitor) -> None:
    """The verifier has nothing to do: the session waits for a draft."""
    made.pace.open()
    await visitor.come(request_of(made.fleet))
    await asyncio.to_thread(made.gate.wait_entered)
    await until(lambda: len(made.passes) == 1 and not made.verifier.alive.actor.pass_due())
    await visitor.leave()
    # The verifier and the permit are free while the step that had begun still runs.
    await until(lambda: made.num_running == 0)
    await until(lambda: made.verifier.num_sessions == 0)
    made.gate.release()
    await made.check_free()
    assert (len(made.passes), made.drafter.model.steps) == (1, 1)


async def slow_reader(made: World, visitor: Visitor) -> None:
    made.gate.open()
    made.pace.open()
    sampling = SamplingParams(temperature=0.0, top_logprobs=20, ignore_eos=True)
    request = made.fleet.request(PROMPT, max_tokens=8000, sampling=sampling)
    await visitor.come(request, reads=False)
    sessions = made.fleet.gateway.sessions
    await until(lambda: any(actor.client.full for actor in sessions.actors))
    await until(lambda: not made.verifier.alive.actor.pass_due())
    stopped_at = len(made.passes)
    assert stopped_at < 8000 / 9 / 2, "it was not held back"
    await visitor.leave()
    await made.check_free()
    assert len(made.passes) <= stopped_at + 1  # the system may have taken one more chunk in the end


Phase = Callable[[World, Visitor], Awaitable[None]]
PHASES: tuple[Phase, ...] = (before_a_verifier, queued, prefill, drafting, verifying, slow_reader)
CASES = [
    pytest.param(door, phase, id=f"{door}-{phase.__name__}")
    for phase in PHASES
    for door in DOORS
    if (door, phase) != ("http", slow_reader)  # an answer that comes whole is read when all is done
]


@pytest.mark.parametrize(("door", "phase"), CASES)
async def test_a_client_that_leaves_frees_everything_within_the_round(tmp_path: Path, door: str, phase: Phase) -> None:
    waits = {"draft_wait_floor_ms": 60_000, "draft_wait_ceiling_ms": 60_000} if phase is drafting else {}
    settings = {"verifier_wait_ms": 60_000, "max_buffered_chunks": 4, "num_speculative_tokens": 8, **waits}
    async with world(tmp_path, **settings) as made:
        await phase(made, Visitor(made.front, door))
        await made.check_free()
        # The next one is served as ever.
        made.pace.open()
        made.gate.open()
        assert list((await made.front.door(door).generate(request_of(made.fleet))).token_ids) == EXPECTED
