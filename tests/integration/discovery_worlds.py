"""Sources that a discovery follows in tests: a name with addresses, and a Kubernetes service on a fake API."""

from __future__ import annotations

import contextlib
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from pathlib import Path

from paceline_gateway.discovery.dns import DnsDiscovery
from paceline_gateway.discovery.endpoint import Discovery, Endpoint
from paceline_gateway.discovery.kubernetes_discovery import KubernetesDiscovery, KubernetesTiming
from paceline_gateway.discovery.targets import DnsTarget, KubernetesTarget

from paceline.runtime.supervisor import OnError, Supervisor
from tests.fakes.kubernetes_api import FakeKubernetesApi, Json, endpoint, endpoint_slice
from tests.integration.fleet import until

PORT = 50052
TARGET = KubernetesTarget("default", "verifier", "grpc")
SOON = KubernetesTiming(first_pause_s=0.001, last_pause_s=0.01)


class Told:
    """What a pool would know."""

    def __init__(self) -> None:
        self.sets: list[tuple[Endpoint, ...]] = []

    def __call__(self, endpoints: tuple[Endpoint, ...]) -> None:
        self.sets.append(endpoints)

    @property
    def present(self) -> dict[str, bool] | None:
        """Per host whether it drains; None before anything was told."""
        if not self.sets:
            return None
        assert all(one.address.endswith(f":{PORT}") for one in self.sets[-1])
        return {one.address.rpartition(":")[0]: one.draining for one in self.sets[-1]}

    async def show(self, *hosts: str, draining: tuple[str, ...] = ()) -> None:
        """Returns when exactly these are present."""
        wanted = dict.fromkeys(hosts, False) | dict.fromkeys(draining, True)
        try:
            await until(lambda: self.present == wanted, 5.0)
        except TimeoutError:
            raise AssertionError(f"{self.present} instead of {wanted}") from None


class World(ABC):
    """A source that a discovery follows."""

    discovery: Discovery
    told: Told

    @abstractmethod
    def has(self, *hosts: str) -> None:
        """From now on the source names these hosts."""

    @abstractmethod
    async def go_away(self) -> None:
        """The source cannot be reached from now on."""

    @abstractmethod
    async def come_back(self) -> None:
        """The source can be reached again."""


class DnsWorld(World):
    """A name with addresses."""

    def __init__(self, folder: Path) -> None:
        self.told = Told()
        self.lookups = 0
        self._hosts: frozenset[str] = frozenset()
        self._away = False
        self.discovery = DnsDiscovery(DnsTarget("verifier.svc", PORT), 0.001, self._resolve)

    async def _resolve(self, host: str) -> frozenset[str]:
        assert host == "verifier.svc"
        self.lookups += 1
        if self._away:
            raise socket.gaierror("the name server does not answer")
        return self._hosts

    def has(self, *hosts: str) -> None:
        self._hosts = frozenset(hosts)

    async def go_away(self) -> None:
        self._away = True

    async def come_back(self) -> None:
        self._away = False


class KubernetesWorld(World):
    """A service whose pods are all in one slice, unless a test says otherwise."""

    def __init__(self, folder: Path, api: FakeKubernetesApi, timing: KubernetesTiming = SOON) -> None:
        self.told = Told()
        self.api = api
        self.discovery = KubernetesDiscovery(TARGET, api.write_kubeconfig(folder), timing)

    def put(self, *endpoints: Json, name: str = "verifier-a", address_type: str = "IPv4") -> None:
        self.api.put(endpoint_slice(name, "verifier", endpoints, ports={"grpc": PORT}, address_type=address_type))

    def has(self, *hosts: str) -> None:
        self.put(*[endpoint(host) for host in hosts])

    async def go_away(self) -> None:
        await self.api.go_away()

    async def come_back(self) -> None:
        await self.api.come_back()


@contextlib.asynccontextmanager
async def followed(world: World) -> AsyncIterator[None]:
    async with Supervisor("test") as supervisor:
        supervisor.spawn("discovery", lambda: world.discovery.run(world.told), on_error=OnError.FAIL)
        yield
    assert not supervisor.children


@contextlib.asynccontextmanager
async def kubernetes(folder: Path, timing: KubernetesTiming = SOON) -> AsyncIterator[KubernetesWorld]:
    """A followed one with two pods, whose watch has begun."""
    async with FakeKubernetesApi.start() as api:
        world = KubernetesWorld(folder, api, timing)
        world.has("10.0.0.1", "10.0.0.2")
        async with followed(world):
            await world.told.show("10.0.0.1", "10.0.0.2")
            await until(lambda: api.num_watches == 1)
            yield world
