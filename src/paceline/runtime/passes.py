"""Passes of a model one after the other, without a way back to the event loop between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True)
class Pass(Generic[ResultT]):
    """What became of a pass.

    Attributes:
        started_s: when it began, on the clock of `run_passes`.
        ended_s: when it ended.
        outcome: its result or what it raised.
    """

    started_s: float
    ended_s: float
    outcome: ResultT | Exception


def run_passes(
    run_pass: Callable[[], ResultT], goes_on: Callable[[ResultT], bool], clock: Callable[[], float]
) -> list[Pass[ResultT]]:
    """Runs passes, one at least, until one fails or somebody need be told of its result.

    Args:
        run_pass: one of them.
        goes_on: whether the next pass can begin at once after this result.
        clock: monotonic seconds.
    """
    passes: list[Pass[ResultT]] = []
    while True:
        started_s = clock()
        try:
            outcome: ResultT | Exception = run_pass()
        except Exception as error:
            outcome = error
        passes.append(Pass(started_s, clock(), outcome))
        if isinstance(outcome, Exception) or not goes_on(outcome):
            return passes
