"""Starts, watches and stops a fleet on one machine: Redis, verifiers, drafters and a gateway, each a process.

    async with Fleet(options, observer) as fleet:     # everything is ready
        ... fleet.addresses.gateway ...
        await fleet.watch()                           # until something ends that it cannot do without
    # no process is left

The order is: the models are made ready on disk, then Redis, verifiers and drafters start side by side, then the
gateway, which needs their addresses. It stops the other way round. `paceline up`, the demo, the benchmarks and the
end-to-end tests all use this class.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from filelock import FileLock, Timeout
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.child import Child
from paceline.cli.devices import check_devices
from paceline.cli.doctor import ping_redis
from paceline.cli.fleet_commands import FleetCommands
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.ports import HOST, reachable, why_not_free
from paceline.cli.prepare import prepare
from paceline.cli.serve import ServiceName
from paceline.cli.service_settings import Access, check_services
from paceline.errors import ConfigurationError, InvalidArgument, Unavailable
from paceline.session.embedded import EmbeddedRedis

_KILL_AFTER_DRAIN_S = 5.0
"""Beyond the time for draining; then a process is killed."""
_ORPHAN_GRACE_S = 1.0
"""For replicas whose gateway is gone: nobody can end their sessions, so there is nothing to wait for."""
_REDIS_POLL_S = 0.25
_METRICS_TIMEOUT_S = 1.0
_RUNNING = ("paceline_num_requests_running", "paceline_num_requests_waiting")
_MAX_REDIS_RESTARTS = 5
"""In the life of a fleet; what ends more often is ill."""


@dataclass(frozen=True, slots=True)
class FleetAddresses:
    """Where clients on this machine find the parts.

    Attributes:
        gateway: gRPC, host:port.
        http: URL of the gateway's HTTP API; OpenAI's clients want it with `/v1` behind it.
        verifiers: host:port of each.
        drafters: host:port of each.
        redis: its URL.
        metrics: URL of each service's `/metrics`, by its name in `Fleet.children`.
    """

    gateway: str = ""
    http: str = ""
    verifiers: tuple[str, ...] = ()
    drafters: tuple[str, ...] = ()
    redis: str = ""
    metrics: Mapping[str, str] = field(default_factory=dict)


class FleetObserver(Protocol):
    """Is told what happens, for a display."""

    def changed(self, part: str, state: str, detail: str = "") -> None:
        """A part is in another state: "starting", "ready", "stopping", "ended" or what is being prepared."""


class Silent:
    """An observer that shows nothing."""

    def changed(self, part: str, state: str, detail: str = "") -> None:
        """Ignores it."""


class Fleet:
    """A running fleet. Use as an async context manager, or call `start` and then `stop` in any case.

    Attributes:
        addresses: where the parts are, once it has started.
        access: what its gateway asks of clients.
    """

    def __init__(self, options: FleetOptions, observer: FleetObserver | None = None) -> None:
        options.check()
        self._options = options
        self._observer = observer or Silent()
        self._run_dir = tempfile.TemporaryDirectory(prefix="paceline-up-")
        self._log_lock = FileLock(options.log_dir / ".lock", timeout=0)
        self._redis: EmbeddedRedis | None = None
        self._replicas: list[Child] = []
        self._gateway: Child | None = None
        self.addresses = FleetAddresses(redis=options.redis_url)
        self.access = Access()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def children(self) -> tuple[Child, ...]:
        """All service processes that were started."""
        return (*self._replicas, *([self._gateway] if self._gateway else []))

    async def start(self) -> None:
        """Starts everything and returns when the gateway is ready.

        Raises:
            PacelineError: something could not be made ready; what runs by then is left to `stop`.
        """
        options = self._options
        self.access = check_services(options)
        _check_port("port", options.port)
        _check_port("http_port", options.http_port)
        self._take_log_dir()
        await check_devices(options)
        self._observer.changed("models", "preparing")
        prepared = await prepare(
            options.target,
            bits=options.copy_bits,
            draft_model="" if options.copy_bits or not options.needs_draft_model else options.drafter_model,
            head=options.head_reference,
            base=options.base,
            progress=lambda line: self._observer.changed("models", "preparing", line),
        )
        self._observer.changed("models", "ready", options.target)
        redis_url = await self._start_redis()
        plan = FleetCommands(options, prepared, Path(self._run_dir.name))
        verifiers = [Child(spec) for spec in plan.verifiers()]
        drafters = [Child(spec) for spec in plan.drafters()]
        self._replicas = [*verifiers, *drafters]
        try:
            async with asyncio.TaskGroup() as group:
                for child in self._replicas:
                    group.create_task(self._start_child(child))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        verifier_addresses = [reachable(child.address) for child in verifiers]
        drafter_addresses = [reachable(child.address) for child in drafters]
        gateway = self._gateway = Child(plan.gateway(verifier_addresses, drafter_addresses, redis_url))
        await self._start_child(gateway)
        self.addresses = FleetAddresses(
            gateway=reachable(gateway.addresses.grpc),
            http=f"{'https' if self.access.tls else 'http'}://{reachable(gateway.addresses.http)}",
            verifiers=tuple(verifier_addresses),
            drafters=tuple(drafter_addresses),
            redis=redis_url,
            metrics={
                child.name: f"http://{reachable(child.addresses.metrics)}/metrics"
                for child in (gateway, *self._replicas)
            },
        )

    def _take_log_dir(self) -> None:
        """Keeps the log folder for this fleet, whose processes empty their files, until it has stopped or died.

        Raises:
            ConfigurationError: another fleet writes to it.
        """
        folder = self._options.log_dir
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._log_lock.acquire()
        except Timeout:
            raise ConfigurationError(
                f"another fleet writes its logs to {folder}: stop it, or name another folder with --log-dir",
                field="log_dir",
            ) from None

    async def _start_redis(self) -> str:
        """Starts the embedded Redis, or checks the one that is named, and returns its URL."""
        if self._options.redis_url:
            await ping_redis(self._options.redis_url)
            return self._options.redis_url
        self._observer.changed("redis", "starting")
        self._redis = EmbeddedRedis()
        # Blocks for some 50 ms: it must be started by the main thread, whose end it does not outlive.
        self._redis.start()
        self._observer.changed("redis", "ready", self._redis.url)
        return self._redis.url

    async def _start_child(self, child: Child) -> None:
        self._observer.changed(child.name, "starting")
        await child.start()
        addresses = await child.wait_ready(self._options.ready_timeout_s)
        self._observer.changed(child.name, "ready", addresses.grpc)

    async def watch(self) -> None:
        """Waits until the fleet can no longer serve; a lost replica of several, or a drafter, is only told.

        An embedded Redis that has ended is started again; the gateway writes its records anew.

        Raises:
            Unavailable: the gateway or the last verifier has ended.
        """
        waiting = {asyncio.create_task(child.wait_ended()): child for child in self.children}
        verifiers_left = self._options.verifiers
        redis = asyncio.create_task(self._watch_redis())
        try:
            while waiting:
                ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for child in [waiting.pop(task) for task in ended]:
                    self._observer.changed(child.name, "ended", child.ended_message("while the fleet was running"))
                    verifiers_left -= child.name.startswith("verifier")
                    if child is self._gateway or not verifiers_left:
                        raise Unavailable(child.ended_message("and the fleet cannot go on without it"))
        finally:
            for task in (redis, *waiting):
                task.cancel()

    async def _watch_redis(self) -> None:
        """Restarts the embedded Redis whenever it has ended, a few times; generations go on without it in any case."""
        redis = self._redis
        if redis is None:
            return
        restarts = 0
        while True:
            await asyncio.sleep(_REDIS_POLL_S)
            if not redis.ended:
                continue
            if restarts == _MAX_REDIS_RESTARTS:
                self._observer.changed("redis", "ended", "once too often; generations go on but are not recorded")
                return
            restarts += 1
            self._observer.changed("redis", "ended", "while the fleet was running; starting it again")
            try:
                redis.restart()
            except (Unavailable, OSError) as error:
                self._observer.changed("redis", "ended", f"{error}; generations go on but are not recorded")
                return
            self._observer.changed("redis", "ready", f"{redis.url} again; the gateway records running sessions anew")

    async def running_generations(self) -> int:
        """Generations that a stop would wait for; 0 also where the gateway does not tell in time."""
        url = self.addresses.metrics.get(ServiceName.GATEWAY.value)
        if url is None:
            return 0
        with contextlib.suppress(OSError, ValueError):
            return await asyncio.to_thread(_count_generations, url)
        return 0

    def hurry(self) -> None:
        """For a stop that takes too long: tells the services not to wait for running generations."""
        for child in self.children:
            child.terminate()

    async def stop(self) -> None:
        """Stops everything, the gateway first, so that no generation is cut by a missing replica. Repeatable."""
        grace_s = self._options.drain_timeout_s + _KILL_AFTER_DRAIN_S
        orphaned = self._gateway is not None and self._gateway.has_ended
        if self._gateway is not None:
            self._observer.changed(self._gateway.name, "stopping")
            await self._gateway.stop(grace_s)
        if orphaned:
            grace_s = _ORPHAN_GRACE_S
        await asyncio.gather(*(child.stop(grace_s) for child in self._replicas))
        if self._redis is not None:
            self._redis.stop()
        self._run_dir.cleanup()
        self._log_lock.release()


def _count_generations(metrics_url: str) -> int:
    with urllib.request.urlopen(metrics_url, timeout=_METRICS_TIMEOUT_S) as answer:  # noqa: S310 - our own gateway
        families = text_string_to_metric_families(answer.read().decode())
        return sum(int(sample.value) for family in families if family.name in _RUNNING for sample in family.samples)


def _check_port(option: str, port: int) -> None:
    """Finds out before the models are loaded whether the gateway can have a port.

    Raises:
        InvalidArgument: another process has it, or this user may not.
    """
    if reason := why_not_free(port):
        flag = "--" + option.replace("_", "-")
        raise InvalidArgument(
            f"{flag} {port} of {HOST} cannot be used ({reason}): choose another, or 0 for a free one", field=option
        )
