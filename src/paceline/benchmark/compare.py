"""One prompt with and without speculation through the same services, and whether the texts are equal.

Two runs may differ without a fault in one case only: where the target's two best tokens are so close that the rounding
of a pass decides between them. Such a place is looked up, and called a near-tie.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from paceline.benchmark.prompts import Prompt
from paceline.cli.request import Completion, RequestOptions, complete
from paceline.client import AsyncClient
from paceline.generation import Chunk
from paceline.messages import SamplingParams
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest

NEAR_TIE_LOGITS = 1e-4
"""Two logits that are closer than this may win either way, in float32."""


class Equality(StrEnum):
    """How two runs compare."""

    EQUAL = "equal"
    NEAR_TIE = "near-tie"
    DIFFERENT = "different"


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to generate.

    Attributes:
        name: for tables.
        num_speculative_tokens: block size; 0 is plain decoding.
        method: the only method to draft by; empty: whatever the fleet drafts with.
    """

    name: str
    num_speculative_tokens: int
    method: str = ""


PLAIN = Configuration("plain", 0)


def request_for(prompt: Prompt, configuration: Configuration, max_tokens: int | None = None) -> GenerationRequest:
    """The greedy request for a prompt."""
    options = RequestOptions(
        max_tokens=max_tokens or prompt.max_tokens,
        speculation=configuration.num_speculative_tokens > 0,
        num_speculative_tokens=configuration.num_speculative_tokens,
        method=configuration.method,
    )
    return options.request(ChatPrompt((ChatMessage("user", prompt.text),)))


async def equality(
    client: AsyncClient, prompt: Prompt, plain: Completion, speculative: Completion, max_tokens: int | None = None
) -> Equality:
    """How the speculative run compares with the plain one."""
    if plain.token_ids == speculative.token_ids:
        return Equality.EQUAL
    pairs = zip(plain.token_ids, speculative.token_ids, strict=False)
    differs_at = next((index for index, (left, right) in enumerate(pairs) if left != right), None)
    if differs_at is None:
        return Equality.DIFFERENT
    gap = await _gap_between_the_best_two(client, request_for(prompt, PLAIN, max_tokens), differs_at)
    return Equality.NEAR_TIE if gap < NEAR_TIE_LOGITS else Equality.DIFFERENT


async def _gap_between_the_best_two(client: AsyncClient, request: GenerationRequest, index: int) -> float:
    """Difference of the two best logits where the token of that index is chosen."""
    gaps: list[float] = []

    def on_chunk(chunk: Chunk) -> None:
        gaps.extend(entry.top_logprobs[0] - entry.top_logprobs[1] for entry in chunk.logprobs)

    with_logprobs = GenerationRequest(
        prompt=request.prompt,
        sampling=SamplingParams(temperature=0.0, top_logprobs=2),
        max_tokens=index + 1,
        speculation=request.speculation,
    )
    await complete(client, with_logprobs, on_chunk=on_chunk)
    return gaps[index]


@dataclass(frozen=True, slots=True)
class WhereTimeGoes:
    """Milliseconds per generated token, from the evidence of the responses.

    Attributes:
        total_ms: from the request to the end.
        verify_ms: in the verifier, without queueing.
        draft_wait_ms: the session waited for a draft and nothing was verified.
        wire_ms: round trips less the replicas' own time, of drafts too, which run beside verification.
        queue_ms: queueing in the replicas.
        rest_ms: total less verify and draft_wait: the gateway's work, the wire of verification and the store.
        draft_ms: in the drafter, most of it while the verifier works.
    """

    total_ms: float
    verify_ms: float
    draft_wait_ms: float
    wire_ms: float
    queue_ms: float
    rest_ms: float
    draft_ms: float


def where_time_goes(completions: Sequence[Completion]) -> WhereTimeGoes:
    """Averages over all tokens of the completions."""
    tokens = sum(len(completion.token_ids) for completion in completions)

    def per_token(*names: str) -> float:
        values: list[float] = [getattr(run.evidence, name) for run in completions for name in names]
        return sum(values) / tokens

    total_ms, verify_ms, draft_wait_ms = per_token("total_ms"), per_token("verify_ms"), per_token("draft_wait_ms")
    return WhereTimeGoes(
        total_ms=total_ms,
        verify_ms=verify_ms,
        draft_wait_ms=draft_wait_ms,
        wire_ms=per_token("wire_ms"),
        queue_ms=per_token("queue_ms"),
        rest_ms=total_ms - verify_ms - draft_wait_ms,
        draft_ms=per_token("draft_ms"),
    )


@dataclass(frozen=True, slots=True)
class PromptFigures:
    """One prompt in one configuration, against plain decoding of the same run.

    Attributes:
        prompt: name of the prompt.
        tokens: generated tokens.
        tokens_per_pass: tokens per pass of the target.
        acceptance: accepted draft tokens divided by judged ones.
        plain_tokens_per_second: median over the repeats.
        tokens_per_second: median over the repeats.
        ratio: median over the repeats of each pair's quotient.
        equality: the worst of the repeats.
    """

    prompt: str
    tokens: int
    tokens_per_pass: float
    acceptance: float
    plain_tokens_per_second: float
    tokens_per_second: float
    ratio: float
    equality: Equality


def prompt_figures(
    prompt: str, plain: Sequence[Completion], speculative: Sequence[Completion], equalities: Sequence[Equality]
) -> PromptFigures:
    """Figures of one prompt from its repeats; plain and speculative runs are pairs."""
    last = speculative[-1]
    ratios = [fast.tokens_per_second / slow.tokens_per_second for slow, fast in zip(plain, speculative, strict=True)]
    severity = list(Equality)
    return PromptFigures(
        prompt=prompt,
        tokens=len(last.token_ids),
        tokens_per_pass=last.evidence.tokens_per_target_pass,
        acceptance=last.acceptance or 0.0,
        plain_tokens_per_second=statistics.median([completion.tokens_per_second for completion in plain]),
        tokens_per_second=statistics.median([completion.tokens_per_second for completion in speculative]),
        ratio=statistics.median(ratios),
        equality=max(equalities, key=severity.index),
    )
