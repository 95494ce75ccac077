"""What a stretch of time cost and brought in a fleet of simulated devices: processor time of each part, and metrics."""

from __future__ import annotations

import asyncio
import os
import time
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields

import psutil
from prometheus_client.parser import text_string_to_metric_families

from paceline.benchmark.scale_fleet import Gateway, ScaleFleet
from paceline.benchmark.scale_load import Load

_TIMEOUT_S = 10.0
PHASES = ("draft", "draft_queue", "draft_wire", "draft_wait", "verify", "verify_queue", "verify_wire")
"""Where a gateway says that the time of a round went."""


@dataclass(frozen=True, slots=True)
class CpuSeconds:
    """Processor time by part, in seconds.

    Attributes:
        gateway: its event loop: decisions, messages, Python's part of gRPC and of the store's client.
        gateway_wire: its other threads, which are gRPC's.
        redis: the store's process.
        verifiers: all of them, their wire included; devices cost nothing.
        drafters: the same.
        proxy: the distance between them; no part of the fleet.
        client: this process, which drives the sessions; no part of the fleet.
    """

    gateway: float = 0.0
    gateway_wire: float = 0.0
    redis: float = 0.0
    verifiers: float = 0.0
    drafters: float = 0.0
    proxy: float = 0.0
    client: float = 0.0

    def minus(self, other: CpuSeconds, scale: float = 1.0) -> CpuSeconds:
        """The difference, times `scale`."""
        names = [entry.name for entry in fields(self)]
        return CpuSeconds(*[(getattr(self, name) - getattr(other, name)) * scale for name in names])

    @property
    def total(self) -> float:
        """All parts together."""
        return float(sum(getattr(self, entry.name) for entry in fields(self)))


NO_CPU = CpuSeconds()


@dataclass(frozen=True, slots=True)
class Reading:
    """Totals at one moment.

    Attributes:
        at_s: when, on the clock of `time.perf_counter`.
        tokens: that the clients have.
        newest_s: when the newest of them came, on the same clock.
        cpu: of each part.
        rounds: verdicts.
        ahead_hits: blocks that had been drafted ahead and were used.
        fallbacks: rounds without the block that they wanted.
        phases_s: where the time of rounds went, by phase.
        verifying_s: time in passes of verifiers, together.
        drafting_s: time in passes of drafters, together.
        verify_passes: passes of verifiers.
    """

    at_s: float
    tokens: int
    newest_s: float
    cpu: CpuSeconds = NO_CPU
    rounds: float = 0.0
    ahead_hits: float = 0.0
    fallbacks: float = 0.0
    phases_s: Mapping[str, float] = field(default_factory=dict)
    verifying_s: float = 0.0
    drafting_s: float = 0.0
    verify_passes: float = 0.0


async def read(fleet: ScaleFleet, gateway: Gateway, load: Load) -> Reading:
    """Reads everything; what takes time is read after the moment that counts.

    Raises:
        OSError: a service does not answer.
    """
    at_s, tokens, newest_s, cpu = time.perf_counter(), load.tokens, load.newest_s, _cpu(fleet, gateway)
    verifiers, drafters = fleet.replica_metrics
    pages = await asyncio.gather(*(asyncio.to_thread(_fetch, url) for url in (gateway.metrics, *verifiers, *drafters)))
    own, replicas = _sums(pages[:1]), pages[1:]
    judging, drafting = _sums(replicas[: len(verifiers)]), _sums(replicas[len(verifiers) :])
    return Reading(
        at_s,
        tokens,
        newest_s,
        cpu,
        rounds=own.get("paceline_target_passes_total", 0.0),
        ahead_hits=own.get("paceline_spec_decode_num_ahead_hits_total", 0.0),
        fallbacks=own.get("paceline_spec_decode_num_fallbacks_total", 0.0),
        phases_s={phase: own.get(f"paceline_round_seconds_sum/{phase}", 0.0) for phase in PHASES},
        verifying_s=judging.get("paceline_pass_duration_seconds_sum", 0.0),
        drafting_s=drafting.get("paceline_pass_duration_seconds_sum", 0.0),
        verify_passes=judging.get("paceline_pass_duration_seconds_count", 0.0),
    )


async def sessions_open(fleet: ScaleFleet) -> float:
    """Sessions that replicas still hold.

    Raises:
        OSError: a replica does not answer.
    """
    urls = [url for kind in fleet.replica_metrics for url in kind]
    pages = await asyncio.gather(*(asyncio.to_thread(_fetch, url) for url in urls))
    return _sums(pages).get("paceline_sessions", 0.0)


def _cpu(fleet: ScaleFleet, gateway: Gateway) -> CpuSeconds:
    parts = fleet.processes
    # A thread's number is its process's for the first thread only, which is the one of the event loop.
    threads = {thread.id: thread.user_time + thread.system_time for thread in psutil.Process(gateway.pid).threads()}
    loop_s = threads.pop(gateway.pid, 0.0)
    return CpuSeconds(
        gateway=loop_s,
        gateway_wire=sum(threads.values()),
        redis=_of(parts.redis),
        verifiers=sum(_of(pid) for pid in parts.verifiers),
        drafters=sum(_of(pid) for pid in parts.drafters),
        proxy=_of(parts.proxy),
        client=_of(os.getpid()),
    )


def _of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def _fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - our own service
        return str(answer.read().decode())


def _sums(pages: Iterable[str]) -> dict[str, float]:
    """Samples by name, over all labels; those with a phase by name and phase."""
    sums: dict[str, float] = {}
    for page in pages:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    continue
                phase = sample.labels.get("phase")
                name = f"{sample.name}/{phase}" if phase else sample.name
                sums[name] = sums.get(name, 0.0) + sample.value
    return sums
