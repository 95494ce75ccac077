"""The gateway's metrics. docs/metrics.md says what each of them means.

Sessions hand in what they have counted: one record per round, and how the request ended. Gauges are in
`gateway_gauges.py`: they are read where the truth is, at the moment of the scrape.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from dataclasses import dataclass, fields

from prometheus_client import CollectorRegistry

from paceline.errors import (
    CapacityExceeded,
    InvalidArgument,
    PacelineError,
    PayloadTooLarge,
    Unauthenticated,
    Unavailable,
)
from paceline.generation import Evidence
from paceline.messages import FinishReason
from paceline.runtime.tallies import CounterTallies, CounterTally, HistogramTallies, HistogramTally
from paceline.runtime.telemetry import WithLabels
from paceline.speculation.governor import Reason
from paceline_gateway.effects import Lane
from paceline_gateway.round_record import Fallback, RoundRecord, RoundTimes

PLAIN = "none"
"""In place of the method for rounds without a block."""
_OTHER = "other"
_MAX_METHODS = 16
"""Names of methods come from drafters: what is beyond this is counted as `other`, so that series stay few."""

_REQUEST_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_ROUND_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_OVERHEAD_BUCKETS_S = (0.0005, 0.001, 0.0015, 0.002, 0.0025, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.02, 0.05, 0.1, 0.5)
_GAP_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
_PER_PASS_BUCKETS = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 12.0, 17.0)
_BLOCK_BUCKETS = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 16.0, 24.0, 32.0, 64.0)
_PER_SECOND_BUCKETS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 40.0, 60.0, 80.0, 120.0, 160.0, 240.0, 400.0, 800.0)

_PHASES = tuple(field.name.removesuffix("_s") for field in fields(RoundTimes))
_seconds_of_phases = operator.attrgetter(*(field.name for field in fields(RoundTimes)))


@dataclass(frozen=True, slots=True)
class _MethodSeries:
    """The series of one method, looked up once."""

    label: str
    phases_s: tuple[HistogramTally, ...]
    overhead_s: HistogramTally
    drafts: CounterTally
    draft_tokens: CounterTally
    accepted: CounterTally
    accepted_at: list[CounterTally]


class GatewayMetrics:
    """Counters and histograms of one gateway.

    Args:
        registry: where they are shown.
        model: name of the served model, their label.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._own = CollectorRegistry()
        registry.register(WithLabels(self._own, {"model_name": model}))
        self._make_request_metrics()
        self._make_round_metrics()
        self._methods: dict[str, _MethodSeries] = {}
        self._method(PLAIN)

    def _counter(self, name: str, meaning: str) -> CounterTally:
        return self._counters(name, meaning).labels()

    def _counters(self, name: str, meaning: str, *labels: str) -> CounterTallies:
        return CounterTallies(self._own, f"paceline_{name}", meaning, labels)

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> HistogramTally:
        return self._histograms(name, meaning, buckets).labels()

    def _histograms(self, name: str, meaning: str, buckets: tuple[float, ...], *labels: str) -> HistogramTallies:
        return HistogramTallies(self._own, f"paceline_{name}", meaning, buckets, labels)

    def _make_request_metrics(self) -> None:
        self._first_token_s = self._histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _REQUEST_BUCKETS_S
        )
        self._token_s = self._histogram(
            "inter_token_latency_seconds", "Time per token after the first, one observation each.", _TOKEN_BUCKETS_S
        )
        self._request_s = self._histogram(
            "e2e_request_latency_seconds", "From arrival to end of a request that was answered.", _REQUEST_BUCKETS_S
        )
        self._queue_s = self._histogram(
            "request_queue_time_seconds", "From a request's arrival until its first round was sent.", _REQUEST_BUCKETS_S
        )
        self._per_pass = self._histogram(
            "tokens_per_target_pass", "Tokens per pass of the target, for each request.", _PER_PASS_BUCKETS
        )
        self._goodput = self._histogram(
            "goodput_tokens_per_second", "Tokens per second of its whole time, for each request.", _PER_SECOND_BUCKETS
        )
        self._successes = self._counters("request_success", "Requests that were answered.", "finished_reason")
        self._failures = self._counters("request_failure", "Requests that were admitted and failed.", "code")
        self._refusals = self._counters("request_refused", "Requests that were refused at the door.", "code")
        self._all_requests_s = self._counter("request_seconds", "Time of all requests that have ended, in seconds.")
        self._store_errors = self._counters("store_errors", "Writes that the session store did not take.", "code")
        self._resumes = self._counter("session_resumes", "Sessions that went on here after their stream had broken.")
        for reason in FinishReason:
            self._successes.labels(reason.value)
        for error in (CapacityExceeded, InvalidArgument, PayloadTooLarge, Unauthenticated, Unavailable):
            self._refusals.labels(error.code)

    def _make_round_metrics(self) -> None:
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self._tokens = self._counter("generation_tokens", "Tokens that became final.")
        self._passes = self._counter("target_passes", "Passes of the target that gave a verdict.")
        self._drafts = self._counters("spec_decode_num_drafts", "Blocks that were judged.", "method")
        self._draft_tokens = self._counters("spec_decode_num_draft_tokens", "Draft tokens that were judged.", "method")
        self._accepted = self._counters("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", "method")
        self._accepted_at = self._counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by place in the block.",
            "method",
            "position",
        )
        self._wasted = self._counter("spec_decode_num_wasted_tokens", "Draft tokens that were dropped unjudged.")
        self._ahead_hits = self._counter("spec_decode_num_ahead_hits", "Blocks that were drafted ahead of time.")
        self._fallbacks = self._counters("spec_decode_num_fallbacks", "Rounds without the block they wanted.", "cause")
        self._round_s = self._histograms(
            "round_seconds", "Where the time of a round went.", _ROUND_BUCKETS_S, "phase", "method"
        )
        self._overhead_s = self._histograms(
            "round_overhead_seconds",
            "Time of a round outside replicas: wire, gateway, store.",
            _OVERHEAD_BUCKETS_S,
            "method",
        )
        for cause in Fallback:
            self._fallbacks.labels(cause.value)
        gap_s = self._histograms(
            "replica_gap_seconds",
            "From the loss of a session's replica until one works for it.",
            _GAP_BUCKETS_S,
            "pool",
        )
        self._verifier_gap_s = gap_s.labels(Lane.VERIFIER.value)
        self._drafter_gap_s = gap_s.labels(Lane.DRAFTER.value)
        self._governed_rounds = self._counters("governor_rounds", "Rounds that the governor decided.", "reason")
        self._block_sizes = self._histogram(
            "governor_block_size_tokens", "Block size that it chose; 0 for none.", _BLOCK_BUCKETS
        )
        self._size_changes = self._counter("governor_size_changes", "Times that it changed the size, probes aside.")
        for reason in Reason:
            if reason is not Reason.PINNED:
                self._governed_rounds.labels(reason.value)

    # --- what sessions and doors say ----------------------------------------------------------------------------------

    def round_ended(self, record: RoundRecord) -> None:
        """Adds a round."""
        method = self._method(record.method or PLAIN)
        self._wasted.inc(record.wasted_draft_tokens)
        self._ahead_hits.inc(record.ahead_hit)
        for phase_s, seconds in zip(method.phases_s, _seconds_of_phases(record.times), strict=True):
            phase_s.observe(seconds)
        if record.overhead_s is not None:
            method.overhead_s.observe(record.overhead_s)
        if record.verifier_gap_s is not None:
            self._verifier_gap_s.observe(record.verifier_gap_s)
        if record.drafter_gap_s is not None:
            self._drafter_gap_s.observe(record.drafter_gap_s)
        if not record.target_passes:
            return
        self._passes.inc(record.target_passes)
        self._tokens.inc(record.new_tokens)
        if record.first is not None:
            self._prompt_tokens.inc(record.first.prompt_tokens)
            self._queue_s.observe(record.first.queue_s)
            self._first_token_s.observe(record.first.time_to_first_token_s)
        else:
            self._token_s.observe(record.since_last_s / record.new_tokens, record.new_tokens)
        if record.draft_tokens:
            method.drafts.inc()
            method.draft_tokens.inc(record.draft_tokens)
            method.accepted.inc(record.accepted_tokens)
            for position in range(len(method.accepted_at), record.accepted_tokens):
                method.accepted_at.append(self._accepted_at.labels(method.label, str(position)))
            for accepted_at in method.accepted_at[: record.accepted_tokens]:
                accepted_at.inc()
        if record.fallback is not None:
            self._fallbacks.labels(record.fallback.value).inc()
        if record.decision is not None:
            self._governed_rounds.labels(record.decision.reason.value).inc()
            self._block_sizes.observe(record.decision.size)
            self._size_changes.inc(record.size_changes)

    def request_answered(self, reason: FinishReason, completion_tokens: int, evidence: Evidence) -> None:
        """A request has ended by itself."""
        total_s = evidence.total_ms / 1e3
        self._successes.labels(reason.value).inc()
        self._all_requests_s.inc(total_s)
        self._request_s.observe(total_s)
        self._per_pass.observe(evidence.tokens_per_target_pass)
        if total_s > 0:
            self._goodput.observe(completion_tokens / total_s)

    def request_failed(self, error: PacelineError, total_s: float) -> None:
        """A request that was admitted has failed, or its client has left."""
        self._failures.labels(error.code).inc()
        self._all_requests_s.inc(total_s)

    def session_resumed(self) -> None:
        """A session goes on here."""
        self._resumes.inc()

    def request_refused(self, error: PacelineError) -> None:
        """A request was refused at a door."""
        self._refusals.labels(error.code).inc()

    @contextlib.contextmanager
    def counting_refusals(self) -> Iterator[None]:
        """Counts an error that leaves the block. `Door.start` counts its own."""
        try:
            yield
        except PacelineError as error:
            self.request_refused(error)
            raise

    def store_failed(self, error: PacelineError) -> None:
        """The session store has not taken a write."""
        self._store_errors.labels(error.code).inc()

    def _method(self, name: str) -> _MethodSeries:
        series = self._methods.get(name)
        if series is not None:
            return series
        if len(self._methods) >= _MAX_METHODS and name != _OTHER:
            return self._method(_OTHER)
        series = self._methods[name] = _MethodSeries(
            name,
            tuple([self._round_s.labels(phase, name) for phase in _PHASES]),
            self._overhead_s.labels(name),
            self._drafts.labels(name),
            self._draft_tokens.labels(name),
            self._accepted.labels(name),
            [],
        )
        return series
