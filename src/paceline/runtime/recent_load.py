"""How busy a replica was of late, and how long commands waited: the signals to scale a pool by.

Kept in steps of a fraction of a second, so that a scrape costs the same whatever happened. Pure; times are seconds of
one monotonic clock, handed in. Not thread-safe.
"""

from __future__ import annotations

from dataclasses import dataclass

_NEVER = -1


@dataclass(slots=True)
class _Step:
    """What happened in [index * step_s, (index + 1) * step_s)."""

    index: int = _NEVER
    busy_s: float = 0.0
    queue_s: float = 0.0
    num_answers: int = 0


class RecentLoad:
    """The last `window_s` seconds.

    Args:
        window_s: how far back it looks; a whole number of steps.
        step_s: how finely.
    """

    def __init__(self, window_s: float = 15.0, step_s: float = 0.25) -> None:
        self._window_s = window_s
        self._step_s = step_s
        # A ring: one more than the window has, since both of its ends lie inside a step.
        self._steps = [_Step() for _ in range(round(window_s / step_s) + 1)]

    def busy(self, started_s: float, ended_s: float) -> None:
        """A pass ran."""
        begins_s = max(started_s, ended_s - self._window_s)
        for index in range(self._index(begins_s), self._index(ended_s) + 1):
            ends_s = (index + 1) * self._step_s
            self._step(index).busy_s += min(ended_s, ends_s) - max(begins_s, ends_s - self._step_s)

    def answered(self, queue_s: float, now_s: float) -> None:
        """A command was answered that had waited so long."""
        step = self._step(self._index(now_s))
        step.queue_s += queue_s
        step.num_answers += 1

    def utilization(self, now_s: float, running_since_s: float | None = None) -> float:
        """Share of the window in which a pass ran, from 0 to 1.

        Args:
            now_s: the end of the window.
            running_since_s: when the pass began that runs now; None when none does.
        """
        begins_s = now_s - self._window_s
        busy_s = 0.0 if running_since_s is None else now_s - max(running_since_s, begins_s)
        for step in self._recent(now_s):
            # Of the oldest step only a part lies in the window.
            busy_s += step.busy_s * min((step.index + 1) - begins_s / self._step_s, 1.0)
        return min(max(busy_s / self._window_s, 0.0), 1.0)

    def mean_queue_s(self, now_s: float) -> float:
        """Mean time in the queue of what was answered in the window, in seconds; 0 when nothing was."""
        recent = self._recent(now_s)
        num_answers = sum(step.num_answers for step in recent)
        return sum(step.queue_s for step in recent) / num_answers if num_answers else 0.0

    def _index(self, at_s: float) -> int:
        return int(at_s // self._step_s)

    def _step(self, index: int) -> _Step:
        place = index % len(self._steps)
        if self._steps[place].index != index:
            self._steps[place] = _Step(index)
        return self._steps[place]

    def _recent(self, now_s: float) -> list[_Step]:
        oldest = self._index(now_s) - len(self._steps) + 1
        return [step for step in self._steps if step.index >= max(oldest, 0)]
