"""Several pieces of work that take turns, so that a noisy machine disturbs them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Cost:
    """Median cost of one piece of work.

    Attributes:
        wall_ms: by the clock.
        processor_ms: of the calling thread; with one thread other programs stretch it least.
    """

    wall_ms: float
    processor_ms: float


def take_turns(works: Mapping[Key, Callable[[], object]], repeats: int, *, is_warm: bool = False) -> dict[Key, Cost]:
    """Runs all works `repeats` times in turn; the medians.

    Each round begins with the next work, so that none is always the first.

    Args:
        works: by name.
        repeats: rounds that count.
        is_warm: all has run before, if shorter; otherwise a first round does not count.
    """
    wall: dict[Key, list[float]] = {key: [] for key in works}
    processor: dict[Key, list[float]] = {key: [] for key in works}
    first = 0 if is_warm else 1
    in_order = list(works.items())
    for turn in range(repeats + first):
        begin = turn % len(in_order)
        for key, work in in_order[begin:] + in_order[:begin]:
            started, started_thread = time.perf_counter(), time.thread_time()
            work()
            wall[key].append((time.perf_counter() - started) * 1e3)
            processor[key].append((time.thread_time() - started_thread) * 1e3)
    return {key: Cost(statistics.median(wall[key][first:]), statistics.median(processor[key][first:])) for key in works}
