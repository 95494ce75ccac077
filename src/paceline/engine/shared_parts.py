"""Parts of the target that drafting heads use: its embedding, its head and its final norm, kept in memory once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a drafting head borrows from the target.

    Attributes:
        embed: token ids # [n] int64 -> [n, hidden_size]
        head: rows after the final norm # [n, hidden_size] -> logits # [n, vocab_size]
        norm: the final norm # [n, hidden_size] -> [n, hidden_size]
        hidden_size: numbers per row.
        num_layers: decoder layers of the target.
        vocab_size: columns of the logits.
        dtype: of rows and weights.
        device: where they are.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
