"""What a replica owes: which sessions wait for an answer, and since when. Times are handed in, monotonic seconds.

So a replica that says nothing to anybody can be told from an idle one, and one silence from another.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from paceline.messages import Closed, Drafted, Evicted, Failed, NeedTokens, Open, Verified, command_id_of
from paceline_gateway.commands import ReplicaCommand

Answer = Verified | Drafted | NeedTokens | Evicted | Closed | Failed


@dataclass(frozen=True, slots=True)
class _Owed:
    """The answer to a session's newest command: its round or draft id, 0 of a `Close`, and since when it waits."""

    command_id: int
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
        before = self._owed.get(command.session)
        self._owed[command.session] = _Owed(command_id_of(command), now if before is None else before.since)
        self._none.clear()

    def heard(self, now: float) -> None:
        """The replica has said something, to whomever."""
        self._heard_at = now

    def answered(self, answer: Answer, now: float) -> None:
        """The replica has answered a session. Where it has asked for two drafts the second one is still owed then."""
        owed = self._owed.pop(answer.session, None)
        if owed is not None and _command_id(answer) < owed.command_id:
            self._owed[answer.session] = _Owed(owed.command_id, now)
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
