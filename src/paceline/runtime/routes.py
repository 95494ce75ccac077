"""Which stream answers for a session, and how long a session outlives its stream.

The newest stream that spoke for a session gets its answers. When that stream ends the session is an orphan: it is
closed `orphan_ttl_s` later unless another stream speaks for it before. A stream is finished when its end was told, so
that no answer to an earlier command of it is still due, and its last session is gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.runtime.connect import EventStream

EventT = TypeVar("EventT")


class SessionRoutes(Generic[EventT]):
    """Routes of all sessions of a replica; a part of its actor's state.

    Args:
        orphan_ttl_s: how long an orphan waits for a stream.
        clock: monotonic seconds.
    """

    def __init__(self, orphan_ttl_s: float, clock: Callable[[], float]) -> None:
        self._orphan_ttl_s = orphan_ttl_s
        self._clock = clock
        self._stream_of: dict[str, EventStream[EventT]] = {}
        self._sessions_of: dict[EventStream[EventT], set[str]] = {}
        self._orphans: dict[str, float] = {}
        self._ended: set[EventStream[EventT]] = set()  # no command comes over them, but sessions still answer there

    def __len__(self) -> int:
        return len(self._stream_of)

    @property
    def num_orphans(self) -> int:
        """Sessions without a stream that could speak for them."""
        return len(self._orphans)

    def attach(self, session: str, stream: EventStream[EventT]) -> None:
        """The stream spoke for the session: its answers go there from now on."""
        if self._stream_of.get(session) is not stream:
            self.detach(session)
            self._stream_of[session] = stream
            self._sessions_of.setdefault(stream, set()).add(session)
        self._orphans.pop(session, None)

    def detach(self, session: str) -> None:
        """The session is gone. A stream whose end was told is finished with its last session."""
        stream = self._stream_of.pop(session, None)
        self._orphans.pop(session, None)
        if stream is None:
            return
        sessions = self._sessions_of[stream]
        sessions.discard(session)
        if not sessions:
            del self._sessions_of[stream]
            if stream in self._ended:
                self._ended.discard(stream)
                stream.finish()

    def stream_of(self, session: str) -> EventStream[EventT] | None:
        """Where the session's answers go."""
        return self._stream_of.get(session)

    def stream_ended(self, stream: EventStream[EventT]) -> None:
        """All commands of the stream have been applied: its sessions are orphans; without any it is finished."""
        sessions = self._sessions_of.get(stream)
        if not sessions:
            stream.finish()
            return
        self._ended.add(stream)
        deadline = self._clock() + self._orphan_ttl_s
        for session in sessions:
            self._orphans.setdefault(session, deadline)

    def expired(self) -> list[str]:
        """Orphans whose time is over."""
        now = self._clock()
        return [session for session, deadline in self._orphans.items() if deadline <= now]

    def next_deadline_s(self) -> float | None:
        """When the next orphan's time is over, on the clock given; None without orphans."""
        return min(self._orphans.values(), default=None)
