"""Oracle 5: when nobody is served any more, nothing of anybody is left, and no process has grown.

gateways    permits, session actors, sessions attached to replicas: 0
replicas    sessions, commands, key/value rows: 0; a stream of each gateway and no more
Redis       no key without an expiry, none of a generation that runs
processes   memory and open files as before the storm; nobody else's child
"""

from __future__ import annotations

import asyncio
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

import psutil
import redis

from tests.chaos.fleet import SESSION_TTL_S, ChaosFleet
from tests.chaos.member import Kind, Member
from tests.integration.scraping import Scrape

IDLE_TIMEOUT_S = 40.0
"""Orphans of a replica live for 10 s, a record is repaired for 10 s, and a dead connection is noticed after 30 s."""
MORE_FILES = 40
"""Connections to Redis are kept, as many as were needed at once."""
MORE_BYTES = 32 * 2**20
"""With a seventh: allocators and kernels of a young process still grow."""
_POLL_S = 0.25
_ZERO = {
    Kind.GATEWAY: (
        "paceline_num_requests_running",
        "paceline_num_requests_waiting",
        "paceline_open_streams",
        "paceline_pool_sessions",
        "paceline_undurable_sessions",
    ),
    Kind.VERIFIER: (
        "paceline_num_requests_running",
        "paceline_num_requests_waiting",
        "paceline_sessions",
        "paceline_kv_tokens_in_use",
    ),
}
_ZERO[Kind.DRAFTER] = _ZERO[Kind.VERIFIER]


@dataclass(frozen=True, slots=True)
class Size:
    """What a process takes.

    Attributes:
        files: open file descriptors.
        memory_bytes: resident memory.
    """

    files: int
    memory_bytes: int


def sizes(fleet: ChaosFleet) -> dict[str, Size]:
    """What each process takes now, the one that runs the clients included."""
    found = {}
    for name, process in [*((name, psutil.Process(pid)) for name, pid in fleet.pids().items()), ("", psutil.Process())]:
        found[name or "clients"] = Size(process.num_fds(), process.memory_info().rss)
    return found


def growth(before: Mapping[str, Size], after: Mapping[str, Size]) -> list[str]:
    """Processes that hold more than a moment of work can leave behind."""
    grown = []
    for name, then in before.items():
        now = after.get(name, Size(0, 0))
        if now.files > then.files + MORE_FILES:
            grown.append(f"{name} has {now.files} open files, and had {then.files}")
        if now.memory_bytes > then.memory_bytes * 1.15 + MORE_BYTES:
            grown.append(f"{name} takes {now.memory_bytes >> 20} MiB, and took {then.memory_bytes >> 20}")
    return grown


def fetch(address: str, timeout_s: float = 10.0) -> str:
    """The metrics of a service as text; blocks.

    Raises:
        OSError: it does not answer in time.
    """
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=timeout_s) as answer:
        return str(answer.read().decode())


async def scrape(member: Member) -> Scrape:
    """Its metrics now."""
    return Scrape(await asyncio.to_thread(fetch, member.metrics))


async def until_idle(fleet: ChaosFleet, timeout_s: float = IDLE_TIMEOUT_S) -> list[str]:
    """Waits until nothing is left of anybody; what is still there when the time is over."""
    ends_at = time.monotonic() + timeout_s
    while left := await _left_over(fleet):
        if time.monotonic() >= ends_at:
            return left
        await asyncio.sleep(_POLL_S)
    return []


async def _left_over(fleet: ChaosFleet) -> list[str]:
    members = fleet.of(*_ZERO)
    scrapes = await asyncio.gather(*map(scrape, members))
    left = [
        f"{member.name} has {name} {value:g}"
        for member, found in zip(members, scrapes, strict=True)
        for name in _ZERO[member.kind]
        if (value := found.sum(name))
    ]
    num_gateways = len(fleet.of(Kind.GATEWAY))
    for member, found in zip(members, scrapes, strict=True):
        if member.kind is Kind.GATEWAY:
            ready = found.sum("paceline_replicas", state="ready")
            if ready != len(fleet.replicas):
                left.append(f"{member.name} sees {ready:g} of {len(fleet.replicas)} replicas")
        elif (streams := found.sum("paceline_open_streams")) != num_gateways:
            left.append(f"{member.name} has {streams:g} streams of {num_gateways} gateways")
    return left


def leftover_keys(url: str) -> list[str]:
    """Keys that would stay for ever, or longer than they may."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        wrong = []
        for key in client.scan_iter("*"):
            left_ms = client.pttl(key)
            if left_ms != -2 and not 0 < left_ms <= SESSION_TTL_S * 1000:
                wrong.append(f"the key {key} expires in {left_ms} ms")
        return wrong
