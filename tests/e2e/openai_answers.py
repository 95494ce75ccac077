"""What OpenAI's client hands out, whole or streamed, chat or completion, gathered into one shape for comparisons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from openai import AsyncOpenAI, OpenAI

CHAT, COMPLETIONS = "chat", "completions"


@dataclass
class Answer:
    """One choice.

    Attributes:
        text: of all chunks.
        finishes: every finish reason that was told; there must be one.
        token_ids: our extension `return_token_ids`.
        tokens: text of each token, where logprobs were asked for.
        logprobs: one per token, where asked for.
    """

    text: str = ""
    finishes: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass
class Answers:
    """One response: its choices by index, and what it counts as (prompt, completion, total)."""

    choices: list[Answer]
    usage: tuple[int, int, int] | None


def ask(client: OpenAI, api: str, model: str, prompt: str, **options: Any) -> Answers:
    """Asks for a whole answer, or for a stream (`stream=True`) that is read to its end."""
    response = _endpoint(client, api).create(model=model, **_prompt(api, prompt), **options)
    return gather(response if options.get("stream") else [response])


async def ask_async(client: AsyncOpenAI, api: str, model: str, prompt: str, **options: Any) -> Answers:
    """The same with the async client."""
    response = await _endpoint(client, api).create(model=model, **_prompt(api, prompt), **options)
    return gather([chunk async for chunk in response] if options.get("stream") else [response])


def _endpoint(client: OpenAI | AsyncOpenAI, api: str) -> Any:
    return client.chat.completions if api == CHAT else client.completions


def _prompt(api: str, prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]} if api == CHAT else {"prompt": prompt}


def gather(responses: Iterable[Any]) -> Answers:
    """One answer per index from a whole response or from the chunks of a stream."""
    answers: dict[int, Answer] = {}
    usage: tuple[int, int, int] | None = None
    for response in responses:
        if response.usage is not None:
            assert usage is None, "usage was told twice"
            usage = response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens
        for choice in response.choices:
            _add(answers.setdefault(choice.index, Answer()), choice)
    assert sorted(answers) == list(range(len(answers)))
    return Answers([answers[index] for index in sorted(answers)], usage)


def _add(answer: Answer, choice: Any) -> None:
    said = getattr(choice, "message", None) or getattr(choice, "delta", None)
    answer.text += (said.content or "") if said is not None else choice.text
    answer.token_ids += getattr(choice, "token_ids", None) or []
    if choice.finish_reason is not None:
        answer.finishes.append(choice.finish_reason)
    logprobs = choice.logprobs
    if logprobs is not None and said is not None:
        answer.tokens += [entry.token for entry in logprobs.content]
        answer.logprobs += [entry.logprob for entry in logprobs.content]
    elif logprobs is not None:
        answer.tokens += logprobs.tokens
        answer.logprobs += logprobs.token_logprobs
