"""What `generate` and `chat` ask the gateway for, and a generation gathered into one value."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc.aio

from paceline.client import AsyncClient
from paceline.errors import InvalidArgument, Unavailable
from paceline.generation import Chunk, Evidence, Finished, Started
from paceline.messages import FinishReason, SamplingParams, TokenOrigin
from paceline.text.request import GenerationRequest, Prompt, SpeculationOptions

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_UNREACHABLE = ("failed to connect", "errors resolving", "address lookup failed", "dns resolution failed")
"""Parts of gRPC's messages, in lower case, when nobody listens at an address or its host has no such name."""


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

    def request(self, prompt: Prompt) -> GenerationRequest:
        """The request for one prompt."""
        return GenerationRequest(
            prompt=prompt,
            model=self.model,
            sampling=SamplingParams(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k, min_p=self.min_p),
            seed=self.seed,
            max_tokens=self.max_tokens,
            stop=self.stop,
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

    @property
    def acceptance(self) -> float | None:
        """Accepted draft tokens divided by judged ones; None when nothing was judged."""
        judged = self.evidence.draft_tokens
        return self.evidence.accepted_tokens / judged if judged else None

    @property
    def tokens_per_second(self) -> float:
        """Tokens divided by the time from the request to the end, as the gateway measured it."""
        return len(self.token_ids) / (self.evidence.total_ms / 1e3) if self.evidence.total_ms else 0.0


def check_address(address: str) -> None:
    """Refuses what can be no gateway's address, in the form that the gateway wants its replicas' addresses.

    Raises:
        InvalidArgument: it is not host:port.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 0 < int(match[2]) <= 65535:
        raise InvalidArgument(f"--address {address!r} is no address; write host:port", field="address")


@contextmanager
def explaining_unreachable(address: str) -> Iterator[None]:
    """Makes gRPC's words for "nobody listens there" into what a user can act on; a gateway's own words stay.

    Raises:
        Unavailable: nobody listens at the address.
    """
    try:
        yield
    except Unavailable as error:
        if not _is_unreachable(error):
            raise
        raise Unavailable(
            f"no gateway answers at {address}: start one with `paceline up`, or name another with --address"
        ) from error


def _is_unreachable(error: Unavailable) -> bool:
    """Whether the connection failed. A gateway may use the same words about a replica, but sends trailers."""
    cause = error.__cause__
    if not isinstance(cause, grpc.aio.AioRpcError) or cause.trailing_metadata():
        return False
    return any(part in error.message.lower() for part in _UNREACHABLE)


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
    with explaining_unreachable(client.address):
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
    )
