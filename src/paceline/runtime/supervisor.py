"""Owns the long-lived tasks of a process and decides what a task's failure means.

What runs for the length of one call is in a task group of that call, so no task is ever unreferenced, and leaving the
supervisor's block leaves none behind:

    async with Supervisor("verifier") as supervisor:
        supervisor.spawn("verify actor", actor.run, on_error=OnError.FAIL)
        await stop_requested.wait()
    # here every child has ended

A child that fails with `OnError.FAIL` cancels the block and all other children, and its exception leaves the block.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum
from types import TracebackType
from typing import Self

logger = logging.getLogger(__name__)

_RESTART_DELAYS_S = (0.0, 0.1, 0.5, 2.0)
"""Pause before the first, second, ... restart in a row; the last one repeats."""


class OnError(Enum):
    """What an exception of a child means."""

    FAIL = "fail"
    """The process cannot go on: end everything and raise."""
    RESTART = "restart"
    """Start the child again, after a pause that grows; at `max_restarts` in a row it is FAIL."""
    LOG = "log"
    """Only the child is lost: log it and go on. For tasks that belong to one request or one peer."""


class Supervisor:
    """A task group with names, restarts and a clean end.

    Args:
        name: appears in logs.
        max_restarts: restarts in a row before a RESTART child fails the group.
        steady_after_s: a child that has run this long has earned a fresh count.
    """

    def __init__(self, name: str, *, max_restarts: int = 5, steady_after_s: float = 60.0) -> None:
        self.name = name
        self._max_restarts = max_restarts
        self._steady_after_s = steady_after_s
        self._group = asyncio.TaskGroup()
        self._children: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel_all()
        try:
            await self._group.__aexit__(exc_type, exc, traceback)
        except BaseExceptionGroup as group:
            # The group holds the first failure and whatever the cancelled rest raised on its way out. The block's own
            # exception goes on by itself.
            if exc is None or not any(exc is other for other in group.exceptions):
                raise group.exceptions[0] from None

    @property
    def children(self) -> frozenset[asyncio.Task[None]]:
        """Tasks that have not ended."""
        return frozenset(self._children)

    def spawn(
        self,
        name: str,
        run: Callable[[], Awaitable[None]],
        *,
        on_error: OnError = OnError.FAIL,
        on_end: Callable[[BaseException | None], None] | None = None,
    ) -> asyncio.Task[None]:
        """Starts a child.

        Args:
            name: the task's name.
            run: makes the child's coroutine; called again at a restart.
            on_error: what its exception means.
            on_end: called once when the child is over for good, with its exception if one ended it.

        Returns:
            The task, for `cancel` or for waiting; it never raises the child's exception unless on_error is FAIL.
        """
        task = self._group.create_task(self._run(name, run, on_error), name=name)
        self._children.add(task)
        task.add_done_callback(self._children.discard)
        if on_end is not None:
            task.add_done_callback(lambda ended: on_end(None if ended.cancelled() else ended.exception()))
        return task

    def cancel_all(self) -> None:
        """Asks every child to end; leaving the block waits for them."""
        for task in list(self._children):
            task.cancel()

    async def _run(self, name: str, run: Callable[[], Awaitable[None]], on_error: OnError) -> None:
        restarts = 0
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            try:
                return await run()
            except Exception:
                end_if_cancelled()
                if loop.time() - started_s >= self._steady_after_s:
                    restarts = 0
                if on_error is OnError.LOG:
                    logger.exception("task failed", extra={"task": name, "supervisor": self.name})
                    return None
                if on_error is OnError.FAIL or restarts >= self._max_restarts:
                    logger.exception("task failed; ending", extra={"task": name, "supervisor": self.name})
                    raise
                delay_s = _RESTART_DELAYS_S[min(restarts, len(_RESTART_DELAYS_S) - 1)]
                restarts += 1
                logger.exception(
                    "task failed; restarting",
                    extra={"task": name, "supervisor": self.name, "restarts": restarts, "delay_s": delay_s},
                )
                await asyncio.sleep(delay_s)


def end_if_cancelled() -> None:
    """Ends the present task if it has been cancelled; for a loop that goes on after an exception.

    Before Python 3.13 a cancellation is lost that comes while a task group inside ends because of an error of its own.

    Raises:
        asyncio.CancelledError: the task has been cancelled.
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
