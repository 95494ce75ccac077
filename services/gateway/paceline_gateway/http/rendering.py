"""How the choices of a request become an answer: what the two endpoints have in common."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import paceline
from paceline.generation import Chunk, Finished, Started
from paceline_gateway.http.choices import Choice, Outcome
from paceline_gateway.http.request_fields import GenerationFields
from paceline_gateway.http.responses import ResponseModel, Usage
from paceline_gateway.http.speculation_metrics import choice_metrics


@dataclass(frozen=True, slots=True)
class Wishes:
    """What an answer shall hold.

    Attributes:
        logprobs: log-probabilities.
        token_ids: ids of prompt and choices.
        metrics: what speculation did.
        stream_usage: token counts at the end of a stream.
    """

    logprobs: bool
    token_ids: bool
    metrics: bool
    stream_usage: bool


def wishes_of(fields: GenerationFields, *, logprobs: bool) -> Wishes:
    """What a request wants to get."""
    options, metrics = fields.stream_options, fields.metrics
    return Wishes(
        logprobs=logprobs,
        token_ids=bool(fields.return_token_ids),
        metrics=metrics is not None and bool(metrics.speculative_decoding),
        stream_usage=options is not None and bool(options.include_usage),
    )


@dataclass(frozen=True, slots=True)
class Head:
    """What every answer and every chunk begins with.

    Attributes:
        id: name of the answer.
        created: Unix time in seconds.
        model: name of the model.
        fingerprint: of model and version.
    """

    id: str
    created: int
    model: str
    fingerprint: str


def head_of(request_id: str, prefix: str, model: str) -> Head:
    """The head of a request's answer."""
    digest = hashlib.sha256(f"{model}\0{paceline.__version__}".encode()).hexdigest()
    return Head(f"{prefix}-{request_id}", int(time.time()), model, f"fp_{digest[:12]}")


class Renderer(Protocol):
    """Turns the events of choices into the models of one endpoint."""

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> ResponseModel:
        """The answer without a stream."""

    def opening(self, choice: Choice) -> ResponseModel | None:
        """The first chunk of a choice, before any token; None for no such chunk."""

    def part(self, choice: Choice, chunk: Chunk) -> ResponseModel | None:
        """Some tokens; None where there is nothing to see."""

    def ending(self, choice: Choice, started: Started, finished: Finished) -> ResponseModel:
        """The last chunk of a choice."""

    def counts(self, usage: Usage) -> ResponseModel:
        """The last chunk of a stream, with the counts."""


def usage_of(choices: Sequence[Choice], choices_per_prompt: int, finished: Sequence[Finished]) -> Usage:
    """Token counts of a request; each prompt counts once."""
    prompt_tokens = sum(len(choice.generation.prompt) for choice in choices[::choices_per_prompt])
    completion_tokens = sum(end.completion_tokens for end in finished)
    return Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )


def ending_fields(started: Started, finished: Finished, wishes: Wishes) -> dict[str, Any]:
    """Fields of a choice where it ends."""
    fields: dict[str, Any] = {"finish_reason": finished.finish_reason.value, "promise": started.promise.value}
    if wishes.metrics:
        fields["metrics"] = choice_metrics(started, finished)
    return fields
