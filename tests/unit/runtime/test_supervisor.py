"""The supervisor: what a child's failure means, and that no task is left."""

from __future__ import annotations

import asyncio

import pytest

from paceline.runtime import supervisor as module
from paceline.runtime.supervisor import OnError, Supervisor


async def forever() -> None:
    await asyncio.Event().wait()


async def fail() -> None:
    raise ValueError("scripted")


async def test_leaving_the_block_ends_every_child() -> None:
    async with Supervisor("test") as supervisor:
        children = [supervisor.spawn(f"child {number}", forever) for number in range(3)]
        assert supervisor.children == set(children)
        await asyncio.sleep(0)
    assert all(child.cancelled() for child in children)
    assert not supervisor.children


async def test_failed_child_ends_the_block_with_its_own_error() -> None:
    others: list[asyncio.Task[None]] = []

    async def run() -> None:
        async with Supervisor("test") as supervisor:
            others.append(supervisor.spawn("other", forever))
            supervisor.spawn("bad", fail, on_error=OnError.FAIL)
            await forever()

    with pytest.raises(ValueError, match="scripted"):
        await run()
    assert others[0].cancelled()


async def test_error_of_the_block_itself_leaves_unchanged() -> None:
    async def run() -> None:
        async with Supervisor("test") as supervisor:
            supervisor.spawn("other", forever)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await run()


async def test_logged_child_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ends: list[BaseException | None] = []
    async with Supervisor("test") as supervisor:
        other = supervisor.spawn("other", forever)
        await supervisor.spawn("bad", fail, on_error=OnError.LOG, on_end=ends.append)
        await asyncio.sleep(0)
        assert not other.done()
    assert ends == [None]
    assert "task failed" in caplog.text


async def test_restarted_child_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_DELAYS_S", (0.0,))
    runs: list[int] = []
    done = asyncio.Event()

    async def flaky() -> None:
        runs.append(len(runs))
        if len(runs) < 4:
            raise ValueError("scripted")
        done.set()

    async with Supervisor("test", max_restarts=3) as supervisor:
        supervisor.spawn("flaky", flaky, on_error=OnError.RESTART)
        await done.wait()
    assert runs == [0, 1, 2, 3]


async def test_too_many_restarts_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_DELAYS_S", (0.0,))

    async def run() -> None:
        async with Supervisor("test", max_restarts=2) as supervisor:
            supervisor.spawn("bad", fail, on_error=OnError.RESTART)
            await forever()

    with pytest.raises(ValueError, match="scripted"):
        await run()


async def test_child_that_ran_long_has_earned_a_fresh_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESTART_DELAYS_S", (0.0,))
    runs: list[int] = []
    done = asyncio.Event()

    async def flaky() -> None:
        runs.append(len(runs))
        if len(runs) == 10:
            done.set()
            await forever()
        raise ValueError("scripted")

    async with Supervisor("test", max_restarts=1, steady_after_s=0.0) as supervisor:
        supervisor.spawn("flaky", flaky, on_error=OnError.RESTART)
        await done.wait()


async def test_end_of_a_child_is_told() -> None:
    ends: list[BaseException | None] = []
    error: BaseException | None = None
    try:
        async with Supervisor("test") as supervisor:
            supervisor.spawn("bad", fail, on_end=ends.append)
            await forever()
    except ValueError as caught:
        error = caught
    await asyncio.sleep(0)
    assert error is not None
    assert ends == [error]


async def test_a_restarted_child_ends_although_a_group_inside_it_loses_the_cancellation() -> None:
    starts: list[int] = []
    failing, may_end = asyncio.Event(), asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            failing.set()
            await may_end.wait()

    async def child() -> None:
        starts.append(1)
        async with asyncio.TaskGroup() as group:
            group.create_task(slow_to_end())
            await asyncio.sleep(0)
            raise ValueError("scripted")

    async with Supervisor("test") as supervisor:
        task = supervisor.spawn("child", child, on_error=OnError.RESTART)
        await failing.wait()
        task.cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.wait({task}, timeout=5)
        assert task.cancelled()
    assert len(starts) == 1
