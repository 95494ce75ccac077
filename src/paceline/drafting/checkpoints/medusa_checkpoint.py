"""Medusa heads as the drafting method gets them, whatever layout they came in."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ResidualLayer = tuple[torch.Tensor, torch.Tensor | None]
"""Weight # [hidden_size, hidden_size] and bias # [hidden_size] of one x + SiLU(weight x + bias)."""


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Sizes of Medusa heads.

    Attributes:
        num_heads: heads; head k proposes the token k + 2 places after the row it reads.
        num_layers: residual layers per head.
        hidden_size: numbers per row; the target's.
        vocab_size: columns of a head; below the target's there is a `token_map`.
        shared_head: logits come from the target's head.
        has_bias: residual layers have a bias.
    """

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    shared_head: bool
    has_bias: bool


@dataclass(frozen=True, slots=True)
class MedusaCheckpoint:
    """Medusa heads, number format as stored.

    Attributes:
        config: sizes.
        blocks: the residual layers of each head.
        heads: # [vocab_size, hidden_size] for each head; the same tensor may be there several times; None where
            `shared_head` is set.
        layout: name of the layout they came in.
        token_map: # [vocab_size] int64: the target id of each column; None where they are the same.
        head_accuracies: measured shares of right tokens, per head and rank from the best on; empty where the
            configuration names none as `head_accuracies`.
    """

    config: MedusaConfig
    blocks: tuple[tuple[ResidualLayer, ...], ...]
    heads: tuple[torch.Tensor, ...] | None
    layout: str
    token_map: torch.Tensor | None = None
    head_accuracies: tuple[tuple[float, ...], ...] = ()

    @property
    def num_bytes(self) -> int:
        """Memory of the weights, each tensor counted once."""
        tensors = [tensor for block in self.blocks for layer in block for tensor in layer if tensor is not None]
        tensors += self.heads or ()
        return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())
