"""Counters of one generation: what speculation did, all of it measured. Meanings are those of `Evidence`.

The same counts leave it twice: round by round as `RoundRecord` for the metrics, and as a whole for the client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.generation import Evidence
from paceline.messages import Timing
from paceline.speculation.governor import Decision, Reason
from paceline.speculation.tree import DraftTree
from paceline_gateway.round_record import NO_TIMES, Fallback, FirstRound, RoundRecord, RoundTimes


@dataclass(slots=True)
class _OpenRound:
    """What has been counted since the last record, and totals at that time."""

    wasted_before: int = 0
    hits_before: int = 0
    target_passes: int = 0
    new_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    method: str = ""
    draft_s: float = 0.0
    draft_queue_s: float = 0.0
    draft_wire_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    verify_queue_s: float = 0.0
    verify_wire_s: float = 0.0
    decision: Decision | None = None
    size_changes: int = 0
    replicas_s: float = 0.0
    """In replicas, as far as nothing else of the session went on: judging, and drafts that were waited for."""
    newest_draft_s: float = 0.0
    verifier_gap_s: float | None = None
    drafter_gap_s: float | None = None

    @property
    def times(self) -> RoundTimes:
        """Where the time went so far."""
        return RoundTimes(
            self.draft_s,
            self.draft_queue_s,
            self.draft_wire_s,
            self.draft_wait_s,
            self.verify_s,
            self.verify_queue_s,
            self.verify_wire_s,
        )


@dataclass(slots=True)
class EvidenceCounters:
    """Counts as the generation goes. Times are seconds of one monotonic clock.

    Attributes:
        started_at: when the request came.
        first_round_at: when the first round was sent; None until then.
        first_token_at: when the first token was committed; None until then.
    """

    started_at: float
    first_round_at: float | None = None
    first_token_at: float | None = None
    target_passes: int = 0
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    wasted_draft_tokens: int = 0
    ahead_hits: int = 0
    drafter_memory_bytes: int = 0
    acceptance_ewma: float = 0.0
    off_rounds: int = 0
    probe_rounds: int = 0
    _drafted_at_depth: list[int] = field(default_factory=list)
    _accepted_at_depth: list[int] = field(default_factory=list)
    _methods: dict[str, None] = field(default_factory=dict)
    _times: RoundTimes = NO_TIMES
    _round: _OpenRound = field(default_factory=_OpenRound)
    _last_verdict_at: float = 0.0

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
        self._round.target_passes = 1
        self._round.new_tokens = num_emitted
        if not block.tokens:
            return
        accepted = min(num_accepted, num_emitted)
        self.draft_tokens += block.num_draft_tokens
        self.accepted_tokens += accepted
        self._round.draft_tokens = block.num_draft_tokens
        self._round.accepted_tokens = accepted
        self._round.method = method
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

    def governed(self, decision: Decision, size_changes: int) -> None:
        """Counts what the governor had decided for a round, and how often it has changed the size since the last."""
        self.off_rounds += decision.reason is Reason.OFF
        self.probe_rounds += decision.reason is Reason.PROBE
        self._round.decision = decision
        self._round.size_changes = size_changes

    def uses_memory(self, drafting_bytes: int) -> None:
        """The generation is drafted for by somebody who holds so much on top of the target; the most counts."""
        self.drafter_memory_bytes = max(self.drafter_memory_bytes, drafting_bytes)

    def verified(self, timing: Timing, round_trip_s: float) -> None:
        """Adds the time of one verdict, of which a verifier that drafts by itself has spent a part on drafting."""
        this = self._round
        engine_s = _engine_s(timing)
        draft_s = min(max(timing.draft_us, 0) / 1e6, engine_s)
        this.replicas_s += timing.total_us / 1e6
        this.draft_s += draft_s
        this.verify_s += engine_s - draft_s
        this.verify_queue_s += timing.queue_us / 1e6
        this.verify_wire_s += _wire_s(timing, round_trip_s)

    def drafted(self, timing: Timing, round_trip_s: float) -> None:
        """Adds the time of one draft."""
        this = self._round
        this.newest_draft_s = timing.total_us / 1e6
        this.draft_s += _engine_s(timing)
        this.draft_queue_s += timing.queue_us / 1e6
        this.draft_wire_s += _wire_s(timing, round_trip_s)

    def verifier_back(self, gap_s: float) -> None:
        """A verifier gives verdicts again, so long after one was lost."""
        self._round.verifier_gap_s = gap_s

    def drafter_back(self, gap_s: float) -> None:
        """A drafter drafts again, so long after one was lost."""
        self._round.drafter_gap_s = gap_s

    def waited(self, wait_s: float) -> None:
        """Adds time that the verifier was idle for a draft; for the newest one, if that has come."""
        self._round.replicas_s += min(wait_s, self._round.newest_draft_s)
        self._round.draft_wait_s += wait_s

    def end_round(self, now: float, fallback: Fallback | None, prompt_tokens: int) -> RoundRecord:
        """What has been counted since the last call.

        Args:
            now: when the verdict came, or the generation ended without another one.
            fallback: why the round was plain.
            prompt_tokens: of the generation; for its first round.
        """
        done, self._round = self._round, _OpenRound(wasted_before=self.wasted_draft_tokens, hits_before=self.ahead_hits)
        times = done.times
        self._times = self._times.plus(times)
        first = None
        since_last_s = 0.0
        overhead_s = None
        if done.target_passes:
            if self.first_token_at is None:
                self.first_token_at = now
                begun_at = now if self.first_round_at is None else self.first_round_at
                first = FirstRound(prompt_tokens, begun_at - self.started_at, now - self.started_at)
            else:
                since_last_s = now - self._last_verdict_at
                if fallback is None and done.verifier_gap_s is None:
                    overhead_s = max(since_last_s - done.replicas_s, 0.0)
            self._last_verdict_at = now
        return RoundRecord(
            target_passes=done.target_passes,
            new_tokens=done.new_tokens,
            draft_tokens=done.draft_tokens,
            accepted_tokens=done.accepted_tokens,
            wasted_draft_tokens=self.wasted_draft_tokens - done.wasted_before,
            ahead_hit=self.ahead_hits > done.hits_before,
            method=done.method,
            fallback=fallback if done.target_passes else None,
            times=times,
            since_last_s=since_last_s,
            first=first,
            decision=done.decision,
            size_changes=done.size_changes,
            overhead_s=overhead_s,
            verifier_gap_s=done.verifier_gap_s,
            drafter_gap_s=done.drafter_gap_s,
        )

    def report(self, now: float, verifier: str, drafter: str) -> Evidence:
        """The evidence so far, with the replicas in use."""
        passes, times = self.target_passes, self._times.plus(self._round.times)
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
            draft_ms=times.draft_s * 1e3,
            verify_ms=times.verify_s * 1e3,
            queue_ms=(times.draft_queue_s + times.verify_queue_s) * 1e3,
            wire_ms=(times.draft_wire_s + times.verify_wire_s) * 1e3,
            draft_wait_ms=times.draft_wait_s * 1e3,
            drafter_memory_bytes=self.drafter_memory_bytes,
            methods=tuple(method for method in self._methods if method),
            verifier=verifier,
            drafter=drafter,
            off_rounds=self.off_rounds,
            probe_rounds=self.probe_rounds,
        )


def _ewma(old: float, sample: float, weight: float = 0.2) -> float:
    return old + weight * (sample - old)


def _engine_s(timing: Timing) -> float:
    """Time in the replica outside its queue."""
    return max(timing.total_us - timing.queue_us, 0) / 1e6


def _wire_s(timing: Timing, round_trip_s: float) -> float:
    """Time outside the replica; clocks that disagree do not make it negative."""
    return max(round_trip_s - timing.total_us / 1e6, 0.0)
