"""What `generate` and `chat` ask the gateway for, and a generation gathered into one value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.client import AsyncClient
from paceline.errors import Unavailable
from paceline.generation import Chunk, Evidence, Finished, Promise, Started
from paceline.messages import AcceptanceRule, FinishReason, SamplingParams, TokenOrigin
from paceline.text.request import GenerationRequest, Prompt, SpeculationOptions


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a generation; meanings and limits are those of `GenerateRequest` in gateway.proto.

    Attributes:
        model: which of the served models; empty: the only one.
        max_tokens: most tokens; None: what the context leaves.
        temperature: 0 is greedy.
        top_p: probability that the kept tokens reach.
        top_k: number of kept tokens; 0 keeps all.
        min_p: least share of the best token's probability.
        seed: of the noise; None: drawn by the gateway.
        stop: strings that end the text.
        method: the only method to draft by; empty: whatever the drafter does.
        num_speculative_tokens: block size; None: the gateway's.
        speculation: False decodes plainly.
        rule: how drafts are judged.
    """

    model: str = ""
    max_tokens: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    method: str = ""
    num_speculative_tokens: int | None = None
    speculation: bool = True
    rule: AcceptanceRule = AcceptanceRule.MATCH

    def request(self, prompt: Prompt) -> GenerationRequest:
        """The request for one prompt."""
        return GenerationRequest(
            prompt=prompt,
            model=self.model,
            sampling=SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p),
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
            rule=self.rule,
            speculation=SpeculationOptions(self.speculation, self.method, self.num_speculative_tokens),
        )


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole generation.

    Attributes:
        session: its name.
        model: who generated it.
        seed: the one in force.
        warnings: what the gateway had to say at the start.
        text: the generated text.
        token_ids: its tokens.
        origins: where each token came from.
        durable: the session store had acknowledged all of it when the last chunk was sent.
        finish_reason: why it ended.
        stop_string: the string that ended it; empty if none did.
        prompt_tokens: tokens of the prompt.
        evidence: what speculation did.
        promise: what the gateway promises about the tokens.
    """

    session: str
    model: str
    seed: int
    warnings: tuple[str, ...]
    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    durable: bool
    finish_reason: FinishReason
    stop_string: str
    prompt_tokens: int
    evidence: Evidence
    promise: Promise = Promise.EXACT

    @property
    def acceptance(self) -> float | None:
        """Accepted draft tokens divided by judged ones; None when nothing was judged."""
        judged = self.evidence.draft_tokens
        return self.evidence.accepted_tokens / judged if judged else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens divided by the time from the request to the end, as the gateway measured it."""
        return len(self.token_ids) / (self.evidence.total_ms / 1e3) if self.evidence.total_ms else 0.0


async def complete(
    client: AsyncClient,
    request: GenerationRequest,
    *,
    on_start: Callable[[Started], None] = lambda _event: None,
    on_chunk: Callable[[Chunk], None] = lambda _event: None,
) -> Completion:
    """Runs a generation to its end.

    Args:
        client: a connection to a gateway.
        request: what to generate.
        on_start: told the first event.
        on_chunk: told each chunk as it comes.

    Raises:
        PacelineError: what the gateway says.
    """
    started: Started | None = None
    finished: Finished | None = None
    chunks: list[Chunk] = []
    async for event in client.generate(request):
        match event:
            case Started():
                started = event
                on_start(event)
            case Chunk():
                chunks.append(event)
                on_chunk(event)
            case Finished():
                finished = event
    if started is None or finished is None:
        raise Unavailable("the stream ended without its last message; the gateway may have been stopped")
    return Completion(
        session=started.session,
        model=started.model,
        seed=started.seed,
        warnings=started.warnings,
        text="".join([chunk.text for chunk in chunks]),
        token_ids=tuple([token for chunk in chunks for token in chunk.token_ids]),
        origins=tuple([origin for chunk in chunks for origin in chunk.origins]),
        # What was sent before the store answered is written by the time a later chunk is durable.
        durable=not chunks or chunks[-1].durable,
        finish_reason=finished.finish_reason,
        stop_string=finished.stop_string,
        prompt_tokens=finished.prompt_tokens,
        evidence=finished.evidence,
        promise=started.promise,
    )
