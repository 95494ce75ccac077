"""What a replica owes: which sessions wait for an answer, and since when. Times are handed in, monotonic seconds.

So a replica that says nothing to anybody can be told from an idle one, and one silence from another.

| answer | settles |
|---|---|
| `Verified`, `Drafted`, `Closed` | its command, and older ones of the session, which it came after |
| `NeedTokens`, `Evicted`, `Failed` | its command: a follow-up may be refused while the round before it is judged |
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.messages import Closed, Drafted, Evicted, Failed, NeedTokens, Open, Verified, command_id_of
from paceline_gateway.commands import ReplicaCommand

Answer = Verified | Drafted | NeedTokens | Evicted | Closed | Failed


_CLOSE = 1 << 63
"""A `Close` comes after every round."""

_Asked = tuple[int, int]
"""Epoch of a command, and its round or draft id."""


@dataclass(frozen=True, slots=True)
class _Owed:
    """The answers that a session waits for, and since when."""

    asked: frozenset[_Asked]
    since: float


class OwedAnswers:
    """Those of one replica. Used on the event loop, `silent_s` by any thread."""

    def __init__(self) -> None:
        self._owed: dict[str, _Owed] = {}  # those that wait longest first
        self._heard_at = 0.0
        self._silence_told_at = 0.0
        self._none = asyncio.Event()
        self._none.set()

    async def wait_none(self) -> None:
        """Returns when nothing is owed."""
        await self._none.wait()

    def silent_s(self, now: float) -> float:
        """How long the replica has said nothing although an answer is owed, in seconds; 0 while none is."""
        try:
            oldest = next(iter(self._owed.values()), None)
        except RuntimeError:  # the thread of the metrics asks too, and the event loop has just changed the dict
            return 0.0
        return 0.0 if oldest is None else now - max(oldest.since, self._heard_at)

    def is_another_silence(self, session: str, now: float) -> bool:
        """Whether a session that has waited for too long tells of a silence that nobody has told of yet.

        Sessions that wait behind one long pass all do so, one after the other: it is one silence.
        """
        owed = self._owed.get(session)
        began_at = self._heard_at if owed is None else owed.since
        if began_at < self._silence_told_at:
            return False
        self._silence_told_at = now
        return True

    def sent(self, command: ReplicaCommand, now: float) -> None:
        """A command was sent. An `Open` alone is answered at once or not at all, with what follows it."""
        if isinstance(command, Open):
            return
        asked = command.epoch, command_id_of(command) or _CLOSE
        before = self._owed.get(command.session)
        if before is None:
            self._owed[command.session] = _Owed(frozenset((asked,)), now)
        else:
            self._owed[command.session] = _Owed(before.asked | {asked}, before.since)
        self._none.clear()

    def heard(self, now: float) -> None:
        """The replica has said something, to whomever."""
        self._heard_at = now

    def answered(self, answer: Answer, now: float) -> None:
        """The replica has answered a session, which may wait for another answer still."""
        owed = self._owed.get(answer.session)
        if owed is None:
            return
        answered = answer.epoch, _command_id(answer) or _CLOSE
        settles_older = isinstance(answer, Verified | Drafted | Closed)
        left = frozenset(
            [asked for asked in owed.asked if asked > answered or (asked < answered and not settles_older)]
        )
        if left == owed.asked:
            return
        del self._owed[answer.session]
        if left:
            self._owed[answer.session] = _Owed(left, now)
        if not self._owed:
            self._none.set()

    def clear(self) -> None:
        """The stream is broken: what was owed is asked anew or forgotten."""
        self._owed.clear()
        self._none.set()


def _command_id(answer: Answer) -> int:
    match answer:
        case Verified():
            return answer.round
        case Drafted():
            return answer.draft_id
        case Closed():
            return 0
        case _:
            return answer.command_id
