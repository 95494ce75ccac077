"""What a pass of a simulated device takes, and a way to wait for it."""

from __future__ import annotations

import ctypes
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import cache

_PR_SET_TIMERSLACK = 29
_LOOK_BACK = 16
"""Sleeps whose lateness is remembered."""
_MOST_LATE_S = 0.0002
"""Who is later than that had to wait for a core, and will not be as late again when there is one."""


@dataclass(frozen=True, slots=True)
class PassTime:
    """Time of a pass as a function of its size.

    Attributes:
        pass_ms: of any pass, in milliseconds.
        token_ms: of each token of the batch, in milliseconds.
    """

    pass_ms: float
    token_ms: float

    def seconds(self, num_tokens: int) -> float:
        """Time of a pass over so many tokens, in seconds."""
        return (self.pass_ms + self.token_ms * num_tokens) / 1e3


def exact_sleeps() -> None:
    """Asks Linux to wake this thread when it asked for it, and not up to 50 microseconds later."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_TIMERSLACK, 1)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class Alarm:
    """Wakes a thread at stated times, on the clock of `time.perf_counter`.

    A thread that sleeps on an idle core runs again some 0.1 ms late, a thirtieth of a draft step, and a device would
    not. So it sleeps for less: by what it was late as a rule, of late. It never returns early.
    """

    def __init__(self) -> None:
        self._late_s: deque[float] = deque(maxlen=_LOOK_BACK)

    def wait_until(self, deadline_s: float) -> None:
        """Blocks this thread, with next to none of its CPU, until the deadline has been reached."""
        exact_sleeps()
        wakes_s = deadline_s - (sorted(self._late_s)[len(self._late_s) // 2] if self._late_s else 0.0)
        left_s = wakes_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
            self._late_s.append(min(time.perf_counter() - wakes_s, _MOST_LATE_S))
        while time.perf_counter() < deadline_s:
            pass  # microseconds, and none in half of all cases
