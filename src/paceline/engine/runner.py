"""What the engine asks of a model: one forward pass over a ragged batch of sequences.

A runner knows nothing of sessions, sampling or acceptance. The native runner lives in `engine/native/`, the one for any
other model in `engine/transformers_runner.py`, the choice between them in `engine/load_runner.py`; tests bring a
scripted one that stores tokens where a model stores keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.engine.features import FeatureRows
from paceline.engine.kv.pool import KVPool, SequenceKV
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree


@dataclass(frozen=True, slots=True)
class SequencePass:
    """One sequence's part of a pass: a run of tokens, then a tree under the last of them.

    Attributes:
        kv: the sequence's rows; rows [0, kv.num_rows) are computed and this pass writes the rows after them, one per
            fed token.
        tokens: tokens at positions [kv.num_rows, kv.num_rows + len(tokens)), each seeing all rows before it. At least
            one; the last one is the tree's root.
        tree: draft tokens under the last of `tokens`; node position = root position + depth.
        num_logits: how many of the last fed rows need logits; the root and the tree need `1 + tree.num_draft_tokens`,
            a prefill chunk needs 0.
        num_ahead: rows after kv.num_rows that come before `tokens`: earlier passes wrote them in the first layers, the
            only ones that this part goes through.
        last_on_device: the last of `tokens`, which holds any number in its place, where the pass before this one chose
            it and nobody has read it # [1] int64
    """

    kv: SequenceKV
    tokens: tuple[int, ...]
    tree: DraftTree = EMPTY_BLOCK
    num_logits: int = 0
    num_ahead: int = 0
    last_on_device: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that this part feeds."""
        return len(self.tokens) + self.tree.num_draft_tokens


@dataclass(frozen=True, slots=True)
class RunnerInfo:
    """Facts about a loaded model.

    Attributes:
        vocab_size: token ids that the model knows.
        max_model_len: most tokens of a sequence.
        weights_bytes: memory of the weights, copies included.
        kv_bytes: memory of the pool.
        kv_bytes_per_token: of a row in all planes, that of the features included.
        device: where the model runs.
        dtype: of weights and rows.
        runner: which code runs it: "native" or "transformers".
        quantization: of the weights; "none" for a target.
        feature_bytes: of `kv_bytes`, memory of the features that drafting methods build on.
    """

    vocab_size: int
    max_model_len: int
    weights_bytes: int
    kv_bytes: int
    kv_bytes_per_token: int
    device: str
    dtype: str
    runner: str
    quantization: str = "none"
    feature_bytes: int = 0


class ModelRunner(Protocol):
    """A model with its key/value pool. Used from one thread at a time."""

    @property
    def info(self) -> RunnerInfo:
        """Facts about the model."""

    @property
    def pool(self) -> KVPool:
        """The pages of all its sequences."""

    def new_sequence(self) -> SequenceKV:
        """An empty sequence in this runner's pool; free it with `SequenceKV.free`."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        """Runs one pass.

        Writes the fed tokens' key/value rows after `kv.num_rows` without making them part of the sequence: the caller
        keeps what it wants with `SequenceKV.commit`, and has reserved the rows with `SequenceKV.reserve`.

        Args:
            batch: its parts, of different sequences.
            wait: whether the result is read now. If not, this may return before the device has come to it; more work
                for the device may follow, and before anything is read comes `synchronize`.

        Returns:
            Per part, float32 logits # [num_logits, vocab_size], row i for the (num_logits - i)-th last fed token.
        """

    def synchronize(self) -> None:
        """Returns when the device has come to the end of passes that were not waited for.

        Nothing is to be done where reading a result waits for it, as it does with torch.
        """

    def features(self, kv: SequenceKV) -> FeatureRows:
        """The features of a sequence's rows.

        Raises:
            ConfigurationError: this runner keeps none.
        """
