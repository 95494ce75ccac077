"""What the engine's scheduler did, for Prometheus. docs/metrics.md says what each metric means."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from paceline.engine.scheduler import SchedulerStats


class SchedulingCounters:
    """Counters that follow the scheduler's own.

    Args:
        registry: the actor's.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen = SchedulerStats()
        self._preemptions = Counter(
            "paceline_num_preemptions",
            "Times that a session lost its rows to others and had to compute them again.",
            registry=registry,
        )
        self._queries = Counter(
            "paceline_prefix_cache_queries",
            "Tokens for whose rows the prefix cache was asked.",
            registry=registry,
        )
        self._hits = Counter(
            "paceline_prefix_cache_hits", "Tokens whose rows were found in the prefix cache.", registry=registry
        )

    def count(self, stats: SchedulerStats) -> None:
        """Adds what has happened since the last call."""
        self._preemptions.inc(stats.preemptions - self._seen.preemptions)
        self._queries.inc(stats.prefix_queried_tokens - self._seen.prefix_queried_tokens)
        self._hits.inc(stats.prefix_hit_tokens - self._seen.prefix_hit_tokens)
        self._seen = stats
