"""One connection: uvicorn's, with an end for clients that neither send nor read and do not leave either.

uvicorn's own timer for idle connections stops at the first byte, so a byte now and then would hold one for ever; and
closing one waits until its client has read everything, which may be never.
"""

from __future__ import annotations

import asyncio

from starlette.types import Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

_BREAK_OFF = "break_off"
_LEAST_BYTES = 64 * 1024
"""A client that takes so much of its answer in the time of an idle connection gets that time once more."""


def break_off(scope: Scope) -> None:
    """Ends the connection of a request at once, whatever its client has not read yet."""
    scope["state"][_BREAK_OFF]()


class Connection(H11Protocol):
    """Between two requests it lasts as long as an idle one may, whatever its client does meanwhile.

    That bounds a head that comes slowly, the rest of a body that was refused, and an answer that is not taken.
    """

    _end: asyncio.TimerHandle | None = None
    _unread_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        """A client has come."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, _BREAK_OFF: transport.abort}
        self._set_end()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._unset_end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """It has said something; maybe a request has begun."""
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        """It has been answered; maybe its next request has been waiting."""
        super().on_response_complete()
        self._set_end()
        self._look()

    def _look(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._unset_end()

    def _set_end(self) -> None:
        self._unset_end()
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._end = self.loop.call_later(self.timeout_keep_alive, self._over)

    def _unset_end(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _over(self) -> None:
        if self._unread_bytes - self.transport.get_write_buffer_size() >= _LEAST_BYTES:
            self._set_end()
        else:
            self.transport.abort()
