"""A generation as a door sees it, running or over: read its events, then leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from paceline.errors import Cancelled
from paceline.generation import GenerationEvent
from paceline_gateway.session_actor import SessionActor
from paceline_gateway.sessions import Permit


class Generation:
    """One admitted generation and its permit.

    Every door calls `leave` when its client has been served or has gone; until then the permit is held.

    Args:
        actor: runs it.
        permit: was given for it.
    """

    def __init__(self, actor: SessionActor, permit: Permit) -> None:
        self._actor = actor
        self._permit = permit

    @property
    def session(self) -> str:
        """Name of its session."""
        return self._actor.session

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of its prompt."""
        return self._actor.prompt

    async def next(self) -> GenerationEvent | None:
        """The next event; None at the end.

        Raises:
            PacelineError: the generation has failed.
        """
        return await self._actor.client.next()

    def leave(self) -> None:
        """The client has been served or has left: ends what still runs and gives the permit back. Repeatable."""
        # Once the generation has ended this does nothing.
        self._actor.cancel(Cancelled("the client has left"))
        self._permit.release()


class EndedGeneration:
    """One that has ended before; its client still lacks a part of it. Read and left as a running one.

    Args:
        session: name of its session.
        events: what the client lacks.
        permit: was given for it.
    """

    def __init__(self, session: str, events: Iterable[GenerationEvent], permit: Permit) -> None:
        self.session = session
        self._events = deque(events)
        self._permit = permit

    async def next(self) -> GenerationEvent | None:
        """The next event; None at the end."""
        return self._events.popleft() if self._events else None

    def leave(self) -> None:
        """The client has been served or has left: gives the permit back. Repeatable."""
        self._permit.release()
