"""Counters of gateways that are killed now and then: read all the time, so that most of each life is known."""

from __future__ import annotations

import asyncio
import contextlib

from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.fleet import ChaosFleet
from tests.chaos.member import Kind, Member
from tests.chaos.quiescence import fetch

MOVES = ("paceline_replica_gap_seconds_count", "verifier")
"""Sessions that lost their verifier and went on, by the label `pool`."""
_EVERY_S = 1.0
_TIMEOUT_S = 0.8


class Counters:
    """Sums of counters over all lives of all gateways.

    Args:
        fleet: whose gateways are read.
    """

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self._last: dict[tuple[str, int], dict[tuple[str, str], float]] = {}

    def total(self, counter: tuple[str, str]) -> float:
        """What is known of a counter: its name, and its label `pool` or nothing."""
        return sum(values.get(counter, 0.0) for values in self._last.values())

    async def run(self) -> None:
        """Reads until it is cancelled."""
        while True:
            await asyncio.gather(*map(self._read, self._fleet.of(Kind.GATEWAY)))
            await asyncio.sleep(_EVERY_S)

    async def _read(self, gateway: Member) -> None:
        if not gateway.up:
            return
        life = (gateway.name, gateway.num_lives)
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            text = await asyncio.to_thread(fetch, gateway.metrics, _TIMEOUT_S)
            self._last[life] = {
                (sample.name, sample.labels.get("pool", "")): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name == MOVES[0]
            }
