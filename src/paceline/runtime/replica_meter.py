"""What a replica's actor counts while it works. docs/metrics.md says what each metric means.

The actor calls it from its event loop; a scrape reads it from a thread of its own. Labels that are the same for the
whole replica are added when it is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from paceline.errors import CapacityExceeded, Unavailable
from paceline.pass_size import PassSize
from paceline.runtime.passes import Pass
from paceline.runtime.recent_load import RecentLoad
from paceline.runtime.tallies import CounterTallies, HistogramTallies, HistogramTally

TIME_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bounds of histograms of times within a round, in seconds."""
_SESSION_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_TOKEN_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


class ReplicaMeter:
    """Counters and recent load of one actor.

    Args:
        clock: the actor's; monotonic seconds.

    Attributes:
        registry: its metrics, without the replica's labels; an actor adds its own.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._recent = RecentLoad()
        self._busy_since_s: float | None = None  # what runs since then is not in `_recent` yet
        self._last_pass_ended_s: float | None = None
        self.registry = CollectorRegistry()
        passes = CounterTallies(self.registry, "paceline_passes", "Passes of the model.", ["outcome"])
        self._ok, self._failed = passes.labels("ok"), passes.labels("failed")
        self._duration_s = self._histogram("paceline_pass_duration_seconds", "Time of one pass.", TIME_BUCKETS_S)
        self._idle_s = self._histogram(
            "paceline_pass_idle_seconds",
            "Pause between two passes while sessions are open: the model waits for its peers.",
            TIME_BUCKETS_S,
        )
        self._sessions = self._histogram("paceline_pass_sessions", "Sessions that share a pass.", _SESSION_BUCKETS)
        self._tokens = self._histogram(
            "paceline_pass_tokens", "Tokens that a pass feeds (verifier) or proposes (drafter).", _TOKEN_BUCKETS
        )
        self._queue_s = self._histogram(
            "paceline_queue_time_seconds", "Time from a command's arrival to its first pass.", TIME_BUCKETS_S
        )
        self._failures = CounterTallies(
            self.registry, "paceline_failed_commands", "Commands that were answered with an error.", ["code"]
        )
        for error in (CapacityExceeded, Unavailable):
            self._failures.labels(error.code)

    def _histogram(self, name: str, meaning: str, bounds: tuple[float, ...]) -> HistogramTally:
        return HistogramTallies(self.registry, name, meaning, bounds).labels()

    # --- what the actor says ------------------------------------------------------------------------------------------

    def began(self) -> None:
        """Passes begin to run; `ended` says that the last of them has been told of."""
        with self._lock:
            self._busy_since_s = self._clock()

    def ended(self) -> None:
        """No pass runs, and each that did has been told of."""
        with self._lock:
            self._busy_since_s = None

    def passed(self, one: Pass[Any], size: PassSize | None) -> None:
        """A pass has ended.

        Args:
            one: when it began and ended.
            size: what it did; None when it failed.
        """
        if self._last_pass_ended_s is not None:
            self._idle_s.observe(one.started_s - self._last_pass_ended_s)
        self._last_pass_ended_s = one.ended_s
        with self._lock:
            self._recent.busy(one.started_s, one.ended_s)
            if self._busy_since_s is not None:
                self._busy_since_s = one.ended_s
        self._duration_s.observe(one.ended_s - one.started_s)
        (self._ok if size is not None else self._failed).inc()
        if size is not None and size.num_sessions:
            self._sessions.observe(size.num_sessions)
            self._tokens.observe(size.num_tokens)

    def no_sessions(self) -> None:
        """No session is open, so a pause is nobody's fault."""
        self._last_pass_ended_s = None

    def answered(self, queue_us: int) -> None:
        """A command was answered that had waited so long for its first pass."""
        queue_s = queue_us / 1e6
        self._queue_s.observe(queue_s)
        with self._lock:
            self._recent.answered(queue_s, self._clock())

    def failed(self, code: str) -> None:
        """A command was answered with an error of this code."""
        self._failures.labels(code).inc()

    # --- what a scrape asks -------------------------------------------------------------------------------------------

    def utilization(self) -> float:
        """Share of the last 15 s in which a pass ran, those included that run now."""
        with self._lock:
            return self._recent.utilization(self._clock(), self._busy_since_s)

    def mean_queue_s(self) -> float:
        """Mean time in the queue of the commands answered in the last 15 s, in seconds."""
        with self._lock:
            return self._recent.mean_queue_s(self._clock())
