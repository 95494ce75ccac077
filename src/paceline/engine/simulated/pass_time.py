"""What a pass of a simulated device takes, and a way to wait for it."""

from __future__ import annotations

import time
from dataclasses import dataclass


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


def sleep_until(deadline_s: float) -> None:
    """Blocks this thread, without using its CPU, until `time.perf_counter()` has reached the deadline."""
    while (left_s := deadline_s - time.perf_counter()) > 0:
        time.sleep(left_s)
