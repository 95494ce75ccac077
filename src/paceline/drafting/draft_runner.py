"""What the method `draft_model` asks of a model: feed tokens to sessions, tell the logits after the last one.

Two implementations: `torch_runner` runs any model of the engine and batches sessions into one pass; `onnx_runner` runs
a quantised copy with onnxruntime-genai, session by session. Neither knows of drafts, sampling or the rollback rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from paceline.engine.sampling import DraftChoice
from paceline.errors import PacelineError
from paceline.kv_usage import KvUsage


@dataclass(frozen=True, slots=True)
class DraftRunnerInfo:
    """Facts about a loaded draft model.

    Attributes:
        vocab_size: rows of its output layer.
        max_model_len: most tokens of a session.
        weights_bytes: memory of the weights.
        kv_bytes: most memory that key/value rows take.
        max_sessions: sessions that fit at once; 0 when only `kv_bytes` bounds them.
    """

    vocab_size: int
    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    max_sessions: int = 0


@dataclass(frozen=True, slots=True)
class Feed:
    """One session's part of a pass.

    Attributes:
        session: an open session.
        tokens: its tokens from the first on; those of [keep_rows, len(tokens)) are to be fed, at least one.
        keep_rows: rows [0, keep_rows) stay, at most those it holds; the others are dropped first.
        wants_logits: whether the logits after the last token are needed.
        is_context: whether the tokens are committed or assumed ones, whose rows others may share; not so for drafts.
    """

    session: str
    tokens: Sequence[int]
    keep_rows: int = 0
    wants_logits: bool = True
    is_context: bool = True


@dataclass(frozen=True, slots=True)
class FeedResult:
    """What became of a `Feed`.

    Attributes:
        logits: after the last token, float32 # [1, vocab_size], valid until the next pass; None where not wanted, on
            error, and where tokens are left to be fed.
        error: why this session could not be fed; the others of the pass were.
    """

    logits: torch.Tensor | None = None
    error: PacelineError | None = None


class DraftRunner(Protocol):
    """A draft model and its sessions' rows. Used from one thread at a time."""

    @property
    def info(self) -> DraftRunnerInfo:
        """Facts about the model."""

    def open(self, session: str) -> None:
        """Begins a session without rows.

        Raises:
            CapacityExceeded: no slot is free.
        """

    def rows(self, session: str) -> int:
        """Key/value rows that the session holds; 0 for an unknown one.

        They become fewer between passes where another session needs the room.
        """

    def kv_usage(self) -> KvUsage:
        """Room taken now; may be asked from any thread, at any time."""

    def forward(self, batch: Sequence[Feed]) -> list[FeedResult]:
        """Runs one pass over distinct sessions.

        A pass has limits, so a session may be fed some of its tokens, or none: `rows` tells how far it got, and the
        rest is fed by the next pass. One that is fed anything is as good as one fed alone. At least one gets on.
        Afterwards each session's rows are those of its first `rows(session)` tokens, also if there was an error.
        """

    def discard(self, session: str) -> None:
        """Forgets the rows of a session and what others could share of them, because they may be wrong."""

    def close(self, session: str) -> None:
        """Frees what the session holds; unknown sessions are closed already."""


@dataclass(frozen=True, slots=True)
class ChainResult:
    """What became of a `Feed` and the steps after it.

    Attributes:
        choices: the best token of each step; None where the row was not finite, which is the last one then.
        error: why the session could not be fed.
    """

    choices: tuple[DraftChoice | None, ...] = ()
    error: PacelineError | None = None


@runtime_checkable
class DraftsChains(Protocol):
    """A `DraftRunner` that takes several steps of one session without a wait for the device between them."""

    def forward_chain(self, feed: Feed, num_steps: int, vocab_size: int) -> ChainResult | None:
        """Feeds a session, then each best token in turn.

        Afterwards the session's rows are those of its tokens and of all choices but the last.

        Args:
            feed: what comes first.
            num_steps: most tokens to choose, at least 1; may be fewer where the session has no room for more.
            vocab_size: ids at or above it are never chosen.

        Returns:
            What was chosen; None where all that is to be fed does not go into one pass: feed it step by step.
        """
