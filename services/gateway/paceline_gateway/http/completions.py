"""POST /v1/completions: its request as the door takes it, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.generation import Chunk, Finished, Started
from paceline.text.tokenizer import Tokenizer
from paceline_gateway.http.choices import Ask, Choice, Outcome
from paceline_gateway.http.logprobs import completion_logprobs
from paceline_gateway.http.rendering import Head, Wishes, ending_fields
from paceline_gateway.http.requests import CompletionRequest
from paceline_gateway.http.responses import Completion, CompletionChoice, CompletionLogprobs, Usage
from paceline_gateway.http.translate import generation_request


def completion_ask(fields: CompletionRequest) -> Ask:
    """What is asked for.

    Raises:
        InvalidArgument: fields contradict each other.
    """
    request = generation_request(fields, fields.prompt[0], fields.logprobs)
    return Ask(fields.prompt, 1 if fields.n is None else fields.n, request, {"top_logprobs": "logprobs"})


class CompletionRenderer:
    """Answers of the endpoint, whole and in chunks.

    Args:
        head: what each begins with.
        wishes: what they shall hold.
        tokenizer: for the text of single tokens.
    """

    def __init__(self, head: Head, wishes: Wishes, tokenizer: Tokenizer) -> None:
        self._head = head
        self._wishes = wishes
        self._tokenizer = tokenizer
        self._text_offsets: dict[int, int] = {}
        self._opened: set[int] = set()

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> Completion:
        """The answer without a stream."""
        return self._completion([self._choice(outcome) for outcome in outcomes], usage=usage)

    def _choice(self, outcome: Outcome) -> CompletionChoice:
        return CompletionChoice(
            index=outcome.choice.index,
            text=outcome.chunk.text,
            logprobs=self._logprobs(outcome.chunk, 0),
            **self._ids(outcome.choice, outcome.chunk.token_ids),
            **ending_fields(outcome.started, outcome.finished, self._wishes),
        )

    def opening(self, _choice: Choice) -> None:
        """There is none: text completions have no role."""

    def part(self, choice: Choice, chunk: Chunk) -> Completion | None:
        """Some tokens; None where there is nothing to see."""
        if not (chunk.text or self._wishes.logprobs or self._wishes.token_ids):
            return None
        offset = self._text_offsets.get(choice.index, 0)
        self._text_offsets[choice.index] = offset + len(chunk.text)
        return self._chunk(
            CompletionChoice(
                index=choice.index,
                text=chunk.text,
                logprobs=self._logprobs(chunk, offset),
                finish_reason=None,
                **self._ids(choice, chunk.token_ids),
            )
        )

    def ending(self, choice: Choice, started: Started, finished: Finished) -> Completion:
        """Says why it ended."""
        return self._chunk(
            CompletionChoice(
                index=choice.index, text="", logprobs=None, **ending_fields(started, finished, self._wishes)
            )
        )

    def counts(self, usage: Usage) -> Completion:
        """The token counts."""
        return self._completion([], usage=usage)

    def _chunk(self, choice: CompletionChoice) -> Completion:
        return self._completion([choice], **({"usage": None} if self._wishes.stream_usage else {}))

    def _completion(self, choices: list[CompletionChoice], **more: Any) -> Completion:
        head = self._head
        return Completion(
            id=head.id,
            object="text_completion",
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=choices,
            **more,
        )

    def _logprobs(self, chunk: Chunk, text_offset: int) -> CompletionLogprobs | None:
        return completion_logprobs(chunk, self._tokenizer, text_offset) if self._wishes.logprobs else None

    def _ids(self, choice: Choice, token_ids: Sequence[int]) -> dict[str, Any]:
        """Token ids if they are wanted; those of the prompt once."""
        if not self._wishes.token_ids:
            return {}
        ids: dict[str, Any] = {"token_ids": list(token_ids)}
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            ids["prompt_token_ids"] = list(choice.generation.prompt)
        return ids
