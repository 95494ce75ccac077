"""The circuit breaker of a replica, by itself."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from paceline_gateway.breaker import BreakerLimits, BreakerState, CircuitBreaker

LIMITS = BreakerLimits(max_failures=3, pause_s=1.0, max_pause_s=4.0)


def opened(at: float = 10.0) -> CircuitBreaker:
    breaker = CircuitBreaker(LIMITS)
    assert [breaker.failed(at) for _ in range(3)] == [False, False, True]
    return breaker


def test_failures_in_a_row_open_it_and_work_between_them_does_not_let_them_add_up() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(4):
        assert not breaker.failed(0.0)
        assert not breaker.failed(0.0)
        assert not breaker.worked()
    assert breaker.state(0.0) is BreakerState.CLOSED
    assert breaker.num_openings == 0
    breaker = opened()
    assert breaker.state(10.0) is BreakerState.OPEN
    assert not breaker.admits(10.99)


def test_half_open_lets_one_session_try_until_it_is_known_what_became_of_it() -> None:
    breaker = opened()
    assert (breaker.state(11.0), breaker.admits(11.0)) == (BreakerState.HALF_OPEN, True)
    breaker.admitted(11.0)
    assert (breaker.state(11.5), breaker.admits(11.5)) == (BreakerState.HALF_OPEN, False)
    assert breaker.worked()
    assert (breaker.state(11.5), breaker.admits(11.5)) == (BreakerState.CLOSED, True)
    assert not breaker.worked()


def test_a_session_that_tries_and_brings_no_news_is_followed_by_another_one() -> None:
    breaker = opened()
    breaker.admitted(11.0)
    assert breaker.admits(12.0)
    assert breaker.state(12.0) is BreakerState.HALF_OPEN


def test_each_try_that_fails_doubles_the_pause_up_to_a_bound() -> None:
    breaker, now, pauses = opened(0.0), 0.0, []
    for _ in range(4):
        before = now
        while not breaker.admits(now):
            now += 0.25
        pauses.append(now - before)
        breaker.admitted(now)
        assert breaker.failed(now)
        assert breaker.state(now) is BreakerState.OPEN
    assert pauses == [1.0, 2.0, 4.0, 4.0]
    assert breaker.num_openings == 5
    breaker.worked()
    assert [breaker.failed(now) for _ in range(3)] == [False, False, True]
    assert breaker.admits(now + 1.0), "the pause begins anew"


def test_what_was_under_way_when_it_opened_does_not_lengthen_the_pause() -> None:
    breaker = opened(10.0)
    for _ in range(20):
        assert not breaker.failed(10.9)
    assert breaker.admits(11.0)


def test_sessions_that_had_no_other_choice_do_not_lengthen_the_pause() -> None:
    breaker = opened(10.0)
    for now in (10.1, 10.2, 10.3):
        breaker.admitted(now)
        assert not breaker.failed(now)
    assert breaker.state(10.9) is BreakerState.OPEN
    assert breaker.admits(11.0)
    assert breaker.num_openings == 1


def test_admissions_of_a_closed_one_are_nothing() -> None:
    breaker = CircuitBreaker(LIMITS)
    for _ in range(9):
        breaker.admitted(0.0)
    assert breaker.admits(0.0)


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.sampled_from(["fail", "work", "ask"]), st.floats(0.0, 2.0)), max_size=60))
def test_while_it_does_no_work_it_gets_at_most_one_session_per_pause(steps: list[tuple[str, float]]) -> None:
    breaker, now = CircuitBreaker(LIMITS), 0.0
    tried: list[float] = []
    for step, pause in steps:
        now += pause
        if step == "fail":
            breaker.failed(now)
        elif step == "work":
            breaker.worked()
            tried.clear()
        elif breaker.admits(now):
            if breaker.state(now) is not BreakerState.CLOSED:
                tried.append(now)
            breaker.admitted(now)
    assert all(later - earlier >= LIMITS.pause_s - 1e-9 for earlier, later in itertools.pairwise(tried))
    # However long it has failed: after the longest pause somebody may try.
    assert breaker.admits(now + LIMITS.max_pause_s)


@pytest.mark.parametrize("max_failures", [1, 5])
def test_the_limit_is_the_one_that_is_given(max_failures: int) -> None:
    breaker = CircuitBreaker(BreakerLimits(max_failures=max_failures))
    assert [breaker.failed(0.0) for _ in range(max_failures)] == [False] * (max_failures - 1) + [True]
