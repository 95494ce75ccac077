"""Oracle 5: when nobody is served any more, nothing of anybody is left.

gateways    permits, session actors, sessions attached to replicas: 0
replicas    sessions, commands, key/value rows: 0; a stream of each gateway and no more
Redis       no key without an expiry, none of a generation that runs

What processes themselves take is judged in `growth`.
"""

from __future__ import annotations

import asyncio
import time
import urllib.request

import redis

from tests.chaos.fleet import SESSION_TTL_S, ChaosFleet
from tests.chaos.member import Kind, Member
from tests.integration.scraping import Scrape

IDLE_TIMEOUT_S = 40.0
"""Orphans of a replica live for 10 s, a record is repaired for 10 s, and a dead connection is noticed after 30 s."""
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
