"""What an actor's meter makes of passes, pauses, answers and failures."""

from __future__ import annotations

import pytest

from paceline.pass_size import PassSize
from paceline.runtime.passes import Pass
from paceline.runtime.replica_meter import ReplicaMeter


class Bench:
    """A meter on a clock that the test turns."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.meter = ReplicaMeter(lambda: self.now_s)

    def run_pass(self, time_s: float, size: PassSize | None) -> None:
        started_s = self.now_s
        self.now_s += time_s
        self.meter.passed(Pass(started_s, self.now_s, None), size)

    def __call__(self, name: str, **labels: str) -> float:
        value = self.meter.registry.get_sample_value(f"paceline_{name}", labels)
        assert value is not None
        return value


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_passes_are_counted_by_outcome_with_their_size(bench: Bench) -> None:
    bench.run_pass(0.5, PassSize(3, 20))
    bench.run_pass(0.25, PassSize(1, 4))
    bench.run_pass(1.0, None)
    bench.run_pass(0.0, PassSize(0, 0))  # all work of it was refused: nothing was fed
    assert bench("passes_total", outcome="ok") == 3
    assert bench("passes_total", outcome="failed") == 1
    assert bench("pass_duration_seconds_sum") == pytest.approx(1.75)
    assert (bench("pass_sessions_sum"), bench("pass_sessions_count")) == (4, 2)
    assert (bench("pass_tokens_sum"), bench("pass_tokens_count")) == (24, 2)
    assert bench.meter.utilization() == pytest.approx(1.75 / 15)


def test_a_pause_counts_only_while_sessions_are_open(bench: Bench) -> None:
    bench.run_pass(0.5, PassSize(1, 1))
    bench.now_s += 2.0
    bench.run_pass(0.5, PassSize(1, 1))
    bench.meter.no_sessions()
    bench.now_s += 60.0
    bench.run_pass(0.5, PassSize(1, 1))
    assert bench("pass_idle_seconds_count") == 1
    assert bench("pass_idle_seconds_sum") == pytest.approx(2.0)


def test_recent_signals_fall_to_zero_when_nothing_happens(bench: Bench) -> None:
    bench.meter.answered(200_000)
    bench.meter.answered(400_000)
    bench.run_pass(3.0, PassSize(1, 1))
    assert bench.meter.mean_queue_s() == pytest.approx(0.3)
    assert bench.meter.utilization() == pytest.approx(0.2)
    assert bench("queue_time_seconds_sum") == pytest.approx(0.6)
    bench.now_s += 16.0
    assert bench.meter.mean_queue_s() == 0.0
    assert bench.meter.utilization() == 0.0


def test_what_runs_counts_before_its_end_is_told_and_no_time_counts_twice(bench: Bench) -> None:
    bench.meter.began()
    began_s = bench.now_s
    bench.now_s += 6.0
    assert bench.meter.utilization() == pytest.approx(6 / 15)
    for number in range(4):  # six seconds of passes are told of one by one, when all are over
        bench.meter.passed(Pass(began_s + 1.5 * number, began_s + 1.5 * (number + 1), None), PassSize(1, 1))
        assert bench.meter.utilization() == pytest.approx(6 / 15)
    bench.meter.ended()
    bench.now_s += 3.0
    assert bench.meter.utilization() == pytest.approx(6 / 15)
    bench.meter.began()
    bench.now_s += 20.0
    assert bench.meter.utilization() == 1.0  # a pass that hangs is full load


def test_failures_are_counted_by_code_from_zero_on(bench: Bench) -> None:
    assert bench("failed_commands_total", code="capacity_exceeded") == 0
    bench.meter.failed("capacity_exceeded")
    bench.meter.failed("fenced")
    assert bench("failed_commands_total", code="capacity_exceeded") == 1
    assert bench("failed_commands_total", code="fenced") == 1
