"""What the gateway's counters and histograms make of rounds and requests."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.round_record import Fallback, FirstRound, RoundRecord, RoundTimes
from prometheus_client import CollectorRegistry

from paceline.errors import Cancelled, CapacityExceeded, Unavailable
from paceline.generation import Evidence
from paceline.messages import FinishReason

MODEL = {"model_name": "toy"}
TIMES = RoundTimes(0.004, 0.001, 0.0005, 0.0, 0.02, 0.002, 0.0006)
FIRST = RoundRecord(1, 1, 0, 0, 0, False, "", None, TIMES, 0.0, FirstRound(12, 0.25, 1.5))
BLOCK = RoundRecord(1, 4, 5, 3, 2, True, "ngram", None, TIMES, 0.2)
PLAIN = RoundRecord(1, 1, 0, 0, 0, False, "", Fallback.LATE_DRAFT, TIMES, 0.1)
REST = RoundRecord(0, 0, 0, 0, 7, False, "", None, RoundTimes(draft_s=0.5), 0.0)


class Board:
    """Metrics and what a scrape reads of them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = GatewayMetrics(self.registry, "toy")

    def __call__(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"paceline_{name}", {**MODEL, **labels})
        assert value is not None, f"no sample {name} {labels}"
        return value


@pytest.fixture
def board() -> Board:
    return Board()


def test_rounds_are_counted(board: Board) -> None:
    for record in (FIRST, BLOCK, PLAIN, BLOCK, REST):
        board.metrics.round_ended(record)
    assert board("target_passes_total") == 4
    assert board("generation_tokens_total") == 10
    assert board("prompt_tokens_total") == 12
    assert board("spec_decode_num_drafts_total", method="ngram") == 2
    assert board("spec_decode_num_draft_tokens_total", method="ngram") == 10
    assert board("spec_decode_num_accepted_tokens_total", method="ngram") == 6
    places = [
        board("spec_decode_num_accepted_tokens_per_pos_total", method="ngram", position=str(place))
        for place in range(3)
    ]
    assert places == [2, 2, 2]
    assert board("spec_decode_num_wasted_tokens_total") == 11
    assert board("spec_decode_num_ahead_hits_total") == 2
    assert board("spec_decode_num_fallbacks_total", cause="late_draft") == 1
    assert board("spec_decode_num_fallbacks_total", cause="no_drafter") == 0


def test_the_time_of_a_round_is_told_by_phase_and_method(board: Board) -> None:
    for record in (FIRST, BLOCK, BLOCK, REST):
        board.metrics.round_ended(record)
    assert board("round_seconds_sum", phase="verify", method="ngram") == pytest.approx(0.04)
    assert board("round_seconds_count", phase="verify", method="ngram") == 2
    assert board("round_seconds_sum", phase="draft", method="none") == pytest.approx(0.504)
    assert board("round_seconds_sum", phase="verify_wire", method="none") == pytest.approx(0.0006)
    assert board("round_seconds_sum", phase="draft_queue", method="ngram") == pytest.approx(0.002)


def test_the_overhead_of_a_round_is_told_where_it_is_known(board: Board) -> None:
    for record in (FIRST, replace(BLOCK, overhead_s=0.0021), replace(BLOCK, overhead_s=0.004), REST):
        board.metrics.round_ended(record)
    assert board("round_overhead_seconds_count", method="ngram") == 2
    assert board("round_overhead_seconds_sum", method="ngram") == pytest.approx(0.0061)
    assert board("round_overhead_seconds_bucket", method="ngram", le="0.0025") == 1
    assert board("round_overhead_seconds_count", method="none") == 0


def test_latency_is_per_token_and_not_per_round(board: Board) -> None:
    for record in (FIRST, BLOCK, PLAIN):
        board.metrics.round_ended(record)
    assert board("time_to_first_token_seconds_sum") == 1.5
    assert board("request_queue_time_seconds_sum") == 0.25
    # Four tokens after 0.2 s are four of 0.05 s; the first token of all has no token before it.
    assert board("inter_token_latency_seconds_count") == 5
    assert board("inter_token_latency_seconds_sum") == pytest.approx(0.3)
    assert board("inter_token_latency_seconds_bucket", le="0.04") == 0
    assert board("inter_token_latency_seconds_bucket", le="0.06") == 4


def test_requests_are_counted_by_their_end(board: Board) -> None:
    evidence = Evidence(target_passes=8, tokens_per_target_pass=2.5, total_ms=4000.0)
    board.metrics.request_answered(FinishReason.STOP, 20, evidence)
    board.metrics.request_failed(Cancelled("left"), 1.0)
    board.metrics.request_refused(CapacityExceeded("full"))
    board.metrics.store_failed(Unavailable("no redis"))
    assert board("request_success_total", finished_reason="stop") == 1
    assert board("request_success_total", finished_reason="length") == 0
    assert board("request_failure_total", code="cancelled") == 1
    assert board("request_refused_total", code="capacity_exceeded") == 1
    assert board("store_errors_total", code="unavailable") == 1
    assert board("tokens_per_target_pass_sum") == 2.5
    assert board("goodput_tokens_per_second_sum") == 5.0
    assert board("e2e_request_latency_seconds_sum") == 4.0
    assert board("request_seconds_total") == 5.0


def test_drafters_cannot_make_series_without_end(board: Board) -> None:
    """The name of a method comes from a peer."""
    for index in range(100):
        board.metrics.round_ended(RoundRecord(1, 2, 1, 1, 0, False, f"method {index}", None, TIMES, 0.1))
    methods = {
        sample.labels["method"]
        for metric in board.registry.collect()
        for sample in metric.samples
        if "method" in sample.labels
    }
    assert len(methods) < 20
    assert board("spec_decode_num_drafts_total", method="other") > 80


def test_a_round_costs_next_to_nothing(board: Board) -> None:
    """A pass takes milliseconds. The best of several runs, in processor time, is what it costs."""
    runs = []
    for _ in range(10):
        started_ns = time.thread_time_ns()
        for _ in range(100):
            board.metrics.round_ended(BLOCK)
        runs.append((time.thread_time_ns() - started_ns) / 100)
    assert min(runs) < 50_000
