"""The thread that runs a model: it is handed one piece of work at a time by an event loop, which waits for it.

Instead of `loop.run_in_executor`, whose two futures for each piece cost half as much again as the way there and back.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

_Work = Callable[[], None]


class ModelThread:
    """A thread that lives as long as its `with` block; work that it is in then ends after it.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.put(None)

    def run(self, work: Callable[[], T], then: Callable[[T], None] = lambda _: None) -> asyncio.Future[T]:
        """Does the work after all that was handed over before.

        Args:
            work: what to do in the thread.
            then: what to do with its result on the loop, before whoever waits for it is woken, which takes another turn
                of the loop; not done if nobody waits any more.

        Returns:
            The work's result, or what it or `then` raised.
        """
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()  # that of whoever waits, for what `then` logs

        def do() -> None:
            result: Any = None
            failure: BaseException | None = None
            try:
                result = work()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, answer, then, result, failure, context=context)

        self._queue.put(do)
        return answer


def _serve(queue: SimpleQueue[_Work | None]) -> None:
    while (do := queue.get()) is not None:
        do()


def _settle(
    answer: asyncio.Future[Any], then: Callable[[Any], None], result: Any, failure: BaseException | None
) -> None:
    if answer.done():
        return  # whoever waited has been cancelled
    if failure is None:
        try:
            then(result)
        except Exception as error:
            failure = error
    if failure is None:
        answer.set_result(result)
    else:
        answer.set_exception(failure)
