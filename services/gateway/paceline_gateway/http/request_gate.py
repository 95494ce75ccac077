"""The outermost layer: every request has a name, and no exception leaves without an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.runtime.logs import bind_log_context
from paceline_gateway.caller import REQUEST_ID_HEADER, request_id_of
from paceline_gateway.http.errors import internal_error_response

logger = logging.getLogger(__name__)

_HEADER = REQUEST_ID_HEADER.encode()
_CLOSE = (b"connection", b"close")


class RequestGate:
    """Names each request, by its client's X-Request-Id or a drawn one, in `scope["state"]["request_id"]`.

    Args:
        app: what is behind it.
        draining: whether clients shall go elsewhere: their connections end with the answer, so that the next request
            finds another gateway.
    """

    def __init__(self, app: ASGIApp, draining: Callable[[], bool]) -> None:
        self._app = app
        self._draining = draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Names the request and passes it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = next((value for name, value in scope["headers"] if name == _HEADER), b"")
        request_id = request_id_of(sent.decode("latin-1"))
        bind_log_context(request_id=request_id)
        scope.setdefault("state", {})["request_id"] = request_id
        started = False

        async def send_named(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                ends = self._draining() or _framed_twice(scope)
                more = [(_HEADER, request_id.encode())] + ([_CLOSE] if ends else [])
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            logger.exception("unexpected error", extra={"path": scope["path"]})
            if started:
                raise  # the connection is closed, so that the answer does not look whole
            await internal_error_response()(scope, receive, send_named)


def _framed_twice(scope: Scope) -> bool:
    """Whether a proxy may take another place for the request's end: what comes after it is not looked at (RFC 9112)."""
    return {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}
