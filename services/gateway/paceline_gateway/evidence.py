"""Counters of one generation: what speculation did, all of it measured. Meanings are those of `Evidence`."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.generation import Evidence
from paceline.messages import Timing
from paceline.speculation.tree import DraftTree


@dataclass(slots=True)
class EvidenceCounters:
    """Counts as the generation goes. Times are seconds of one monotonic clock.

    Attributes:
        started_at: when the request came.
        first_token_at: when the first token was committed; None until then.
    """

    started_at: float
    first_token_at: float | None = None
    target_passes: int = 0
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    wasted_draft_tokens: int = 0
    ahead_hits: int = 0
    draft_wait_s: float = 0.0
    drafter_memory_bytes: int = 0
    acceptance_ewma: float = 0.0
    _drafted_at_depth: list[int] = field(default_factory=list)
    _accepted_at_depth: list[int] = field(default_factory=list)
    _methods: dict[str, None] = field(default_factory=dict)
    _draft_us: int = 0
    _verify_us: int = 0
    _queue_us: int = 0
    _wire_s: float = 0.0

    def judged(self, block: DraftTree, num_accepted: int, num_emitted: int, method: str) -> None:
        """Counts one verdict.

        Args:
            block: the block as sent.
            num_accepted: accepted nodes.
            num_emitted: tokens of the verdict that became final; fewer than `num_accepted` + 1 at the end.
            method: who drafted the block; ignored when it is empty.
        """
        self.target_passes += 1
        self.completion_tokens += num_emitted
        if not block.tokens:
            return
        accepted = min(num_accepted, num_emitted)
        self.draft_tokens += block.num_draft_tokens
        self.accepted_tokens += accepted
        depth = block.max_depth
        grow = depth - len(self._drafted_at_depth)
        self._drafted_at_depth.extend([0] * grow)
        self._accepted_at_depth.extend([0] * grow)
        for position in range(depth):
            self._drafted_at_depth[position] += 1
        for position in range(accepted):
            self._accepted_at_depth[position] += 1
        self._methods[method] = None
        share = accepted / depth
        self.acceptance_ewma = (
            share if self.draft_tokens == block.num_draft_tokens else _ewma(self.acceptance_ewma, share)
        )

    def verified(self, timing: Timing, round_trip_s: float) -> None:
        """Adds the time of one verdict."""
        self._verify_us += max(timing.total_us - timing.queue_us, 0)
        self._answered(timing, round_trip_s)

    def drafted(self, timing: Timing, round_trip_s: float) -> None:
        """Adds the time of one draft."""
        self._draft_us += max(timing.total_us - timing.queue_us, 0)
        self._answered(timing, round_trip_s)

    def _answered(self, timing: Timing, round_trip_s: float) -> None:
        self._queue_us += timing.queue_us
        self._wire_s += max(round_trip_s - timing.total_us / 1e6, 0.0)

    def report(self, now: float, verifier: str, drafter: str) -> Evidence:
        """The evidence so far, with the replicas in use."""
        passes = self.target_passes
        first = now if self.first_token_at is None else self.first_token_at
        return Evidence(
            target_passes=passes,
            tokens_per_target_pass=self.completion_tokens / passes if passes else 0.0,
            draft_tokens=self.draft_tokens,
            accepted_tokens=self.accepted_tokens,
            drafted_per_position=tuple(self._drafted_at_depth),
            accepted_per_position=tuple(self._accepted_at_depth),
            wasted_draft_tokens=self.wasted_draft_tokens,
            ahead_hits=self.ahead_hits,
            time_to_first_token_ms=(first - self.started_at) * 1e3,
            total_ms=(now - self.started_at) * 1e3,
            draft_ms=self._draft_us / 1e3,
            verify_ms=self._verify_us / 1e3,
            queue_ms=self._queue_us / 1e3,
            wire_ms=self._wire_s * 1e3,
            draft_wait_ms=self.draft_wait_s * 1e3,
            drafter_memory_bytes=self.drafter_memory_bytes,
            methods=tuple(method for method in self._methods if method),
            verifier=verifier,
            drafter=drafter,
        )


def _ewma(old: float, sample: float, weight: float = 0.2) -> float:
    return old + weight * (sample - old)
