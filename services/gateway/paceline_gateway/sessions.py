"""The sessions of this gateway: admission at the door, and the end of all when the gateway ends.

A permit is held for a stream's life. There is no queue in front of it: what does not fit is refused at once, with the
numbers, so that a client can go elsewhere.
"""

from __future__ import annotations

import asyncio
import logging

from paceline.errors import CapacityExceeded, Fenced, Unavailable
from paceline.runtime.supervisor import OnError, Supervisor
from paceline.session.store import busy_session, unknown_session
from paceline_gateway.session_actor import SessionActor

logger = logging.getLogger(__name__)

_RECORD_WAIT_S = 2.0
"""For a generation to complete its record before the next one of its name is refused."""


class Permit:
    """The right to run one generation; give it back with `release`, once or more often."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions: Sessions | None = sessions

    def release(self) -> None:
        """Gives it back."""
        sessions, self._sessions = self._sessions, None
        if sessions is not None:
            sessions.give_back()


class Sessions:
    """All running generations.

    Args:
        max_generations: how many may run at once.
    """

    def __init__(self, max_generations: int) -> None:
        self._max_generations = max_generations
        self._num_permits = 0
        self._actors: dict[str, SessionActor] = {}
        self._supervisor: Supervisor | None = None
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._one_ended = asyncio.Event()

    @property
    def num_running(self) -> int:
        """Permits that are held: generations whose client is still served."""
        return self._num_permits

    @property
    def draining(self) -> bool:
        """Whether nobody is admitted any more."""
        return self._draining

    @property
    def actors(self) -> tuple[SessionActor, ...]:
        """Session actors, those included that only complete a record."""
        return tuple(self._actors.values())

    def start(self, supervisor: Supervisor) -> None:
        """Actors run under this supervisor."""
        self._supervisor = supervisor

    def admit(self) -> Permit:
        """A permit for one generation.

        Raises:
            CapacityExceeded: as many as may run are running.
            Unavailable: the gateway is starting or shutting down.
        """
        if self._draining or self._supervisor is None:
            raise Unavailable("this gateway takes no new generations now; use another one")
        if self._num_permits >= self._max_generations:
            raise CapacityExceeded(
                f"{self._num_permits} of {self._max_generations} generations are running; try again later"
            )
        self._num_permits += 1
        self._idle.clear()
        return Permit(self)

    def give_back(self) -> None:
        """Called by a permit."""
        self._num_permits -= 1
        if not self._num_permits:
            self._idle.set()

    def run(self, actor: SessionActor) -> None:
        """Starts an actor.

        Raises:
            NotFound: the session is another tenant's.
            SessionBusy: a generation of that name is running here.
        """
        if self._supervisor is None:
            raise Unavailable("this gateway is shutting down; use another one")
        name = actor.session
        self._check_free(name, actor.tenant)
        self._actors[name] = actor
        self._supervisor.spawn(
            f"session {name}", actor.run, on_error=OnError.LOG, on_end=lambda _error: self._ended(name)
        )

    async def wait_free(self, session: str, tenant: str) -> None:
        """Returns when no generation of that name runs here.

        A generation whose client has been served is waited for: it completes its record, which takes a moment.

        Raises:
            NotFound: the session is another tenant's.
            SessionBusy: a generation of that name is running, or cannot complete its record.
        """
        await self.wait_recorded(session, tenant)
        self._check_free(session, tenant)

    async def wait_recorded(self, session: str, tenant: str) -> None:
        """Gives a generation of that name that has served its client a moment to complete its record."""
        try:
            async with asyncio.timeout(_RECORD_WAIT_S):
                while (actor := self._actors.get(session)) is not None and actor.tenant == tenant and actor.served:
                    await self._wait_for_an_end()
        except TimeoutError:
            pass

    async def replace(self, actor: SessionActor) -> None:
        """Starts an actor in place of the one of that name that runs here under an older epoch, if there is one.

        Raises:
            NotFound: the session is another tenant's.
            Fenced: the one here is newer.
        """
        name = actor.session
        while (there := self._actors.get(name)) is not None:
            if there.tenant != actor.tenant:
                raise unknown_session(name)
            taken = Fenced(f"session {name!r} was resumed by a later call, which goes on with it", field="session")
            if there.epoch >= actor.epoch:
                raise taken
            there.cancel(taken)
            await self._wait_for_an_end()
        self.run(actor)

    async def _wait_for_an_end(self) -> None:
        self._one_ended.clear()
        await self._one_ended.wait()

    def _check_free(self, session: str, tenant: str) -> None:
        actor = self._actors.get(session)
        if actor is None:
            return
        if actor.tenant != tenant:
            raise unknown_session(session)
        raise busy_session(session)

    def _ended(self, name: str) -> None:
        self._actors.pop(name, None)
        self._one_ended.set()

    async def drain(self) -> None:
        """Admits nobody and returns when the last client has been served."""
        self._draining = True
        if self._num_permits:
            logger.info("draining", extra={"running": self._num_permits})
        await self._idle.wait()

    async def stop(self, grace_s: float) -> None:
        """Ends every generation that still runs with an error, and gives their records a moment."""
        self._draining = True
        for actor in list(self._actors.values()):
            actor.cancel(Unavailable("the gateway is shutting down; resume the session on another one"))
        try:
            async with asyncio.timeout(grace_s):
                while self._actors:
                    await self._wait_for_an_end()
        except TimeoutError:
            logger.warning("%d records could not be completed", len(self._actors))
