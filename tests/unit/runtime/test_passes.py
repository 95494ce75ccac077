"""Passes one after the other, and the thread that runs them."""

from __future__ import annotations

import asyncio
import itertools
import threading
from queue import SimpleQueue

import pytest

from paceline.errors import ModelError
from paceline.runtime.model_thread import ModelThread
from paceline.runtime.passes import Pass, run_passes


def test_passes_go_on_until_somebody_must_be_told() -> None:
    numbers = itertools.count(1)
    clock = itertools.count(100)
    passes = run_passes(lambda: next(numbers), lambda number: number < 3, lambda: next(clock))
    assert passes == [Pass(100, 101, 1), Pass(102, 103, 2), Pass(104, 105, 3)]


def test_a_failure_ends_them_and_keeps_what_went_before() -> None:
    error = ModelError("broken")

    def second_one_fails() -> int:
        if next(numbers) == 2:
            raise error
        return 1

    numbers = itertools.count(1)
    passes = run_passes(second_one_fails, lambda _: True, lambda: 0.0)
    assert [one.outcome for one in passes] == [1, error]


async def test_work_is_done_in_order_in_one_other_thread() -> None:
    done: list[int] = []

    def work(number: int) -> threading.Thread:
        done.append(number)
        return threading.current_thread()

    with ModelThread("model") as model:
        first, second = model.run(lambda: work(1)), model.run(lambda: work(2))
        threads = {await second, await first}
    assert done == [1, 2]
    (thread,) = threads
    assert thread.name == "model"
    assert thread is not threading.current_thread()
    await asyncio.to_thread(thread.join)


async def test_what_work_raises_is_raised_where_it_is_awaited() -> None:
    def fails() -> None:
        raise ModelError("broken")

    with ModelThread("model") as model:
        with pytest.raises(ModelError, match="broken"):
            await model.run(fails)
        assert await model.run(lambda: "and goes on") == "and goes on"


async def test_what_comes_then_is_done_on_the_loop_before_whoever_waits_goes_on() -> None:
    seen: list[tuple[int, threading.Thread]] = []
    with ModelThread("model") as model:
        assert await model.run(lambda: 7, lambda result: seen.append((result, threading.current_thread()))) == 7
        assert seen == [(7, threading.current_thread())]

        def fails(_result: int) -> None:
            raise ModelError("cannot be applied")

        with pytest.raises(ModelError, match="cannot be applied"):
            await model.run(lambda: 7, fails)


async def test_whoever_does_not_wait_any_more_hurts_nobody() -> None:
    may_end = threading.Event()
    applied: list[bool] = []
    with ModelThread("model") as model:
        answer = model.run(may_end.wait, applied.append)
        answer.cancel()
        may_end.set()
        assert await model.run(lambda: 1) == 1
    assert not applied


def test_work_may_outlive_its_loop() -> None:
    may_end = threading.Event()
    threads: SimpleQueue[threading.Thread] = SimpleQueue()

    def work() -> None:
        threads.put(threading.current_thread())
        may_end.wait()

    async def leave() -> None:
        with ModelThread("model") as model:
            model.run(work)

    asyncio.run(leave())
    may_end.set()
    threads.get().join()
