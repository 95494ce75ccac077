"""The fleet that is tormented: gateways, verifiers, drafters and Redis as processes, and a network that can be cut.

    clients ──▶ gateway-0, gateway-1 ──▶ fault proxy ──▶ verifier-0.., drafter-0..
                        └──────────────▶ redis

Every gateway reaches every replica through an address of its own in the proxy, so that one pair can be cut apart.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from paceline.benchmark.delay_proxy import DelayProxy
from paceline.cli.ports import why_not_free
from tests.chaos.member import READY_TIMEOUT_S, Kind, Member
from tests.chaos.models import MODEL, ChaosModels

SESSION_TTL_S = 120.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.02
_PORTS = range(20_000, 32_000)
"""Below those that the kernel gives to outgoing connections: a dead member's port stays free for it."""


@dataclass(frozen=True, slots=True)
class FleetSize:
    """How many processes of each kind there are."""

    gateways: int = 2
    verifiers: int = 2
    drafters: int = 2


@dataclass(slots=True)
class Blackouts:
    """When no verifier could be used by any gateway: on the clock of `time.monotonic`.

    Attributes:
        intervals: [begin, end); the last one may not have ended.
    """

    intervals: list[tuple[float, float]] = field(default_factory=list)
    _began_at: float | None = None

    def note(self, usable: bool, now: float) -> None:
        """Tells whether some verifier can be used from now on."""
        if not usable and self._began_at is None:
            self._began_at = now
        elif usable and self._began_at is not None:
            self.intervals.append((self._began_at, now))
            self._began_at = None

    @property
    def total_s(self) -> float:
        """All of it that is over."""
        return sum(until - since for since, until in self.intervals)

    def seconds_in(self, begin: float, end: float) -> float:
        """How much of that time was blackout."""
        known = [*self.intervals] if self._began_at is None else [*self.intervals, (self._began_at, end)]
        return sum(max(0.0, min(end, until) - max(begin, since)) for since, until in known)


class ChaosFleet:
    """A running fleet. Use as an async context manager, in the main thread.

    Args:
        size: how many processes there are.
        models: what they serve.
        folder: of logs and data.

    Attributes:
        members: all processes, by name.
        blackouts: when no verifier could be used.
        cuts: (gateway, replica) pairs that are cut apart.
        frozen: process ids of stopped processes, by name; that of a life which is over does not count.
    """

    def __init__(self, size: FleetSize, models: ChaosModels, folder: Path) -> None:
        self._models = models
        self._folder = folder
        self._proxy = DelayProxy(())
        self._tasks: list[asyncio.Task[None]] = []
        ports = _free_ports(size.gateways + size.verifiers + size.drafters + 1)
        self.blackouts = Blackouts()
        self.cuts: set[tuple[str, str]] = set()
        self.frozen: dict[str, int] = {}
        self.members: dict[str, Member] = {}
        for kind, count in (
            (Kind.REDIS, 1),
            (Kind.VERIFIER, size.verifiers),
            (Kind.DRAFTER, size.drafters),
            (Kind.GATEWAY, size.gateways),
        ):
            for index in range(count):
                name = f"{kind.value}-{index}"
                self.members[name] = Member(name, kind, next(ports), folder / name, {}, self._changed)
        self._pairs = [(gateway.name, replica.name) for gateway in self.of(Kind.GATEWAY) for replica in self.replicas]

    def of(self, *kinds: Kind) -> list[Member]:
        """Members of some kinds."""
        return [member for member in self.members.values() if member.kind in kinds]

    @property
    def replicas(self) -> list[Member]:
        """Verifiers, then drafters."""
        return self.of(Kind.VERIFIER, Kind.DRAFTER)

    @property
    def redis_url(self) -> str:
        """Where the store is."""
        return f"redis://{self.of(Kind.REDIS)[0].address}"

    @property
    def gateways(self) -> list[str]:
        """Where clients connect."""
        return [member.address for member in self.of(Kind.GATEWAY)]

    @property
    def proxy_pid(self) -> int:
        """The fault proxy's process."""
        return self._proxy.pid

    # --- its life -----------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        try:
            # Connections to replicas that are not there are closed at once, as if there were no proxy.
            proxy = DelayProxy([self.members[replica].address for _, replica in self._pairs])
            self._proxy = await proxy.__aenter__()
            self._give_flags()
            for kinds in ((Kind.REDIS, Kind.VERIFIER, Kind.DRAFTER), (Kind.GATEWAY,)):
                self._tasks += [
                    asyncio.create_task(member.keep(), name=f"keeper {member.name}") for member in self.of(*kinds)
                ]
                await self.all_up(*kinds)
            self.blackouts.intervals.clear()  # that there was none before the start is no news
        except BaseException:
            await self._end_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._end_all()

    async def all_up(self, *kinds: Kind) -> None:
        """Returns when all members of these kinds serve; of all kinds if none is named."""
        async with asyncio.timeout(READY_TIMEOUT_S):
            while not all(member.up for member in self.of(*(kinds or tuple(Kind)))):
                self.check_keepers()
                await asyncio.sleep(_POLL_S)

    def check_keepers(self) -> None:
        """Raises what a keeper has failed with: a process that does not come up."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    async def stop(self) -> list[str]:
        """Ends everything with SIGTERM, as an operator does; says which services do not end cleanly."""
        complaints = []
        for kinds in ((Kind.GATEWAY,), (Kind.VERIFIER, Kind.DRAFTER), (Kind.REDIS,)):
            members = self.of(*kinds)
            for member in members:
                member.stopping = True
                member.send(signal.SIGTERM, member.pid)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    while any(member.pid for member in members):  # noqa: ASYNC110
                        await asyncio.sleep(_POLL_S)
            complaints += [f"{member.name} does not end after SIGTERM" for member in members if member.pid]
            if Kind.REDIS not in kinds:
                unclean = [member for member in members if "exit_code=0" not in _last_line(member.logs[-1])]
                complaints += [
                    f"{member.name} does not end cleanly: {_last_line(member.logs[-1])}" for member in unclean
                ]
        return complaints

    async def _end_all(self) -> None:
        for member in self.members.values():
            member.stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._proxy.stop()

    def _give_flags(self) -> None:
        through = dict(zip(self._pairs, self._proxy.addresses, strict=True))
        for member in self.of(Kind.VERIFIER):
            member.flags = self._models.verifier_flags()
        for index, member in enumerate(self.of(Kind.DRAFTER)):
            member.flags = self._models.drafter_flags(index)
        for gateway in self.of(Kind.GATEWAY):
            gateway.flags = {
                "model": str(self._models.target),
                "model-name": MODEL,
                "redis-url": self.redis_url,
                "session-ttl-s": str(SESSION_TTL_S),
                "verifiers": ",".join(through[gateway.name, member.name] for member in self.of(Kind.VERIFIER)),
                "drafters": ",".join(through[gateway.name, member.name] for member in self.of(Kind.DRAFTER)),
                "verifier-silence-ms": "4000",
                "drafter-silence-ms": "4000",
                "startup-wait-s": "3",
            }

    # --- faults that are not one member's own -------------------------------------------------------------------------

    async def cut(self, gateway: str, replica: str) -> None:
        """Nothing passes between the two until `mend`, and nobody is told."""
        self.cuts.add((gateway, replica))
        self._changed()
        await self._proxy.cut(self._pairs.index((gateway, replica)))

    async def mend(self, gateway: str, replica: str) -> None:
        """Ends a cut."""
        await self._proxy.mend(self._pairs.index((gateway, replica)))
        self.cuts.discard((gateway, replica))
        self._changed()

    async def delay(self, one_way_ms: float) -> None:
        """From now on bytes between gateways and replicas are so late."""
        await self._proxy.delay(2 * one_way_ms)

    def freeze(self, name: str) -> int:
        """Stops a process in its tracks; its id for `thaw`, 0 where there is nobody to be stopped."""
        member = self.members[name]
        pid = member.pid
        if self.frozen.get(name) == pid or not member.send(signal.SIGSTOP, pid):
            return 0
        self.frozen[name] = pid
        self._changed()
        return pid

    def thaw(self, name: str, pid: int) -> None:
        """Lets it go on, if it has not been killed meanwhile."""
        self.members[name].send(signal.SIGCONT, pid)
        if self.frozen.get(name) == pid:
            del self.frozen[name]
        self._changed()

    def _changed(self) -> None:
        self.blackouts.note(any(map(self._usable, self.of(Kind.VERIFIER))), time.monotonic())

    def _usable(self, verifier: Member) -> bool:
        cut_from_all = all((gateway.name, verifier.name) in self.cuts for gateway in self.of(Kind.GATEWAY))
        return verifier.up and self.frozen.get(verifier.name) != verifier.pid and not cut_from_all

    # --- what can be seen of it -------------------------------------------------------------------------------------

    def pids(self) -> Mapping[str, int]:
        """Processes that belong to it now, by name."""
        found = {member.name: member.pid for member in self.members.values() if member.pid}
        return {**found, "proxy": self._proxy.pid} if self._proxy.pid else found

    def working(self) -> Mapping[str, int]:
        """Those of `pids` that serve, and that nothing keeps from it."""
        cut_off = {name for pair in self.cuts for name in pair}
        idle = {
            member.name
            for member in self.members.values()
            if not member.up or self.frozen.get(member.name) == member.pid or member.name in cut_off
        }
        return {name: pid for name, pid in self.pids().items() if name not in idle}

    def strangers(self) -> list[str]:
        """Children of this process that are none of the fleet's."""
        known = set(self.pids().values())
        return [
            f"{process.pid}: {' '.join(process.cmdline())[:200]}"
            for process in psutil.Process().children(recursive=True)
            if process.pid not in known and process.status() != psutil.STATUS_ZOMBIE
        ]


def _last_line(path: Path) -> str:
    return path.read_text(errors="replace").rstrip().rpartition("\n")[2]


def _free_ports(count: int) -> Iterator[int]:
    # Several runs on one machine begin at different places.
    drawn = random.sample(_PORTS, k=len(_PORTS))
    free = [port for port in drawn[: 20 * count] if not why_not_free(port)]
    return iter(free[:count])
