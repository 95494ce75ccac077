"""Starts a fleet of simulated devices: real services, wire and Redis, each a process, and a distance between them.

    gateway (ahead on)  ─┐                  ┌─ verifiers
                         ├─▶ delay proxy ─▶─┤
    gateway (ahead off) ─┘                  └─ drafters

Two gateways share the replicas, so that drafting ahead and not can take turns on one fleet; the one that is not used
costs nothing. Clients and Redis are as near as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from paceline.benchmark.delay_proxy import DelayProxy
from paceline.benchmark.ideal import DRAFT_PASS, VERIFY_PASS
from paceline.benchmark.simulated_model import write_simulated_model
from paceline.cli.child import Child, ChildSpec
from paceline.cli.ports import reachable
from paceline.cli.serve import ServiceName, service_command
from paceline.drafting.outcomes import likeliest_outcomes
from paceline.engine.simulated.pass_time import PassTime
from paceline.engine.simulated.runner import SimulatedModel
from paceline.session.embedded import EmbeddedRedis

MODEL_NAME = "simulated"
_READY_TIMEOUT_S = 180.0
_STOP_GRACE_S = 15.0


@dataclass(frozen=True, slots=True)
class ScaleOptions:
    """A fleet of simulated devices.

    Attributes:
        verifiers: number of verifier processes.
        drafters: number of drafter processes.
        max_sessions: generations at once.
        num_speculative_tokens: block size.
        acceptance: how often a draft token is the target's own, at each position.
        candidates: how often a further candidate of the drafter is, where those before it are not.
        prepared_outcomes: of a block, after which drafters draft while it is judged.
        verify_pass: time of a verifier's pass.
        draft_pass: time of a drafter's pass.
        seed: of the table of tokens.
        max_model_len: most tokens of a session.
    """

    verifiers: int = 1
    drafters: int = 1
    max_sessions: int = 1
    num_speculative_tokens: int = 4
    acceptance: float = 0.8
    candidates: float = 0.0
    prepared_outcomes: int = 0
    verify_pass: PassTime = VERIFY_PASS
    draft_pass: PassTime = DRAFT_PASS
    seed: int = 0
    max_model_len: int = 16_384

    @property
    def target(self) -> SimulatedModel:
        """What verifiers simulate."""
        return SimulatedModel(self.verify_pass, self.seed)

    @property
    def drafter(self) -> SimulatedModel:
        """What drafters simulate."""
        return SimulatedModel(self.draft_pass, self.seed, self.acceptance, self.candidates)

    def outcome_chances(self, num_draft_tokens: int) -> tuple[float, ...]:
        """How often an outcome is prepared, by accepted drafts of a block; after the block, if the guess is wrong."""
        prepared = likeliest_outcomes(num_draft_tokens, self.prepared_outcomes)
        return tuple(
            [
                sum(
                    self.candidates * (1 - self.candidates) ** (outcome.rank - 1)
                    for outcome in prepared
                    if outcome.position == position
                )
                for position in range(num_draft_tokens + 1)
            ]
        )


@dataclass(frozen=True, slots=True)
class Gateway:
    """Where one of the gateways is.

    Attributes:
        address: gRPC, host:port.
        metrics: URL of its `/metrics`.
        pid: its process.
    """

    address: str
    metrics: str
    pid: int


@dataclass(frozen=True, slots=True)
class Processes:
    """Process ids of the parts beside the gateways."""

    verifiers: tuple[int, ...] = ()
    drafters: tuple[int, ...] = ()
    redis: int = 0
    proxy: int = 0


@dataclass(slots=True)
class _Running:
    """What has been started."""

    replicas: list[Child] = field(default_factory=list)
    gateways: list[Child] = field(default_factory=list)
    redis: EmbeddedRedis | None = None
    stack: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)


class ScaleFleet:
    """A running fleet of simulated devices. Use as an async context manager, in the main thread.

    Args:
        options: of the fleet.
        log_dir: folder of the processes' logs.

    Attributes:
        options: as given.
        model_dir: folder of the tokenizer.
        gateways: by whether they draft ahead.
        processes: of the other parts.
        replica_metrics: URLs of the verifiers' and of the drafters' `/metrics`.
    """

    def __init__(self, options: ScaleOptions, log_dir: Path) -> None:
        self.options = options
        self._log_dir = log_dir
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-scale-")
        self.model_dir = write_simulated_model(Path(self._folder.name) / "model", options.max_model_len)
        self._running = _Running()
        self._proxy = DelayProxy(())
        self.gateways: dict[bool, Gateway] = {}
        self.processes = Processes()
        self.replica_metrics: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def delay(self, rtt_ms: float) -> None:
        """From now on gateways and replicas are so far apart, in milliseconds."""
        await self._proxy.delay(rtt_ms)

    async def _start(self) -> None:
        options, running = self.options, self._running
        self._log_dir.mkdir(parents=True, exist_ok=True)
        running.redis = EmbeddedRedis()
        running.redis.start()
        verifiers = [
            self._child(ServiceName.VERIFIER, str(index), self._verifier()) for index in range(options.verifiers)
        ]
        drafters = [self._child(ServiceName.DRAFTER, str(index), self._drafter()) for index in range(options.drafters)]
        running.replicas = [*verifiers, *drafters]
        await self._ready(running.replicas)
        self._proxy = DelayProxy([reachable(child.address) for child in running.replicas])
        await running.stack.enter_async_context(self._proxy)
        far = self._proxy.addresses
        flags = self._gateway(far[: options.verifiers], far[options.verifiers :])
        for ahead in (True, False):
            environment = {
                "PACELINE_GATEWAY_REDIS_URL": running.redis.url,
                "PACELINE_GATEWAY_DRAFT_AHEAD": str(ahead).lower(),
            }
            running.gateways.append(
                self._child(ServiceName.GATEWAY, "ahead" if ahead else "sequential", flags, environment)
            )
        await self._ready(running.gateways)
        for ahead, child in zip((True, False), running.gateways, strict=True):
            self.gateways[ahead] = Gateway(reachable(child.address), _metrics_url(child), child.pid)
        self.processes = Processes(
            tuple(child.pid for child in verifiers),
            tuple(child.pid for child in drafters),
            running.redis.pid or 0,
            self._proxy.pid,
        )
        self.replica_metrics = (
            tuple(_metrics_url(child) for child in verifiers),
            tuple(_metrics_url(child) for child in drafters),
        )

    async def stop(self) -> None:
        """Stops everything. Repeatable."""
        running = self._running
        await asyncio.gather(*(child.stop(_STOP_GRACE_S) for child in running.gateways))
        await running.stack.aclose()
        await asyncio.gather(*(child.stop(_STOP_GRACE_S) for child in running.replicas))
        if running.redis is not None:
            running.redis.stop()
        self._folder.cleanup()

    async def _ready(self, children: list[Child]) -> None:
        for child in children:
            await child.start()
        for child in children:
            await child.wait_ready(_READY_TIMEOUT_S)

    def _verifier(self) -> dict[str, str]:
        return self._replica(self.options.verify_pass)

    def _drafter(self) -> dict[str, str]:
        options = self.options
        return {
            **self._replica(options.draft_pass),
            "method": "draft_model",
            "simulated-acceptance": str(options.acceptance),
            "simulated-candidates": str(options.candidates),
            "prepared-outcomes": str(options.prepared_outcomes),
            # Each step feeds a token or two of every session that drafts.
            "max-batch-tokens": str(max(256, 2 * options.max_sessions)),
        }

    def _replica(self, pass_time: PassTime) -> dict[str, str]:
        options = self.options
        return {
            "model": str(self.model_dir),
            "model-name": MODEL_NAME,
            "runner": "simulated",
            "simulated-pass-ms": str(pass_time.pass_ms),
            "simulated-token-ms": str(pass_time.token_ms),
            "simulated-seed": str(options.seed),
            "max-sessions": str(options.max_sessions + 1),
            "max-model-len": str(options.max_model_len),
        }

    def _gateway(self, verifiers: tuple[str, ...], drafters: tuple[str, ...]) -> dict[str, str]:
        return {
            "model": str(self.model_dir),
            "model-name": MODEL_NAME,
            "verifiers": ",".join(verifiers),
            "drafters": ",".join(drafters),
            "num-speculative-tokens": str(self.options.num_speculative_tokens),
            "max-concurrent-generations": str(self.options.max_sessions + 1),
        }

    def _child(
        self, service: ServiceName, suffix: str, flags: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> Child:
        name = f"{service.value}-{suffix}"
        ready_file = Path(self._folder.name) / f"{name}.ready.json"
        common = {
            "ready-file": str(ready_file),
            "metrics-port": "0",
            "parent-pid": str(os.getpid()),
            "drain-timeout-s": "2",
        }
        arguments = [f"--{flag}={value}" for flag, value in {**flags, **common}.items()]
        command = service_command(service, arguments)
        return Child(ChildSpec(name, command, ready_file, self._log_dir / f"{name}.log", environment or {}))


def _metrics_url(child: Child) -> str:
    return f"http://{reachable(child.addresses.metrics)}/metrics"
