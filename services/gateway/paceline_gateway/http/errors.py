"""The error tree in OpenAI's shape: one table from status to type, and what becomes of everything else."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Final

from pydantic import BaseModel, ConfigDict
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.runtime.refusals import REQUEST_REFUSED
from paceline_gateway.http.refused import MAX_PATH_CHARS, tell_refused

logger = logging.getLogger(__name__)

CLIENT_LEFT_STATUS = 499
"""Nobody reads it; logs and middleware do."""

_TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_SERVER_ERROR = "server_error"
CODES: Final[Mapping[int, str]] = {404: "not_found", 405: "method_not_allowed"}
"""Codes of errors that come from no `PacelineError`: paths and methods."""
OTHER_CODE = "http_error"
"""Of whatever else the framework may refuse."""

_HTTP_NAMES: Final[Mapping[str, str]] = {"session": "session_id", "chat": "messages"}
"""HTTP's names of fields that the door calls otherwise."""


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    message: str
    """What happened and what to do about it."""
    type: str
    """Kind of error, from the status."""
    param: str | None
    """The request's field at fault, if one is."""
    code: str
    """Stable name of the error."""


class ErrorBody(BaseModel):
    """Body of every answer that is an error."""

    error: ErrorDetail


class ClientLeft(Exception):
    """The client has gone: nobody reads the answer. Not an error of the tree, since nobody is told."""


def error_body(error: Exception) -> ErrorBody:
    """The error as a client sees it; an unexpected one without its text."""
    if not isinstance(error, PacelineError):
        error = PacelineError("internal error; the server's log has the details")
    error = renamed(error, _HTTP_NAMES)
    return _body(error.http_status, error.message, error.code, error.field or None)


def renamed(error: PacelineError, names: Mapping[str, str]) -> PacelineError:
    """The error with another name for the field at fault, in its message too.

    Args:
        error: what went wrong.
        names: for each field that is called otherwise, how.
    """
    name = names.get(error.field)
    if name is None:
        return error
    said = error.message
    message = name + said.removeprefix(error.field) if re.match(rf"{re.escape(error.field)}\b", said) else said
    return type(error)(message, field=name)


def error_response(error: PacelineError) -> Response:
    """The answer to a request that failed before its answer began."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return _response(error_body(error), error.http_status, headers)


def internal_error_response() -> Response:
    """The answer to a request that failed in a way nobody expected."""
    return _response(error_body(RuntimeError()), 500, {})


async def on_paceline_error(request: Request, error: Exception) -> Response:
    """Handler of the whole error tree."""
    if not isinstance(error, PacelineError):
        raise error
    tell_refused(request.scope, error)
    return error_response(error)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Handler of what the framework raises: unknown paths and methods."""
    if not isinstance(error, HTTPException):
        raise error
    status, where = error.status_code, f"{request.method} {request.url.path}"
    what = {404: "there is no such path", 405: "this path has no such method"}.get(status, error.detail)
    code = CODES.get(status, OTHER_CODE)
    told = {"path": request.url.path[:MAX_PATH_CHARS], "status": status, "code": code, "field": "", "reason": what}
    logger.info(REQUEST_REFUSED, extra=told)
    body = _body(status, f"{where}: {what}; /openapi.json has all that there are", code, None)
    return _response(body, status, error.headers or {})


async def on_client_left(_request: Request, _error: Exception) -> Response:
    """Handler of clients that are gone: ends the request for the server."""
    return Response(status_code=CLIENT_LEFT_STATUS)


def _body(status: int, message: str, code: str, param: str | None) -> ErrorBody:
    return ErrorBody(error=ErrorDetail(message=message, type=_TYPES.get(status, _SERVER_ERROR), param=param, code=code))


def _response(body: ErrorBody, status: int, headers: Mapping[str, str]) -> Response:
    return Response(body.model_dump_json(), status, headers, media_type="application/json")
