"""When plain decoding is to be doubted: the probes of all sessions of one verifier and one drafter. Pure Python.

A session at size 0 learns nothing of blocks. So one of these sessions tries one now and then, and what it finds out, of
acceptance and of times, all of them know. Counted are plain rounds of all of them together: 16 sessions come back 16
times sooner than one, for the same share of rounds that are probes.

| then | the next probe comes after so many plain rounds |
|---|---|
| at first | 16 |
| it paid | 0 |
| it did not pay | 200 times what it cost, in plain rounds, and 16 at least: so probes cost half a percent |
"""

from __future__ import annotations

_AFTER = 16
_COST_SHARE = 0.005


class ProbeSchedule:
    """Says when a probe is due.

    Only one session probes at a time: what came of a probe, if it is heard of at all, plans the next one.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = _AFTER

    def take(self) -> bool:
        """A session at size 0 has a round before it.

        Returns:
            It is to probe; the next probe is counted from here until its outcome is known.
        """
        if self._left > 0:
            self._left -= 1
            return False
        self._left = _AFTER
        return True

    def paid(self) -> None:
        """The probe was worth its time."""
        self._left = 0

    def cost(self, plain_rounds: float) -> None:
        """The probe took so many plain rounds more than it brought."""
        self._left = max(_AFTER, int(plain_rounds / _COST_SHARE))
