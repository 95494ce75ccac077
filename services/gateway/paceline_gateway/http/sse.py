"""Server-sent events: an answer that is sent as it comes, to a client that may be slow, leave, or see it fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.errors import PacelineError
from paceline_gateway.http.connection import break_off
from paceline_gateway.http.errors import ClientLeft, error_body
from paceline_gateway.http.leaving import unless_left
from paceline_gateway.http.refused import tell_refused
from paceline_gateway.http.responses import ResponseModel

logger = logging.getLogger(__name__)

MEDIA_TYPE = "text/event-stream"
DONE = b"data: [DONE]\n\n"

Write = Callable[[bytes], Awaitable[None]]
"""Sends some events and returns when the connection has taken them."""

# Some clients take these for the end of a line; in JSON they may be spelt out.
_LINE_ENDS = (("\u0085", "\\u0085"), ("\u2028", "\\u2028"), ("\u2029", "\\u2029"))


def event(model: ResponseModel) -> bytes:
    """One event."""
    return _data(model.to_json())


def _data(text: str) -> bytes:
    if not text.isascii():
        for character, spelt in _LINE_ENDS:
            text = text.replace(character, spelt)
    return b"data: " + text.encode() + b"\n\n"


def _error_event(error: Exception) -> bytes:
    body: BaseModel = error_body(error)
    return _data(body.model_dump_json())


class EventStream(Response):
    """An answer of events.

    The status line goes out with the first event: what fails before is an ordinary error. What fails later is an error
    event without [DONE] after it, so that no client takes the answer for whole.

    Args:
        produce: sends the events; cancelled at once when the client leaves.
        stall_s: a client that takes nothing for so long is cut off.
    """

    media_type = MEDIA_TYPE

    def __init__(self, produce: Callable[[Write], Awaitable[None]], stall_s: float) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce = produce
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        lock, started = asyncio.Lock(), False

        async def write(events: bytes) -> None:
            nonlocal started
            async with lock:
                try:
                    async with asyncio.timeout(self._stall_s):
                        if not started:
                            started = True
                            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                        await send({"type": "http.response.body", "body": events, "more_body": True})
                except TimeoutError:
                    raise ClientLeft from None  # it may be there; it does not read

        async def produce() -> None:
            await self._produce(write)

        try:
            await unless_left(receive, produce())
            ending = DONE
        except ClientLeft:
            await _left(scope, receive)
            return
        except Exception as error:
            if not started:
                raise
            if isinstance(error, PacelineError):
                tell_refused(scope, error)
            else:
                logger.exception("unexpected error")
            ending = _error_event(error)
        try:
            async with asyncio.timeout(self._stall_s):
                await send({"type": "http.response.body", "body": ending, "more_body": False})
        except TimeoutError:
            await _left(scope, receive)


async def _left(scope: Scope, receive: Receive) -> None:
    """Ends the connection of a client that has left, or that is there and does not read."""
    logger.info("a client has left or reads nothing")
    break_off(scope)
    await receive()  # the server has seen it
