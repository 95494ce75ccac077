"""POST /v1/chat/completions: its request as the door takes it, and its answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.errors import InvalidArgument
from paceline.generation import Chunk, Finished, Started
from paceline.text.request import ChatMessage as PromptMessage
from paceline.text.request import ChatPrompt
from paceline.text.tokenizer import Tokenizer
from paceline_gateway.http.choices import Ask, Choice, Outcome
from paceline_gateway.http.logprobs import chat_logprobs
from paceline_gateway.http.rendering import Head, Wishes, ending_fields
from paceline_gateway.http.requests import ChatCompletionRequest
from paceline_gateway.http.responses import (
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    Usage,
)
from paceline_gateway.http.translate import generation_request


def chat_ask(fields: ChatCompletionRequest) -> Ask:
    """What is asked for.

    Raises:
        InvalidArgument: fields contradict each other.
    """
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidArgument("top_logprobs needs logprobs: true", field="top_logprobs")
    top_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    prompt = ChatPrompt(tuple([PromptMessage(message.role, message.content) for message in fields.messages]))
    request = generation_request(fields, prompt, top_logprobs)
    return Ask((prompt,), 1 if fields.n is None else fields.n, request, {"prompt": "messages"})


class ChatRenderer:
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

    def whole(self, outcomes: Sequence[Outcome], usage: Usage) -> ChatCompletion:
        """The answer without a stream."""
        head, more = self._head, dict[str, Any]()
        if self._wishes.token_ids:
            more["prompt_token_ids"] = list(outcomes[0].choice.generation.prompt)
        return ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[self._choice(outcome) for outcome in outcomes],
            usage=usage,
            **more,
        )

    def _choice(self, outcome: Outcome) -> ChatChoice:
        return ChatChoice(
            index=outcome.choice.index,
            message=ChatMessage(role="assistant", content=outcome.chunk.text),
            logprobs=self._logprobs(outcome.chunk),
            **self._ids(outcome.chunk),
            **ending_fields(outcome.started, outcome.finished, self._wishes),
        )

    def opening(self, choice: Choice) -> ChatCompletionChunk:
        """Says who speaks."""
        delta = ChatDelta(role="assistant", content="")
        more: dict[str, Any] = {}
        if self._wishes.token_ids:
            more["prompt_token_ids"] = list(choice.generation.prompt)
        return self._chunk(ChatChunkChoice(index=choice.index, delta=delta, logprobs=None, finish_reason=None), **more)

    def part(self, choice: Choice, chunk: Chunk) -> ChatCompletionChunk | None:
        """Some tokens; None where there is nothing to see."""
        if not (chunk.text or self._wishes.logprobs or self._wishes.token_ids):
            return None
        return self._chunk(
            ChatChunkChoice(
                index=choice.index,
                delta=ChatDelta(content=chunk.text),
                logprobs=self._logprobs(chunk),
                finish_reason=None,
                **self._ids(chunk),
            )
        )

    def ending(self, choice: Choice, started: Started, finished: Finished) -> ChatCompletionChunk:
        """Says why it ended."""
        return self._chunk(
            ChatChunkChoice(
                index=choice.index,
                delta=ChatDelta(),
                logprobs=None,
                **ending_fields(started, finished, self._wishes),
            )
        )

    def counts(self, usage: Usage) -> ChatCompletionChunk:
        """The token counts."""
        return self._chunk(None, usage=usage)

    def _chunk(self, choice: ChatChunkChoice | None, **more: Any) -> ChatCompletionChunk:
        head = self._head
        if self._wishes.stream_usage:
            more.setdefault("usage", None)
        return ChatCompletionChunk(
            id=head.id,
            object="chat.completion.chunk",
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[] if choice is None else [choice],
            **more,
        )

    def _logprobs(self, chunk: Chunk) -> ChatLogprobs | None:
        return chat_logprobs(chunk, self._tokenizer) if self._wishes.logprobs else None

    def _ids(self, chunk: Chunk) -> dict[str, Any]:
        return {"token_ids": list(chunk.token_ids)} if self._wishes.token_ids else {}
