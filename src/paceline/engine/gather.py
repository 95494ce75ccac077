"""Whether a pass should wait a moment for sessions that were answered a moment ago. Pure: times are handed in.

A pass costs much of its time however many sessions share it, so that two half batches in turn take nearly twice as
long as whole ones. Sessions fall into such halves by chance, a slow way to a gateway or drafts, and stay in them for
ever: while the pass of one half runs the other half comes back, and the next pass begins without the first.

What is weighed is sessions per second. With `ready` sessions that could begin and `later` ones expected within a wait,

    ready / T(ready)    against    (ready + later) / (wait + T(ready + later))

for every number of later sessions; T is a line through the passes so far. Where a pass takes its time per token, or
nobody is expected soon, the pass begins at once.

| a session is | it is expected |
|---|---|
| waiting for its pass | it is there |
| away since it was answered | after its usual time away |
| away for half as long again, or nothing is known of it | no more |
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.speculation.estimates import Level, LinearTime

_NEWEST_SHARE = 0.25
"""Weight of the newest time away in the mean."""
_LONGEST_AWAY_WINDOWS = 4
"""A longer time away counts as so many windows, so that one slow round is soon forgotten."""
_LATE = 1.5
"""A session that is away for this multiple of its usual time is not expected any more."""
_SOON = 0.1
"""One that is late but still expected is thought to need this part of its usual time."""
_PASS_WINDOW = 16
"""Passes that the line of their time looks back on."""


class GatherWindow:
    """Learns how soon sessions come back and what passes take, and says how long a pass should wait for whom.

    Args:
        window_s: longest wait; 0 for none.
        clock: monotonic seconds.
    """

    def __init__(self, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._away: dict[str, float] = {}  # when it was answered
        self._usual_s: dict[str, tuple[float, float]] = {}  # time until it came back: mean, and mean distance from it
        self._pass_s = LinearTime(_PASS_WINDOW, prior_share=0.5)
        self._session_tokens = Level(_PASS_WINDOW)
        self._waits_since_s: float | None = None

    def answered(self, session: str) -> None:
        """A pass answered the session's command: it is away."""
        self._away[session] = self._clock()

    def returned(self, session: str, arrived_s: float) -> None:
        """The session's next command came at this time."""
        answered_s = self._away.pop(session, None)
        if answered_s is None:
            return
        took_s = min(arrived_s - answered_s, _LONGEST_AWAY_WINDOWS * self._window_s)
        mean_s, spread_s = self._usual_s.get(session, (took_s, 0.0))
        off_s = took_s - mean_s
        self._usual_s[session] = (mean_s + _NEWEST_SHARE * off_s, spread_s + _NEWEST_SHARE * (abs(off_s) - spread_s))

    def stays(self, session: str) -> None:
        """The session's next command was there before it was answered: that says nothing of how soon it comes back."""
        self._away.pop(session, None)

    def forget(self, session: str) -> None:
        """The session has ended."""
        self._away.pop(session, None)
        self._usual_s.pop(session, None)

    def pass_took(self, duration_s: float, num_sessions: int, num_tokens: int) -> None:
        """Tells the time and the size of the newest pass."""
        self._waits_since_s = None
        if num_sessions:
            self._pass_s.observe(num_tokens, duration_s)
            self._session_tokens.observe(num_tokens / num_sessions)

    def delay_s(self, num_ready: int) -> float:
        """How long a pass that could begin should still wait; 0 if that gains nothing.

        Args:
            num_ready: sessions that it would have now.
        """
        if self._window_s <= 0 or num_ready < 1 or not self._pass_s.known:
            return 0.0
        now_s = self._clock()
        since_s = now_s if self._waits_since_s is None else self._waits_since_s
        pass_s = self._time_of(num_ready)
        left_s = since_s + min(self._window_s, pass_s) - now_s
        best_rate, best_wait_s = num_ready / pass_s, 0.0
        for number, wait_s in enumerate(self._expected_s(now_s), num_ready + 1):
            if wait_s > left_s:
                break
            rate = number / (wait_s + self._time_of(number))
            if rate > best_rate:
                best_rate, best_wait_s = rate, wait_s
        if best_wait_s > 0:
            self._waits_since_s = since_s
        return best_wait_s

    def _time_of(self, num_sessions: int) -> float:
        return self._pass_s.at(num_sessions * self._session_tokens.get(1.0))

    def _expected_s(self, now_s: float) -> list[float]:
        """Until sessions that are away are expected, in seconds, the soonest first."""
        expected: list[float] = []
        for session, answered_s in self._away.items():
            if session not in self._usual_s:
                continue
            usual_s = sum(self._usual_s[session])
            away_s = now_s - answered_s
            if away_s < _LATE * usual_s:
                expected.append(max(usual_s - away_s, _SOON * usual_s))
        return sorted(expected)
