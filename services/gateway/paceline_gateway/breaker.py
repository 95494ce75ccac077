"""The circuit breaker of one replica: whether it does its work. Pure; times are handed in.

    closed     it takes sessions; so many failures in a row, without one piece of work between them, open it
    open       it takes none for a pause
    half open  the pause is over: one session may try it. Work done closes it, a failure opens it for twice the pause

Whether it can be reached is no matter of the breaker but of its link, whether it fits is one of `fitness.py`, and
whether it is about to leave one of discovery and of its own word: `pool.py` asks them all.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """Where a breaker stands."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class FailureCause(Enum):
    """What a replica has failed at."""

    STREAM_LOST = "stream_lost"
    """Its stream broke although nobody had said that it would leave."""
    UNREACHABLE = "unreachable"
    """It was there before, and another try to connect came to nothing."""
    SILENT = "silent"
    """Sessions have left it because it owed answers for too long; all that were owed at one time are one silence."""
    FAILED = "failed"
    """It answered that it could not, for a reason of its own: an internal error, or one of its model."""


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """When a breaker opens, and for how long. Times in seconds.

    Attributes:
        max_failures: failures in a row that open it.
        pause_s: for which it then takes no session; doubles with each try that fails ...
        max_pause_s: ... up to this.
    """

    max_failures: int = 5
    pause_s: float = 1.0
    max_pause_s: float = 30.0


class CircuitBreaker:
    """One replica's.

    Args:
        limits: when it opens.

    Attributes:
        num_openings: how often it has opened, a try that failed included.
    """

    def __init__(self, limits: BreakerLimits) -> None:
        self._limits = limits
        self._failures = 0
        self._pause_s = 0.0
        self._next_try_at: float | None = None
        self._tried = False
        self.num_openings = 0

    def state(self, now: float) -> BreakerState:
        """Where it stands."""
        if self._next_try_at is None:
            return BreakerState.CLOSED
        return BreakerState.HALF_OPEN if self._tried or now >= self._next_try_at else BreakerState.OPEN

    def admits(self, now: float) -> bool:
        """Whether a session may go there."""
        return self._next_try_at is None or now >= self._next_try_at

    def admitted(self, now: float) -> None:
        """A session goes there. If it is half open, the next one waits for what becomes of that.

        It waits for a pause at most: the first one may end, or have nothing for the replica to do. A session that comes
        before the pause is over, because there is no other replica, is no try: what it fails at counts for nothing.
        """
        if self._next_try_at is not None and now >= self._next_try_at:
            self._tried = True
            self._next_try_at = now + self._pause_s

    def failed(self, now: float) -> bool:
        """The replica has failed at something; says whether that opened it.

        While it is open and untried nothing counts: it fails at what was under way before.
        """
        self._failures += 1
        if self._next_try_at is None:
            if self._failures < self._limits.max_failures:
                return False
            self._pause_s = self._limits.pause_s
        elif self._tried:
            self._pause_s = min(2 * self._pause_s, self._limits.max_pause_s)
        else:
            return False
        self._tried = False
        self._next_try_at = now + self._pause_s
        self.num_openings += 1
        return True

    def worked(self) -> bool:
        """The replica has done a piece of work; says whether that closed it."""
        was_closed = self._next_try_at is None
        self._failures = 0
        self._next_try_at = None
        self._tried = False
        return not was_closed
