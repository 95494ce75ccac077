"""Real gRPC replicas on loopback with weightless models, and a client that speaks the raw protocol.

async with verifier_replica(ToyRunner(law)) as replica, replica.connect() as link:
    await link.send(Open(...), Verify(...))
    verdict = await link.receive(Verified)
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import grpc.aio
import torch
from paceline_drafter.draft_actor import DraftActor
from paceline_drafter.draft_limits import DraftLimits
from paceline_drafter.feature_store import FeatureStore
from paceline_drafter.servicer import DrafterService, drafter_door
from paceline_verifier.servicer import VerifierService, verifier_door
from paceline_verifier.verify_actor import VerifyActor

from paceline import wire
from paceline.drafting.method import DraftMethod
from paceline.engine.runner import SequencePass
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import (
    DrafterCommand,
    DrafterEvent,
    Hello,
    ModelInfo,
    Open,
    SamplingParams,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.runtime.connect import ConnectLimits
from paceline.runtime.grpc_client import open_channel
from paceline.runtime.grpc_server import GrpcServer
from paceline.runtime.replica_actor import ActorLimits, ReplicaActor
from paceline.runtime.replica_service import Replica, ReplicaService
from paceline.runtime.settings import ServiceSettings
from paceline.runtime.supervisor import Supervisor
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import TokenLog
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.fakes.toy_runner import ToyRunner

RECEIVE_TIMEOUT_S = 20.0
GREEDY = SamplingParams(temperature=0.0)
BOOT_ID = "boot-1"

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")
WantedT = TypeVar("WantedT")


class Link(Generic[CommandT, EventT]):
    """One `Connect` stream of a client.

    Args:
        call: the stream.
        to_frame: makes a request frame of commands.
        from_pb: reads one event.
    """

    def __init__(
        self,
        call: grpc.aio.StreamStreamCall[Any, Any],
        to_frame: Callable[[Sequence[CommandT]], Any],
        from_pb: Callable[[Any], EventT],
    ) -> None:
        self.call = call
        self.frames: list[int] = []
        self._to_frame = to_frame
        self._from_pb = from_pb
        self._events: list[EventT] = []

    async def send(self, *commands: CommandT) -> None:
        """Sends the commands in one frame."""
        await self.call.write(self._to_frame(commands))

    async def send_raw(self, frame: Any) -> None:
        await self.call.write(frame)

    async def receive(self, wanted: type[WantedT]) -> WantedT:
        """The next event, which must be of this kind."""
        if not self._events:
            async with asyncio.timeout(RECEIVE_TIMEOUT_S):
                frame: Any = await self.call.read()
            assert frame is not grpc.aio.EOF, f"the stream ended with {await self.call.code()}"
            self.frames.append(len(frame.events))
            self._events.extend(self._from_pb(event) for event in frame.events)
        event = self._events.pop(0)
        assert isinstance(event, wanted), f"expected {wanted.__name__}, got {event}"
        return event

    async def ask(self, command: CommandT, wanted: type[WantedT]) -> WantedT:
        """Sends a command and waits for its answer."""
        await self.send(command)
        return await self.receive(wanted)

    async def break_off(self) -> None:
        """Breaks the link as a lost connection would."""
        self.call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.call.code()


@dataclass
class RunningReplica(Generic[CommandT, EventT]):
    """A replica that serves on loopback."""

    address: str
    actor: ReplicaActor[CommandT, EventT, Any]  # type: ignore[type-var]
    channel: grpc.aio.Channel
    open_link: Callable[[grpc.aio.Channel], Link[CommandT, EventT]]
    service: ReplicaService[CommandT, EventT]  # type: ignore[type-var]
    supervisor: Supervisor
    links: list[Link[CommandT, EventT]] = field(default_factory=list)

    @property
    def num_streams(self) -> int:
        """Streams that the replica holds open."""
        return self.service.door.streams.num_streams

    @contextlib.asynccontextmanager
    async def connect(self, channel: grpc.aio.Channel | None = None) -> AsyncIterator[Link[CommandT, EventT]]:
        """A link whose Hello has been read."""
        link = self.open_link(channel or self.channel)
        try:
            assert (await link.receive(Hello)).boot_id == BOOT_ID
            yield link
        finally:
            await link.break_off()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when the condition holds; looks once per millisecond."""
        deadline_s = time.monotonic() + RECEIVE_TIMEOUT_S
        while not condition():
            assert time.monotonic() < deadline_s, "the condition never came true"
            await asyncio.to_thread(time.sleep, 0.001)

    async def quiet(self) -> None:
        """Returns when no session is left, after the tables were checked."""
        await self.until(lambda: self.actor.num_sessions == 0 and not self.actor.pass_due())
        self.actor.check_integrity()


def verifier_link(channel: grpc.aio.Channel) -> Link[VerifierCommand, VerifierEvent]:
    """A stream to a verifier; its Hello is still to be read."""

    def frame(commands: Sequence[VerifierCommand]) -> verifier_pb2.VerifierConnectRequest:
        return verifier_pb2.VerifierConnectRequest(commands=map(wire.verifier_command_to_pb, commands))

    call = verifier_pb2_grpc.VerifierStub(channel).Connect()
    return Link(call, frame, wire.verifier_event_from_pb)


def drafter_link(channel: grpc.aio.Channel) -> Link[DrafterCommand, DrafterEvent]:
    """A stream to a drafter; its Hello is still to be read."""

    def frame(commands: Sequence[DrafterCommand]) -> drafter_pb2.DrafterConnectRequest:
        return drafter_pb2.DrafterConnectRequest(commands=map(wire.drafter_command_to_pb, commands))

    call = drafter_pb2_grpc.DrafterStub(channel).Connect()
    return Link(call, frame, wire.drafter_event_from_pb)


VerifierReplica = RunningReplica[VerifierCommand, VerifierEvent]
DrafterReplica = RunningReplica[DrafterCommand, DrafterEvent]


@contextlib.asynccontextmanager
async def _serve(
    service: ReplicaService[Any, Any],
    actor: ReplicaActor[Any, Any, Any],
    open_link: Callable[[grpc.aio.Channel], Link[Any, Any]],
) -> AsyncIterator[RunningReplica[Any, Any]]:
    server = GrpcServer(ServiceSettings(), service.grpc_services)
    service.register(server.server)
    address = await server.start()
    channel = open_channel(address)
    async with Supervisor("test") as supervisor:
        supervisor.spawn("health", server.run_health)
        await service.start(supervisor, server.set_healthy)
        server.set_serving(True)
        try:
            yield RunningReplica(address, actor, channel, open_link, service, supervisor)
        finally:
            await channel.close()
            await service.stop()
            await server.stop(1.0)
    assert not supervisor.children


@contextlib.asynccontextmanager
async def verifier_replica(
    runner: ToyRunner,
    *,
    options: TargetOptions | None = None,
    limits: ActorLimits | None = None,
    connect_limits: ConnectLimits | None = None,
    engine_class: type[TargetEngine] = TargetEngine,
    gather_window_s: float = 0.0,
) -> AsyncIterator[VerifierReplica]:
    """A verifier on a weightless runner; at the end no session and no page may be left behind its engine."""
    engine = engine_class(runner, options=options or TargetOptions())
    actor = VerifyActor(engine, limits or ActorLimits(), gather_window_s=gather_window_s)
    info = ModelInfo("toy", runner.info.vocab_size, runner.info.max_model_len, (), "toy-tokenizer", BOOT_ID)
    service = VerifierService(verifier_door(connect_limits), lambda: Replica(actor, info))
    async with _serve(service, actor, verifier_link) as replica:
        yield replica
    assert engine.num_sessions == 0
    assert engine.kv_pages_in_use == 0
    engine.check_integrity()


@contextlib.asynccontextmanager
async def drafter_replica(
    method: DraftMethod,
    *,
    draft_limits: DraftLimits | None = None,
    limits: ActorLimits | None = None,
    connect_limits: ConnectLimits | None = None,
    features: FeatureStore | None = None,
    num_outcomes: int = 0,
) -> AsyncIterator[DrafterReplica]:
    """A drafter with any method."""
    actor = DraftActor(
        method, draft_limits or DraftLimits(), limits or ActorLimits(), features=features, num_outcomes=num_outcomes
    )
    info = ModelInfo("toy", 64, 512, (), "toy-tokenizer", BOOT_ID, methods=method.info.methods)
    service = DrafterService(drafter_door(connect_limits), lambda: Replica(actor, info))
    async with _serve(service, actor, drafter_link) as replica:
        yield replica
    assert actor.num_sessions == 0


@dataclass
class Writer:
    """The smallest gateway: one session's log and rounds.

    Attributes:
        name: of the session.
        log: committed tokens.
        epoch, round: of the next command.
    """

    name: str
    log: TokenLog
    epoch: int = 1
    round: int = 0
    sampling: SamplingParams = GREEDY

    @classmethod
    def start(cls, name: str, prompt: Sequence[int], sampling: SamplingParams = GREEDY, epoch: int = 1) -> Writer:
        return cls(name, TokenLog(prompt), epoch, sampling=sampling)

    def open(self) -> Open:
        return Open(self.name, self.epoch, tuple(self.log.tokens), len(self.log), self.sampling)

    def verify(self, block: DraftTree = EMPTY_BLOCK, **changes: Any) -> Verify:
        """The next round; `changes` overrides fields."""
        self.round += 1
        length = len(self.log)
        command = Verify(self.name, self.epoch, self.round, length, self.log.hash_at(length), (), block)
        return replace(command, **changes)


async def wait_for(work: Awaitable[WantedT]) -> WantedT:
    """Awaits with the tests' time limit."""
    async with asyncio.timeout(RECEIVE_TIMEOUT_S):
        return await work


class GatedRunner(ToyRunner):
    """A toy whose passes wait for the test while the gate is shut.

    Attributes:
        gate: set lets passes through.
        entered: set when a pass has arrived at the shut gate.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        if not self.gate.is_set():
            self.entered.set()
            assert self.gate.wait(RECEIVE_TIMEOUT_S), "the test never opened the gate"
        return super().forward(batch)

    async def pass_entered(self) -> None:
        """Returns when a pass waits at the gate."""
        assert await asyncio.to_thread(self.entered.wait, RECEIVE_TIMEOUT_S), "no pass arrived"
