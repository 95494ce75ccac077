"""A replica of a fleet in one process: it listens on a port of its own, can be cut off, killed, and brought back."""

from __future__ import annotations

import contextlib
import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.drafting.method import DraftMethod
from paceline.runtime.grpc_server import GrpcServer
from paceline.runtime.replica_actor import ReplicaActor
from paceline.runtime.replica_service import ReplicaService
from paceline.runtime.settings import ServiceSettings
from paceline.runtime.supervisor import Supervisor
from tests.fakes.toy_runner import ToyRunner

NodeT = TypeVar("NodeT")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class Life(Generic[NodeT]):
    """One process life of a replica: what dies with it."""

    actor: ReplicaActor[Any, Any, Any]
    service: ReplicaService[Any, Any]
    model: NodeT


class Node(Generic[NodeT]):
    """A replica on a port of its own. `model` is the toy runner or the drafting method of the present life."""

    _boots = itertools.count(1)

    def __init__(self, make_life: Callable[[str], Life[NodeT]], server: dict[str, Any]) -> None:
        self.port = free_port()
        self._settings = ServiceSettings(port=self.port, **server)
        self.address = f"127.0.0.1:{self.port}"
        self._make_life = make_life
        self._life: Life[NodeT] | None = None
        self._server: GrpcServer | None = None
        self._stack = contextlib.AsyncExitStack()

    @property
    def booted(self) -> bool:
        """Whether it lives."""
        return self._life is not None

    @property
    def alive(self) -> Life[NodeT]:
        assert self._life is not None, "the replica is dead"
        return self._life

    @property
    def model(self) -> NodeT:
        return self.alive.model

    @property
    def num_sessions(self) -> int:
        return 0 if self._life is None else self._life.actor.num_sessions

    async def boot(self) -> None:
        """A new life, which listens."""
        self._life = self._make_life(f"boot-{next(self._boots)}")
        supervisor = await self._stack.enter_async_context(Supervisor("replica"))
        await self._life.service.start(supervisor, lambda healthy: None)
        await self.listen()

    async def listen(self) -> None:
        """Opens the port for the present life."""
        self._server = GrpcServer(self._settings, self.alive.service.grpc_services)
        self.alive.service.register(self._server.server)
        await self._server.start()

    async def cut(self) -> None:
        """Closes the port and breaks every stream; the actor lives on."""
        server, self._server = self._server, None
        if server is not None:
            await server.server.stop(0)

    async def kill(self) -> None:
        """Ends the life: what it knew is gone."""
        await self.cut()
        life, self._life = self._life, None
        if life is not None:
            await life.service.stop()
            await self._stack.aclose()
            self._stack = contextlib.AsyncExitStack()

    async def close(self) -> None:
        """Checks the tables and ends the life."""
        try:
            if self._life is not None and self.num_sessions == 0:
                self.alive.actor.check_integrity()
        finally:
            await self.kill()


VerifierNode = Node[ToyRunner]
DrafterNode = Node[DraftMethod]
