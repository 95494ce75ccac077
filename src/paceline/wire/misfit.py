"""Which value of a request does not fit into its message, and why.

Looked for only after protobuf has refused to build the message: what fits costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from paceline.errors import InvalidArgument
from paceline.text.request import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from paceline.v1 import common_pb2, gateway_pb2

_RANGES: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}
_MAX_SHOWN_CHARS = 60


def request_misfit(request: GenerationRequest, error: Exception) -> InvalidArgument:
    """The error for a request that no message can hold; names the first field at fault and its limit.

    Args:
        request: what was to be sent.
        error: what protobuf said; passed on where no single field is at fault.
    """
    for message, name, value, field in _parts(request):
        if (misfit := value_misfit(message, name, value, field)) is not None:
            return misfit
    return InvalidArgument(f"the request does not fit into a message: {error}")


def value_misfit(message: type[Message], name: str, value: Any, field: str) -> InvalidArgument | None:
    """What is wrong with one value; None when it fits.

    Args:
        message: the class of the message.
        name: the message's field.
        value: what it was to hold.
        field: its name for the caller.
    """
    try:
        message(**{name: value})
    except UnicodeEncodeError as error:
        return InvalidArgument(f"{field} is not valid Unicode: lone surrogate at character {error.start}", field=field)
    except (TypeError, ValueError) as error:
        reason = _out_of_range(message.DESCRIPTOR.fields_by_name[name].type, value) or f"which cannot be sent: {error}"
        return InvalidArgument(f"{field} is {_shown(value)}{reason}", field=field)
    return None


def _out_of_range(kind: int, value: Any) -> str:
    limits = _RANGES.get(kind)
    number = value[0] if isinstance(value, tuple) else value
    if limits is None or not isinstance(number, int):
        return ""
    low, high = limits
    if number > high:
        return f"; it must be at most {high}"
    return f"; it must be at least {low}" if number < low else ""


def _shown(value: Any) -> str:
    """The value for a message of one line; an element that was tried alone without its brackets."""
    shown = str(value[0] if isinstance(value, tuple) and len(value) == 1 else value)
    return shown if len(shown) <= _MAX_SHOWN_CHARS else shown[:_MAX_SHOWN_CHARS] + "..."


def _parts(request: GenerationRequest) -> Iterator[tuple[type[Message], str, Any, str]]:
    """Every value of a request: message class, its field there, value, and its name for the caller."""
    top = gateway_pb2.GenerateRequest
    match request.prompt:
        case TextPrompt(text):
            yield top, "text", text, "prompt"
        case ChatPrompt(messages):
            for index, turn in enumerate(messages):
                yield gateway_pb2.ChatMessage, "role", turn.role, f"messages[{index}].role"
                yield gateway_pb2.ChatMessage, "content", turn.content, f"messages[{index}].content"
        case TokenPrompt(ids):
            yield from _elements(gateway_pb2.TokenPrompt, "ids", ids, "prompt")
    yield top, "model", request.model, "model"
    for part in fields(request.sampling):
        value = getattr(request.sampling, part.name)
        if part.name == "stop_token_ids":
            yield from _elements(common_pb2.SamplingParams, part.name, value, part.name)
        elif isinstance(value, Mapping):
            for key, item in value.items():
                yield common_pb2.SamplingParams, part.name, {key: item}, part.name
        elif part.name != "seed":
            yield common_pb2.SamplingParams, part.name, value, part.name
    yield common_pb2.SamplingParams, "seed", request.seed, "seed"
    yield top, "max_tokens", request.max_tokens, "max_tokens"
    yield from _elements(top, "stop", request.stop, "stop")
    yield top, "session", request.session, "session"
    for name in ("enabled", "method", "num_speculative_tokens"):
        yield gateway_pb2.SpeculationOptions, name, getattr(request.speculation, name), f"speculation.{name}"


def _elements(
    message: type[Message], name: str, values: Sequence[Any], field: str
) -> Iterator[tuple[type[Message], str, Any, str]]:
    for index, value in enumerate(values):
        yield message, name, (value,), f"{field}[{index}]"
