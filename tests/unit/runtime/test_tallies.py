"""Tallies show what Prometheus' own counters and histograms show of the same counts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from paceline.runtime.tallies import CounterTallies, HistogramTallies, HistogramTally

BOUNDS = (0.5, 1.0, 2.5)


@pytest.fixture(autouse=True)
def _no_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prometheus_client.metrics._use_created", False)


def shown(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def both() -> tuple[CollectorRegistry, CollectorRegistry]:
    return CollectorRegistry(), CollectorRegistry()


def test_a_counter_with_labels() -> None:
    ours, theirs = both()
    tallies = CounterTallies(ours, "rounds", "Rounds.", ("method", "position"))
    counter = Counter("rounds", "Rounds.", ("method", "position"), registry=theirs)
    for method, position, amount in (("ngram", "0", 1.0), ("none", "0", 2.5), ("ngram", "0", 3.0)):
        tallies.labels(method, position).inc(amount)
        counter.labels(method, position).inc(amount)
    assert shown(ours) == shown(theirs)


def test_a_counter_without_labels_is_shown_from_the_start() -> None:
    ours, theirs = both()
    tally = CounterTallies(ours, "passes", "Passes.").labels()
    counter = Counter("passes", "Passes.", registry=theirs)
    assert shown(ours) == shown(theirs)
    tally.inc()
    counter.inc()
    assert shown(ours) == shown(theirs)
    assert tally.value == 1.0


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from((0.0, 0.25, 0.5, 0.75, 1.0, 2.5, 4.0)), max_size=12))
def test_a_histogram(values: list[float]) -> None:
    ours, theirs = both()
    tallies = HistogramTallies(ours, "round_seconds", "Time.", BOUNDS, ("phase",))
    histogram = Histogram("round_seconds", "Time.", ("phase",), buckets=BOUNDS, registry=theirs)
    for value in values:
        tallies.labels("draft").observe(value)
        histogram.labels("draft").observe(value)
    assert shown(ours) == shown(theirs)


def test_one_value_seen_several_times() -> None:
    once, often = HistogramTally(BOUNDS), HistogramTally(BOUNDS)
    for _ in range(3):
        once.observe(0.75)
    often.observe(0.75, 3)
    assert (once.counts, once.total) == (often.counts, often.total) == ([0, 3, 0, 0], 2.25)
