"""What verifier and drafter share as processes: load in a thread, serve an actor, watch its health, drain, stop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc.aio
from prometheus_client import CollectorRegistry

from paceline.errors import Unavailable
from paceline.messages import Close, Draft, ModelInfo, Open, Verify
from paceline.runtime.connect import ConnectCodec, ConnectLimits, ConnectServer
from paceline.runtime.replica_actor import ReplicaActor
from paceline.runtime.replica_metrics import ReplicaCollector
from paceline.runtime.supervisor import OnError, Supervisor
from paceline.runtime.telemetry import new_registry

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT", bound=Open | Close | Verify | Draft)
EventT = TypeVar("EventT")

_HEALTH_POLL_S = 1.0
_LOADING = "the model is still loading; try again when health says SERVING"
_HANGING = "a pass of the model hangs; use another replica"


@dataclass(frozen=True, slots=True)
class Replica(Generic[CommandT, EventT]):
    """A loaded replica: its actor, which has proved that it works, and what it serves.

    Attributes:
        actor: the owner of the model.
        info: what it serves.
        vocabulary: token of each id; empty where there is no tokenizer.
    """

    actor: ReplicaActor[CommandT, EventT, Any]
    info: ModelInfo
    vocabulary: Mapping[int, str] = field(default_factory=dict)


class ReplicaDoor(Generic[CommandT, EventT]):
    """What a servicer translates for: the actor, but nothing while the model loads or hangs.

    Args:
        codec: the service's frames.
        limits: bounds of each stream.
    """

    def __init__(self, codec: ConnectCodec[CommandT, EventT], limits: ConnectLimits | None = None) -> None:
        self._codec = codec
        self._limits = limits
        self._replica: Replica[CommandT, EventT] | None = None
        self._streams: ConnectServer[CommandT, EventT] | None = None
        self._hanging = False

    def open(self, replica: Replica[CommandT, EventT]) -> None:
        """Serves the replica from now on."""
        self._replica = replica
        self._streams = ConnectServer(self._codec, replica.actor, replica.info.boot_id, self._limits)

    def set_hanging(self, hanging: bool) -> None:
        """While a pass hangs all peers are turned away, so that their sessions can move; they may come back later."""
        self._hanging = hanging
        if hanging and self._streams is not None:
            self._streams.fail_all(Unavailable(_HANGING))

    @property
    def info(self) -> ModelInfo:
        """What the replica serves.

        Raises:
            Unavailable: the model is loading or hangs.
        """
        return self._loaded.info

    @property
    def actor(self) -> ReplicaActor[CommandT, EventT, Any]:
        """The owner of the model, for rpcs beside the streams.

        Raises:
            Unavailable: the model is loading or hangs.
        """
        return self._loaded.actor

    @property
    def vocabulary(self) -> Mapping[int, str]:
        """Token of each id.

        Raises:
            Unavailable: the model is loading or hangs.
        """
        return self._loaded.vocabulary

    @property
    def _loaded(self) -> Replica[CommandT, EventT]:
        if self._replica is None or self._hanging:
            raise Unavailable(_HANGING if self._hanging else _LOADING)
        return self._replica

    @property
    def streams(self) -> ConnectServer[CommandT, EventT]:
        """The server of its streams.

        Raises:
            Unavailable: the model is loading or hangs.
        """
        if self._streams is None or self._hanging:
            raise Unavailable(_HANGING if self._hanging else _LOADING)
        return self._streams

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return 0 if self._streams is None else self._streams.num_streams

    def finish_streams(self) -> None:
        """Ends every stream when its queued events have been sent."""
        if self._streams is not None:
            self._streams.finish_all()


class ReplicaService(ABC, Generic[CommandT, EventT]):
    """The `Service` of a replica; a subclass registers its servicer.

    Args:
        door: what the servicer translates for; public.
        load: loads the model and proves that it works; runs in a thread of its own and may take minutes.

    Attributes:
        registry: its metrics; those of the replica are there when it has been loaded.
        addresses: further addresses that it listens on.
    """

    def __init__(self, door: ReplicaDoor[CommandT, EventT], load: Callable[[], Replica[CommandT, EventT]]) -> None:
        self.door = door
        self._load = load
        self._replica: Replica[CommandT, EventT] | None = None
        self._stopping = False
        self.registry: CollectorRegistry = new_registry(self.name)
        self.addresses: dict[str, str] = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """Of the service."""

    @property
    @abstractmethod
    def grpc_services(self) -> Sequence[str]:
        """Full names of its rpc services."""

    @abstractmethod
    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""

    async def start(self, supervisor: Supervisor, set_healthy: Callable[[bool], None]) -> None:
        """Loads the model and starts the actor."""
        executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="load")
        try:
            replica = await asyncio.get_running_loop().run_in_executor(executor, self._load)
        finally:
            executor.shutdown(wait=False)
        self._replica = replica
        supervisor.spawn(replica.actor.name, replica.actor.run, on_error=OnError.FAIL)
        supervisor.spawn("health watch", lambda: self._watch(replica, set_healthy), on_error=OnError.FAIL)
        self.door.open(replica)
        self.registry.register(ReplicaCollector(replica.actor, replica.info, lambda: self.door.num_streams))
        logger.info("loaded", extra={"model": replica.info.model, "boot_id": replica.info.boot_id})

    async def _watch(self, replica: Replica[CommandT, EventT], set_healthy: Callable[[bool], None]) -> None:
        healthy = True
        while not self._stopping:
            await asyncio.sleep(_HEALTH_POLL_S)
            if not self._stopping and replica.actor.healthy != healthy:
                healthy = replica.actor.healthy
                logger.warning("health changed", extra={"healthy": healthy})
                set_healthy(healthy)
                self.door.set_hanging(not healthy)

    async def drain(self) -> None:
        """Refuses new sessions and returns when the last one has ended."""
        if self._replica is not None:
            await self._replica.actor.drain()

    async def stop(self) -> None:
        """Answers every waiter, frees everything and ends the streams."""
        self._stopping = True
        if self._replica is not None:
            await self._replica.actor.stop()
        self.door.finish_streams()
