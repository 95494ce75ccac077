"""A session's timer: rings at the time it was told last, and asks the event loop only when that comes nearer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from paceline_gateway.deadlines import SessionTimer, earliest


class ClockLoop:
    """The part of an event loop that a timer uses, with a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.handles: list[asyncio.TimerHandle] = []
        self.num_calls = 0

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        self.handles.remove(handle)

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any) -> asyncio.TimerHandle:
        self.num_calls += 1
        self.handles.append(asyncio.TimerHandle(when, callback, args, as_loop(self)))
        return self.handles[-1]

    def advance(self, now: float) -> None:
        """Moves the clock, and calls what is due on the way at its own time."""
        while due := [handle for handle in self.handles if handle.when() <= now]:
            handle = min(due, key=lambda entry: entry.when())
            self.now = max(self.now, handle.when())
            self.handles.remove(handle)
            handle._run()
        self.now = now


def as_loop(loop: ClockLoop) -> asyncio.AbstractEventLoop:
    return cast("asyncio.AbstractEventLoop", loop)


@pytest.fixture
def loop() -> ClockLoop:
    return ClockLoop()


def test_the_earliest_of_times_that_may_never_come() -> None:
    assert earliest() is None
    assert earliest(None, None) is None
    assert earliest(None, 3.0, None, 2.0, 5.0) == 2.0


def test_deadlines_that_move_away_ask_the_loop_once(loop: ClockLoop) -> None:
    rung: list[float] = []
    timer = SessionTimer(as_loop(loop), lambda: rung.append(loop.now), loop.time)
    for step in range(100):
        loop.advance(step * 0.001)
        timer.set(loop.now + 1.0)
    assert loop.num_calls == 1
    loop.advance(5.0)
    assert rung == [pytest.approx(1.099)]
    assert loop.num_calls == 2


def test_a_nearer_deadline_replaces_the_one_before(loop: ClockLoop) -> None:
    rung: list[float] = []
    timer = SessionTimer(as_loop(loop), lambda: rung.append(loop.now), loop.time)
    timer.set(10.0)
    timer.set(2.0)
    loop.advance(20.0)
    assert rung == [2.0]


def test_a_stopped_timer_leaves_nothing_behind(loop: ClockLoop) -> None:
    timer = SessionTimer(as_loop(loop), lambda: pytest.fail("it was stopped"), loop.time)
    timer.set(1.0)
    timer.stop()
    assert not loop.handles
    loop.advance(2.0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.one_of(st.none(), st.floats(0, 5))), max_size=12))
def test_it_rings_exactly_at_the_time_that_holds(steps: list[tuple[float, float | None]]) -> None:
    loop = ClockLoop()
    rung: list[float] = []
    expected: list[float] = []
    timer = SessionTimer(as_loop(loop), lambda: rung.append(loop.now), loop.time)
    holds: float | None = None
    for pause, wait in [*steps, (100.0, None)]:
        until = loop.now + pause
        if holds is not None and holds <= until:
            expected.append(max(holds, loop.now))
            holds = None
        loop.advance(until)
        assert rung == pytest.approx(expected)
        holds = None if wait is None else loop.now + wait
        timer.set(holds)


def test_uvloop_has_no_time_for_a_call_that_is_due_at_once() -> None:
    """What is half a millisecond away is called at once, and a timer may be set again before that."""

    async def ring() -> float:
        loop, rung = asyncio.get_running_loop(), asyncio.Event()
        timer = SessionTimer(loop, rung.set)
        begun_s = time.monotonic()
        timer.set(begun_s)
        timer.set(begun_s + 0.005)
        await rung.wait()
        return time.monotonic() - begun_s

    assert uvloop.run(ring()) >= 0.005
