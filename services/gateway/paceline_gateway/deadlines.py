"""When a session has something to do although nothing happens: the earliest of its deadlines, and the timer for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable


def earliest(*times: float | None) -> float | None:
    """The first of the times to come; None when there is none."""
    found = None
    for each in times:
        if each is not None and (found is None or each < found):
            found = each
    return found


class SessionTimer:
    """Calls at the time that it was told last.

    A session's deadlines move with every round, nearly always further away. So the event loop is told only of one that
    comes nearer; when it calls too early, it is asked to call again later, and the session hears nothing of it.

    Args:
        loop: the event loop; its own clock may count whole milliseconds, as uvloop's does.
        due: what to call.
        clock: of the times, in seconds.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, due: Callable[[], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._loop = loop
        self._due = due
        self._clock = clock
        self._at: float | None = None
        self._handle: asyncio.Handle | None = None
        self._rings_at = 0.0  # of the handle: uvloop's has no time if that is so near that it calls at once

    def set(self, at: float | None) -> None:
        """Calls at this time of its clock, and not at the one before; None for not at all."""
        self._at = at
        if at is None or (self._handle is not None and self._rings_at <= at):
            return
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(self._loop.time() + (at - self._clock()), self._ring)
        self._rings_at = at

    def stop(self) -> None:
        """Calls no more."""
        self.set(None)
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _ring(self) -> None:
        self._handle = None
        at = self._at
        if at is not None and at > self._clock():
            self.set(at)
        elif at is not None:
            self._at = None
            self._due()
