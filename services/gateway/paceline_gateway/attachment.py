"""Which replica serves one lane of a session, and what to do while none does. Pure; times are handed in.

* SEEKING: the pool was asked; it answers when a replica is ready
* LIVE: commands can be sent
* LOST: the link is broken; the replica keeps the session for a while, so wait for it before moving
* ENDED: the lane is not used, or no more
"""

from __future__ import annotations

from enum import Enum

from paceline_gateway.effects import Effect, Find, Lane, Leave, Replica


class AttachmentState(Enum):
    """Where a lane stands."""

    SEEKING = "seeking"
    LIVE = "live"
    LOST = "lost"
    ENDED = "ended"


class Attachment:
    """One lane's replica.

    Args:
        lane: which lane.
        return_window_s: how long to wait for a lost replica before looking for another.
        effects: where to put what the actor has to do.
    """

    def __init__(self, lane: Lane, return_window_s: float, effects: list[Effect]) -> None:
        self._lane = lane
        self._return_window_s = return_window_s
        self._effects = effects
        self._lost_at = 0.0
        self.state = AttachmentState.ENDED
        self.replica: Replica | None = None
        self.without_since: float | None = None
        """When the lane last lost its replica or began to seek; None while live."""

    @property
    def live(self) -> bool:
        """Whether commands can be sent."""
        return self.state is AttachmentState.LIVE

    @property
    def address(self) -> str:
        """Of the replica in use or used last; empty before the first."""
        return self.replica.address if self.replica else ""

    @property
    def deadline(self) -> float | None:
        """When `tick` has something to do."""
        return self._lost_at + self._return_window_s if self.state is AttachmentState.LOST else None

    def seek(self, now: float, avoid: str = "", silent: bool = False) -> None:
        """Asks for a replica; leaves the present one, perhaps because it was silent for too long."""
        if self.state in (AttachmentState.LIVE, AttachmentState.LOST):
            self._effects.append(Leave(self._lane, silent))
        if self.without_since is None:
            self.without_since = now
        self.state = AttachmentState.SEEKING
        self._effects.append(Find(self._lane, avoid))

    def found(self, replica: Replica) -> None:
        """The pool has one."""
        self.state = AttachmentState.LIVE
        self.replica = replica
        self.without_since = None

    def lost(self, now: float, gone: bool = False) -> None:
        """The link is broken; a replica that is gone is not waited for."""
        if self.state is AttachmentState.LIVE:
            self.state = AttachmentState.LOST
            self._lost_at = now
            self.without_since = now
        if gone and self.state is AttachmentState.LOST:
            self.seek(now, avoid=self.address)

    def back(self) -> bool:
        """The link works again; says whether that was waited for."""
        if self.state is not AttachmentState.LOST:
            return False
        self.state = AttachmentState.LIVE
        self.without_since = None
        return True

    def tick(self, now: float) -> None:
        """Gives a lost replica up when its time is over."""
        if self.deadline is not None and now >= self.deadline:
            self.seek(now, avoid=self.address)

    def end(self, silent: bool = False) -> None:
        """The lane is not needed any more, perhaps because its replica was silent for too long."""
        if self.state is not AttachmentState.ENDED:
            self._effects.append(Leave(self._lane, silent))
        self.state = AttachmentState.ENDED
