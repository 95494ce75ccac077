"""Fields that chat and text completions share, as they come: types are checked here, ranges at the door.

The bounds in the JSON schema are the door's, written down for readers of the OpenAPI document; they check nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

from paceline.text.validation import (
    DEFAULT_LIMITS,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MIN_REPETITION_PENALTY,
)
from paceline_gateway.http.unsupported import STREAM_NO_OPS, NoOps, no_op_schema

_INT32_MAX = 2**31 - 1


def request_config(no_ops: NoOps | None = None) -> ConfigDict:
    """How requests are read: JSON types as they are, and no unknown fields.

    Args:
        no_ops: unsupported fields, for the schema.
    """

    def add_no_ops(schema: dict[str, Any]) -> None:
        schema["properties"] = {**schema["properties"], **no_op_schema(no_ops or {})}

    return ConfigDict(
        extra="forbid", strict=True, frozen=True, use_attribute_docstrings=True, json_schema_extra=add_no_ops
    )


class RequestObject(BaseModel):
    """An object of a request."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_the_first_unknown_field(cls, value: Any) -> Any:
        # pydantic itself would make an error of each: of a body of nothing else, gigabytes.
        unknown = next((name for name in value if name not in cls.model_fields), None) if type(value) is dict else None
        if unknown is not None:
            raise PydanticCustomError("unknown_field", "is not a known field; leave it out", {"name": unknown})
        return value


def bounds(**keywords: float) -> Any:
    """A field whose schema names the door's bounds."""
    return Field(default=None, json_schema_extra=dict(keywords))


def read_stop(value: Any) -> tuple[str, ...] | None:
    """The stop strings of a string or an array of strings."""
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(isinstance(text, str) for text in value):
        return tuple(value)
    raise PydanticCustomError("shape", "must be a string or an array of strings")


StopStrings = Annotated[
    tuple[str, ...] | None, PlainValidator(read_stop, json_schema_input_type=str | list[str] | None)
]


TokenIds = Annotated[list[int], Field(fail_fast=True)]
"""Nobody reads a second error, and a million of them take gigabytes."""


def check_number_of_biases(value: Any) -> Any:
    """Refuses an object with too many entries before each of them is read, which may all be wrong."""
    count, limit = len(value) if isinstance(value, dict) else 0, DEFAULT_LIMITS.max_logit_bias_entries
    if count > limit:
        raise PydanticCustomError(
            "shape", "has {count} entries; at most {limit} are allowed", {"count": count, "limit": limit}
        )
    return value


Bias = Annotated[float, Field(json_schema_extra={"minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS})]
Biases = Annotated[dict[str, Bias], BeforeValidator(check_number_of_biases)]


class Speculation(RequestObject):
    """Pins or forbids speculation. An extension."""

    model_config = request_config()

    enabled: bool | None = None
    """false: plain decoding through the same services."""
    method: Annotated[str, Field(json_schema_extra={"pattern": "^[a-z0-9_]{0,64}$"})] | None = None
    """The only method to draft by, such as draft_model or ngram."""
    num_speculative_tokens: int | None = bounds(minimum=0, maximum=DEFAULT_LIMITS.max_speculative_tokens)
    """Draft tokens per round; 0 is plain decoding."""


class MetricsWish(RequestObject):
    """Which measurements to return. An extension."""

    model_config = request_config()

    speculative_decoding: bool | None = None
    """true: what speculation did for each choice."""


class StreamOptions(RequestObject):
    """Options of a stream."""

    model_config = request_config(STREAM_NO_OPS)
    no_ops: ClassVar[NoOps] = STREAM_NO_OPS

    include_usage: bool | None = None
    """true: one more chunk before the end, with the token counts and no choices."""


class GenerationFields(RequestObject):
    """What both endpoints understand. null is the default everywhere."""

    model_config = request_config()
    no_ops: ClassVar[NoOps] = {}

    model: str | None = None
    """Name of a served model; without it the one that is served."""
    n: int | None = bounds(minimum=1)
    """Choices for each prompt."""
    seed: int | None = bounds(minimum=-(2**63), maximum=2**63 - 1)
    """Makes sampling repeatable: the same request gives the same tokens. Without it one is drawn."""
    stop: StopStrings = None
    """Strings that end the generation; they are not part of the text."""
    stop_token_ids: TokenIds | None = None
    """Tokens that end the generation."""
    ignore_eos: bool | None = None
    """true: go on after the model's end-of-sequence token."""
    temperature: float | None = bounds(minimum=0, maximum=MAX_TEMPERATURE)
    """0 is greedy; 1 by default."""
    top_p: float | None = bounds(exclusiveMinimum=0, maximum=1)
    """Keep the best tokens up to this share of the probability."""
    top_k: int | None = bounds(minimum=-1, maximum=_INT32_MAX)
    """Keep this many best tokens; -1 and 0 keep all."""
    min_p: float | None = bounds(minimum=0, maximum=1)
    """Keep tokens with at least this share of the best one's probability."""
    presence_penalty: float | None = bounds(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    """Taken off the logit of every token that was generated before."""
    frequency_penalty: float | None = bounds(minimum=-MAX_PENALTY, maximum=MAX_PENALTY)
    """Taken off for each time that it was."""
    repetition_penalty: float | None = bounds(minimum=MIN_REPETITION_PENALTY, maximum=MAX_REPETITION_PENALTY)
    """Divides the logit of every token that came before, the prompt included; 1 by default."""
    logit_bias: Biases | None = None
    """Added to the logits of tokens, by token id."""
    min_tokens: int | None = bounds(minimum=0, maximum=_INT32_MAX)
    """No end before so many tokens."""
    max_tokens: int | None = bounds(minimum=1, maximum=_INT32_MAX)
    """Most tokens of each choice; by default what the model's context leaves."""
    max_completion_tokens: int | None = bounds(minimum=1, maximum=_INT32_MAX)
    """The newer name of `max_tokens`; where both are given they must be equal."""
    stream: bool | None = None
    """true: send tokens as they come, as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with `stream`."""
    user: str | None = None
    """Name of the end user; written to the log."""
    acceptance_rule: Literal["match", "ratio"] | None = None
    """How draft tokens are judged: match, the default, gives the tokens of plain decoding, ratio its distribution.

    An extension."""
    speculation: Speculation | None = None
    """How to speculate; by default as the gateway is set. An extension."""
    session_id: Annotated[str, Field(json_schema_extra={"pattern": "^[A-Za-z0-9_.-]{1,128}$"})] | None = None
    """Name of the session, which must not be running; only with one choice. An extension."""
    return_token_ids: bool | None = None
    """true: token ids of prompt and choices too. An extension."""
    metrics: MetricsWish | None = None
    """Measurements to return. An extension."""
