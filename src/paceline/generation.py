"""What a gateway tells its clients: frozen dataclasses with the field meanings and units of proto `gateway.proto`.

`paceline.wire.generation` turns them into protobuf and back; the gateway makes them, `paceline.client` hands them out.
What clients say to a gateway is in `paceline.text.request`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.messages import FinishReason, TokenLogprobs, TokenOrigin
from paceline.session.store import SessionState
from paceline.speculation.tree import DraftTree


class Promise(Enum):
    """What is promised about the output."""

    EXACT = "exact"
    """The same tokens as plain decoding, given equal logits."""
    DISTRIBUTION = "distribution"
    """The same distribution as plain decoding."""


def token_origins(tree: DraftTree, accepted_path: Sequence[int]) -> tuple[TokenOrigin, ...]:
    """Where each new token of a round came from: the accepted drafts, then the target's own.

    The last one is a bonus when the accepted path ends at a leaf, plain when the block was empty, recovered otherwise.
    """
    if not tree.num_draft_tokens:
        return (TokenOrigin.PLAIN,)
    last_node = accepted_path[-1] if accepted_path else 0
    last = TokenOrigin.RECOVERED if last_node in tree.parents else TokenOrigin.BONUS
    return (TokenOrigin.ACCEPTED,) * len(accepted_path) + (last,)


@dataclass(frozen=True, slots=True)
class Started:
    """First event of every stream."""

    session: str
    model: str
    prompt_tokens: int
    seed: int
    promise: Promise = Promise.EXACT
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that are final. Their text may lag behind them while a character or a stop string is incomplete.

    Attributes:
        text: what became visible.
        token_ids: the tokens.
        origins: one per token.
        next_token: index in the session of the token after this chunk.
        durable: the session's record holds these tokens; False while the store does not answer.
        text_lengths: characters of `text` that each token made visible; one per token, adding up to the text.
        logprobs: one per token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    next_token: int
    durable: bool
    text_lengths: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What speculation did for one request, all of it measured; see `Evidence` in gateway.proto for each field."""

    target_passes: int = 0
    tokens_per_target_pass: float = 0.0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    wasted_draft_tokens: int = 0
    ahead_hits: int = 0
    time_to_first_token_ms: float = 0.0
    total_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    queue_ms: float = 0.0
    wire_ms: float = 0.0
    draft_wait_ms: float = 0.0
    drafter_memory_bytes: int = 0
    methods: tuple[str, ...] = ()
    verifier: str = ""
    drafter: str = ""
    off_rounds: int = 0
    probe_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of every stream that did not fail."""

    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    evidence: Evidence
    stop_string: str = ""


GenerationEvent = Started | Chunk | Finished


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """The record of a session, as a client may see it; without its sampling parameters, seed apart."""

    session: str
    epoch: int
    state: SessionState
    model: str
    seed: int
    generation_start: int
    tokens: tuple[int, ...]
    verifier: str = ""
    verifier_kv_len: int = 0
    drafter: str = ""
    drafter_kv_len: int = 0
    finish_reason: str = ""

    @property
    def committed_len(self) -> int:
        """Number of final tokens, prompt included."""
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that can be asked for.

    Attributes:
        model: its name.
        max_model_len: tokens that one session may hold; 0 while no verifier is there.
        methods: drafting methods that a verifier or a drafter offers now.
    """

    model: str
    max_model_len: int
    methods: tuple[str, ...] = ()
