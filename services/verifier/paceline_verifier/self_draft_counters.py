"""What drafting inside the verifier did and took, for Prometheus. docs/metrics.md says what each metric means."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from paceline.engine.next_blocks import SelfDraftStats


class SelfDraftCounters:
    """Counters that follow the engine's own.

    Args:
        registry: the actor's.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._seen = SelfDraftStats()
        self._drafts = Counter(
            "paceline_self_draft_num_drafts", "Blocks that were proposed along with a verdict.", registry=registry
        )
        self._tokens = Counter("paceline_self_draft_num_draft_tokens", "Draft tokens in them.", registry=registry)
        self._seconds = Counter(
            "paceline_self_draft_seconds", "Time that making them took between passes.", registry=registry
        )
        self._failures = Counter(
            "paceline_self_draft_failures",
            "Times that making them failed and verdicts went out without blocks.",
            registry=registry,
        )

    def count(self, stats: SelfDraftStats) -> None:
        """Adds what has happened since the last call."""
        if stats == self._seen:
            return
        self._drafts.inc(stats.num_drafts - self._seen.num_drafts)
        self._tokens.inc(stats.num_tokens - self._seen.num_tokens)
        self._seconds.inc(stats.seconds - self._seen.seconds)
        self._failures.inc(stats.num_failures - self._seen.num_failures)
        self._seen = stats
