"""From the bytes of a body to a request model: read within a limit, strictly JSON, no unknown fields."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect, Request

from paceline.errors import InvalidArgument, PayloadTooLarge
from paceline.text.validation import DEFAULT_LIMITS
from paceline_gateway.http.connection import break_off
from paceline_gateway.http.errors import ClientLeft
from paceline_gateway.http.front import FrontLimits
from paceline_gateway.http.misfit import body_misfit
from paceline_gateway.http.request_fields import GenerationFields, StreamOptions
from paceline_gateway.http.requests import Message
from paceline_gateway.http.unsupported import without_no_ops

_INLINE_BYTES = 64 * 1024
"""Larger bodies are parsed in a thread."""

_MAX_PATH_CHARS = 200

RequestT = TypeVar("RequestT", bound=GenerationFields)


async def read_request(request: Request, model: type[RequestT], limits: FrontLimits) -> RequestT:
    """Reads and checks a request's body.

    Args:
        request: its body not read yet.
        model: what it must be.
        limits: its largest size, and how long no part of it may come.

    Raises:
        PayloadTooLarge: it is larger.
        InvalidArgument: it is no such request; names the field.
        ClientLeft: the client left while it was sending, or stopped sending and was cut off.
    """
    _check_type(request)
    content = await _read(request, limits)
    if len(content) <= _INLINE_BYTES:
        return parse(content, model)
    return await asyncio.to_thread(_parse_large, content, model)


def _check_type(request: Request) -> None:
    """A page of another site can post text, forms and untyped bytes here without asking, so these are not taken."""
    unstated = "" if "origin" in request.headers else "application/json"
    kind = request.headers.get("content-type", unstated).partition(";")[0].strip().lower()
    if kind != "application/json":
        stated = repr(kind) if kind else "of no type"
        raise InvalidArgument(f"the body is {stated}; send Content-Type: application/json")


async def _read(request: Request, limits: FrontLimits) -> bytes:
    stated, max_bytes = request.headers.get("content-length", ""), limits.max_body_bytes
    if stated.isdecimal() and int(stated[:19]) > max_bytes:
        raise _too_large(max_bytes)
    content, parts = bytearray(), request.stream()
    try:
        while (part := await _next(parts, limits.stall_s)) is not None:
            content += part
            if len(content) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientLeft from None
    except TimeoutError:
        break_off(request.scope)
        raise ClientLeft from None
    return bytes(content)


async def _next(parts: AsyncIterator[bytes], stall_s: float) -> bytes | None:
    async with asyncio.timeout(stall_s):
        return await anext(parts, None)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes, which is all that is accepted here")


def _parse_large(content: bytes, model: type[RequestT]) -> RequestT:
    """Parses without collecting garbage: going through millions of new objects again and again stops all threads."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return parse(content, model)
    finally:
        if collecting:
            gc.enable()


def parse(content: bytes, model: type[RequestT]) -> RequestT:
    """The request that a body is.

    Raises:
        InvalidArgument: it is not JSON, no object, or has a field that is wrong, unknown or not supported.
    """
    try:
        # Refuses NaN, lone surrogates and deep nesting by itself.
        fields = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise body_misfit(content) or InvalidArgument(f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidArgument("the body must be a JSON object")
    try:
        return model.model_validate(_supported(fields, model))
    except ValidationError as error:
        raise _named(error.errors(include_url=False, include_input=False)[0]) from None


def _supported(fields: Mapping[str, Any], model: type[GenerationFields]) -> dict[str, Any]:
    """The fields less those that ask for nothing, in inner objects too."""
    supported = without_no_ops(fields, model.no_ops)
    options, messages = supported.get("stream_options"), supported.get("messages")
    if isinstance(options, dict):
        supported["stream_options"] = without_no_ops(options, StreamOptions.no_ops, "stream_options.")
    if isinstance(messages, list):
        if len(messages) > DEFAULT_LIMITS.max_messages:
            # The door says the same, after each of them was read.
            raise InvalidArgument(
                f"messages has {len(messages)} entries; at most {DEFAULT_LIMITS.max_messages} are allowed",
                field="messages",
            )
        supported["messages"] = [
            without_no_ops(message, Message.no_ops, f"messages[{index}].") if isinstance(message, dict) else message
            for index, message in enumerate(messages)
        ]
    return supported


def _named(problem: ErrorDetails) -> InvalidArgument:
    parts = [*problem["loc"]]
    match problem["type"]:
        case "missing":
            said = "is required"
        case "unknown_field":
            said = problem["msg"]
            parts.append(problem["ctx"]["name"])
        case "shape":
            said = problem["msg"]
        case "model_type":
            said = "must be an object"
        case _:
            said = problem["msg"].replace("Input should be", "must be")
    # A client's own names may be of any length and hold anything.
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts).lstrip(".")[:_MAX_PATH_CHARS]
    return InvalidArgument(f"{path} {said}", field=path)
