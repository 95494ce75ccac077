"""The two requests: what chat and text completions have on top of the shared fields."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from paceline.text.request import Prompt, TextPrompt, TokenPrompt
from paceline.text.validation import MAX_TOP_LOGPROBS, ROLES
from paceline_gateway.http.request_fields import GenerationFields, RequestObject, bounds, request_config
from paceline_gateway.http.unsupported import CHAT_NO_OPS, COMPLETION_NO_OPS, MESSAGE_NO_OPS, NoOps

PART_SEPARATOR = "\n"
"""Between the text parts of one message."""
_OTHER_ROLES = {"developer": "system"}
"""OpenAI's newer name of a role that chat templates know by the older one."""
_SHOWN_CHARS = 128
"""Of a kind of part that a client made up."""
_MAX_PROMPTS = 4096
"""More are refused before each is looked at. `max_choices` is the bound that matters, and far lower."""


class TextPart(RequestObject):
    """A part of a message."""

    model_config = request_config()

    type: Literal["text"]
    text: str


def read_content(value: Any) -> str:
    """The text of a message: a string, or the text of its parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("shape", "must be a string or an array of text parts")
    return PART_SEPARATOR.join([_read_part(index, part) for index, part in enumerate(value)])


def _read_part(index: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        said = "has a part [{index}] of type {kind}, which is not supported yet"
        raise PydanticCustomError("shape", said, {"index": index, "kind": repr(kind[:_SHOWN_CHARS])})
    if kind is None or part.keys() != {"type", "text"} or not isinstance(part["text"], str):
        raise PydanticCustomError(
            "shape", 'has a part [{index}] that is not {{"type": "text", "text": "..."}}', {"index": index}
        )
    text: str = part["text"]
    return text


def read_role(role: str) -> str:
    """The role as chat templates know it. The door says which there are."""
    return _OTHER_ROLES.get(role, role)


Content = Annotated[str, PlainValidator(read_content, json_schema_input_type=str | list[TextPart])]


class Message(RequestObject):
    """A turn of the conversation."""

    model_config = request_config(MESSAGE_NO_OPS)
    no_ops: ClassVar[NoOps] = MESSAGE_NO_OPS

    role: Annotated[str, AfterValidator(read_role), Field(json_schema_extra={"enum": [*ROLES, *_OTHER_ROLES]})]
    """Who speaks; developer is another name of system."""
    content: Content
    """What is said; text parts are joined by newlines."""


class ChatCompletionRequest(GenerationFields):
    """Body of POST /v1/chat/completions."""

    model_config = request_config(CHAT_NO_OPS)
    no_ops: ClassVar[NoOps] = CHAT_NO_OPS

    messages: Annotated[list[Message], Field(json_schema_extra={"minItems": 1})]
    """The conversation so far, rendered by the model's chat template."""
    logprobs: bool | None = None
    """true: the log-probability of each token."""
    top_logprobs: int | None = bounds(minimum=0, maximum=MAX_TOP_LOGPROBS)
    """How many alternatives to each token; only with `logprobs`."""


def read_prompts(value: Any) -> tuple[Prompt, ...]:
    """The prompts of a string, an array of strings, an array of token ids or an array of such arrays."""
    if isinstance(value, str):
        return (TextPrompt(value),)
    if isinstance(value, list):
        kinds = set(map(type, value))
        if kinds & {str, list} and len(value) > _MAX_PROMPTS:
            raise PydanticCustomError(
                "shape",
                "must have at most {limit} entries, and has {count}",
                {"limit": _MAX_PROMPTS, "count": len(value)},
            )
        if kinds == {str}:
            return tuple([TextPrompt(text) for text in value])
        if kinds == {int}:
            return (TokenPrompt(tuple(value)),)
        if not kinds:
            return (TokenPrompt(()),)
        if kinds == {list} and all(set(map(type, ids)) <= {int} for ids in value):
            return tuple([TokenPrompt(tuple(ids)) for ids in value])
    raise PydanticCustomError(
        "shape", "must be a string, an array of strings, an array of token ids or an array of arrays of token ids"
    )


Prompts = Annotated[
    tuple[Prompt, ...],
    PlainValidator(read_prompts, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]


class CompletionRequest(GenerationFields):
    """Body of POST /v1/completions."""

    model_config = request_config(COMPLETION_NO_OPS)
    no_ops: ClassVar[NoOps] = COMPLETION_NO_OPS

    prompt: Prompts
    """What to continue: a text, several texts, token ids, or several arrays of token ids."""
    logprobs: int | None = bounds(minimum=0, maximum=MAX_TOP_LOGPROBS)
    """The log-probability of each token, and of so many alternatives."""
