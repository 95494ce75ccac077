"""What the engine's scheduler did, for Prometheus. docs/metrics.md says what each metric means."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from paceline.engine.scheduler import SchedulerStats
from paceline.runtime.tallies import CounterTallies, CounterTally


class SchedulingCounters:
    """Counters that follow the scheduler's own.

    Args:
        registry: the actor's.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen = SchedulerStats()
        self._preemptions = _counter(
            registry, "num_preemptions", "Times that a session lost its rows to others and had to compute them again."
        )
        self._queries = _counter(registry, "prefix_cache_queries", "Tokens for whose rows the prefix cache was asked.")
        self._hits = _counter(registry, "prefix_cache_hits", "Tokens whose rows were found in the prefix cache.")

    def count(self, stats: SchedulerStats) -> None:
        """Adds what has happened since the last call."""
        if stats == self._seen:
            return
        self._preemptions.inc(stats.preemptions - self._seen.preemptions)
        self._queries.inc(stats.prefix_queried_tokens - self._seen.prefix_queried_tokens)
        self._hits.inc(stats.prefix_hit_tokens - self._seen.prefix_hit_tokens)
        self._seen = stats


def _counter(registry: CollectorRegistry, name: str, meaning: str) -> CounterTally:
    return CounterTallies(registry, f"paceline_{name}", meaning).labels()
