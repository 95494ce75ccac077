"""Whether a pass should wait a moment for sessions that the last pass answered.

Sessions in lockstep would otherwise alternate for ever: while the pass of one runs the other comes back, and the next
pass begins without the first. Waiting is worth it only for those who usually come back soon, and never longer than a
pass takes, because that is what is saved.

| a session is | it is waited for |
|---|---|
| waiting for its pass | it is not away |
| away since it was answered, and usually back within the window | until the window since then is over |
| away, and usually for longer, or nothing is known of it | no |
"""

from __future__ import annotations

from collections.abc import Callable

_NEWEST_SHARE = 0.25
"""Weight of the newest return time in the mean."""
_LONGEST_RETURN_WINDOWS = 4
"""A longer return counts as so many windows, so that one slow round is soon forgotten."""


class GatherWindow:
    """Learns how soon sessions come back, and says how long a pass that could begin should wait for them.

    Args:
        window_s: longest wait; 0 for none.
        clock: monotonic seconds.
    """

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._last_pass_s = 0.0
        self._away: dict[str, float] = {}  # when it was answered
        self._usual_s: dict[str, float] = {}  # mean time until it came back

    def answered(self, session: str) -> None:
        """A pass answered the session's command: it is away."""
        self._away[session] = self._clock()

    def returned(self, session: str, arrived_s: float) -> None:
        """The session's next command came at this time."""
        answered_s = self._away.pop(session, None)
        if answered_s is None:
            return
        took_s = min(arrived_s - answered_s, _LONGEST_RETURN_WINDOWS * self._window_s)
        usual_s = self._usual_s.get(session, took_s)
        self._usual_s[session] = usual_s + _NEWEST_SHARE * (took_s - usual_s)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._away.pop(session, None)
        self._usual_s.pop(session, None)

    def pass_took(self, duration_s: float) -> None:
        """Tells the time of the newest pass."""
        self._last_pass_s = duration_s

    def delay_s(self) -> float:
        """How long a pass that could begin should still wait; 0 if nobody is expected."""
        window_s = min(self._window_s, self._last_pass_s)
        if window_s <= 0:
            return 0.0
        expected_s = [
            answered_s for name, answered_s in self._away.items() if self._usual_s.get(name, window_s) < window_s
        ]
        return max(0.0, max(expected_s, default=0.0) + window_s - self._clock()) if expected_s else 0.0
