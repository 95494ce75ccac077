"""How much slower rounds with blocks are than the model of them says. Pure Python.

A model of a fleet leaves things out: how sessions fall into step, what software costs, who else is on the machine. So
the time that is expected of a way to draft is multiplied by what it has really taken. Of a way that is not used this is
forgotten by and by, for it may be otherwise now.
"""

from __future__ import annotations

from paceline.speculation.estimates import Level

_WINDOW = 64.0
_FIRST_ROUNDS = 16
_LEAST, _MOST = 0.8, 2.0
_FORGOTTEN_BY_A_ROUND = 1.0 / 256.0
_PLAIN_ROUNDS, _PLAIN_ROUNDS_AT_MOST = 64.0, 1024.0
"""Plain rounds that forget it: twice as many each time that blocks are given up again soon."""
_NOT_SOON = 128


class Slowness:
    """Of both ways, in turn and ahead: seconds of rounds, divided by what was expected."""

    __slots__ = ("_first", "_in_a_row", "_plain_rounds", "_ways")

    def __init__(self) -> None:
        self._first = 0.0
        self._in_a_row = 0.0
        self._plain_rounds = _PLAIN_ROUNDS
        self._ways = (Level(_WINDOW), Level(_WINDOW))

    @property
    def factors(self) -> tuple[float, float]:
        """Drafted in turn, and ahead. A way that was never used is thought to be half as far off as the other one."""
        in_turn, ahead = self._ways
        factors = in_turn.get(_halfway(ahead.get(1.0))), ahead.get(_halfway(in_turn.get(1.0)))
        return _within_reason(factors[0]), _within_reason(factors[1])

    def observe(self, ahead: bool, expected_s: float, seconds: float, sessions: float) -> None:
        """Adds a round.

        Args:
            ahead: it was drafted ahead.
            expected_s: what the model says.
            seconds: what it took.
            sessions: that do the same.
        """
        self._first += 1.0 / max(sessions, 1.0)
        self._in_a_row += 1.0 / max(sessions, 1.0)
        if self._in_a_row > _NOT_SOON:
            self._plain_rounds = _PLAIN_ROUNDS
        if expected_s <= 0.0 or self._first <= _FIRST_ROUNDS:
            return  # at first what was expected tells more of what was not known yet
        used, other = self._ways[ahead], self._ways[not ahead]
        used.observe(min(seconds / expected_s, _MOST))
        _approach(other, _halfway(used.get(1.0)), _FORGOTTEN_BY_A_ROUND / max(sessions, 1.0))

    def unused(self, sessions: float) -> None:
        """One of so many sessions has decoded plainly."""
        if self._in_a_row > 0.0:
            self._in_a_row = 0.0
            self._plain_rounds = min(2.0 * self._plain_rounds, _PLAIN_ROUNDS_AT_MOST)
        for level in self._ways:
            _approach(level, 1.0, 1.0 / self._plain_rounds / max(sessions, 1.0))


def _approach(level: Level, value: float, share: float) -> None:
    if level.value is not None:
        level.value += share * (value - level.value)


def _halfway(factor: float) -> float:
    return 0.5 * (1.0 + factor)


def _within_reason(factor: float) -> float:
    return min(max(factor, _LEAST), _MOST)
