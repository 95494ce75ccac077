"""What the method `draft_model` asks of a model: feed tokens to sessions, tell the logits after the last one.

Two implementations: `torch_runner` runs any `transformers` model and batches sessions into one pass; `onnx_runner` runs
a quantised copy with onnxruntime-genai, session by session. Neither knows of drafts, sampling or the rollback rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

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
        keep_rows: rows [0, keep_rows) stay, at most those it holds; the others are dropped first.
        tokens: tokens fed at positions [keep_rows, keep_rows + len(tokens)); at least one.
        wants_logits: whether the logits after the last token are needed.
    """

    session: str
    keep_rows: int
    tokens: Sequence[int]
    wants_logits: bool = True


@dataclass(frozen=True, slots=True)
class FeedResult:
    """What became of a `Feed`.

    Attributes:
        logits: float32 # [vocab_size], valid until the next pass; None where not wanted or on error.
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
        """Key/value rows that the session holds; 0 for an unknown one."""

    def kv_usage(self) -> KvUsage:
        """Room taken now; may be asked from any thread, at any time."""

    def forward(self, batch: Sequence[Feed]) -> list[FeedResult]:
        """Runs one pass over distinct sessions.

        A session that was fed holds `keep_rows + len(tokens)` rows afterwards; one with an error holds `rows(session)`
        rows, at most `keep_rows`, that are still right.
        """

    def close(self, session: str) -> None:
        """Frees what the session holds; unknown sessions are closed already."""
