"""What a pass of a simulated device takes, and a way to wait for it."""

from __future__ import annotations

import ctypes
import sys
import time
from dataclasses import dataclass
from functools import cache

_PR_SET_TIMERSLACK = 29


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


def sleep_until(deadline_s: float) -> None:
    """Blocks this thread, without using its CPU, until `time.perf_counter()` has reached the deadline."""
    exact_sleeps()
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)
