"""Utilisation and queue time of the last seconds, against a count of every millisecond."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.recent_load import RecentLoad

WINDOW_S = 15.0
STEP_S = 0.25


def test_nothing_has_happened() -> None:
    load = RecentLoad()
    assert load.utilization(1000.0) == 0.0
    assert load.mean_queue_s(1000.0) == 0.0


def test_half_of_the_window_was_busy_and_is_forgotten_in_time() -> None:
    load = RecentLoad()
    load.busy(100.0, 107.5)
    assert load.utilization(107.5) == pytest.approx(0.5)
    assert load.utilization(115.0) == pytest.approx(0.5)
    assert load.utilization(118.75) == pytest.approx(0.25)
    assert load.utilization(123.0) == 0.0


def test_a_pass_that_still_runs_counts_and_one_that_hangs_is_full_load() -> None:
    load = RecentLoad()
    assert load.utilization(103.0, running_since_s=100.0) == pytest.approx(0.2)
    assert load.utilization(500.0, running_since_s=100.0) == 1.0
    load.busy(100.0, 500.0)
    assert load.utilization(500.0) == pytest.approx(1.0)


def test_queue_time_is_a_mean_of_what_was_answered_lately() -> None:
    load = RecentLoad()
    load.answered(4.0, 100.0)
    load.answered(1.0, 110.0)
    load.answered(2.0, 110.1)
    assert load.mean_queue_s(110.2) == pytest.approx(7 / 3)
    assert load.mean_queue_s(116.0) == pytest.approx(1.5)
    assert load.mean_queue_s(126.0) == 0.0


passes = st.lists(st.tuples(st.floats(0.0, 4.0), st.floats(0.0, 20.0)), max_size=12)


@given(passes, st.floats(0.0, 20.0))
def test_utilization_is_the_busy_share_of_the_window(
    pauses_and_times: list[tuple[float, float]], after_s: float
) -> None:
    load, now_s = RecentLoad(WINDOW_S, STEP_S), 50.0
    intervals = []
    for pause_s, time_s in pauses_and_times:
        started_s, now_s = now_s + pause_s, now_s + pause_s + time_s
        load.busy(started_s, now_s)
        intervals.append((started_s, now_s))
    now_s += after_s
    begins_s = now_s - WINDOW_S
    busy_s = sum(max(0.0, end - max(start, begins_s)) for start, end in intervals)
    # The oldest step lies half in the window, and where in it a pass ran is not kept.
    assert load.utilization(now_s) == pytest.approx(busy_s / WINDOW_S, abs=STEP_S / WINDOW_S + 1e-9)
