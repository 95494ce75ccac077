"""Medusa heads that run: x + SiLU(weight x + bias) per residual layer, then a product with a vocabulary head.

Heads that share their vocabulary head are multiplied by it together, so that it is read from memory once.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import silu

from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint
from paceline.drafting.head_products import make_product
from paceline.engine.native.weights import Weight
from paceline.engine.shared_parts import SharedParts


class MedusaHeads:
    """The heads of a checkpoint, in the number format and on the device of the target.

    Args:
        checkpoint: the heads; not kept.
        parts: the target's head, which the heads may share.
        vocab_size: of the target's real tokens: columns of a trimmed vocabulary that mean other ids are left out.
        pack: whether to pack weights where that is possible.

    Attributes:
        target_ids: the id of each column # [columns] int64; None where column i means id i.
        num_bytes: memory of the heads' own weights.
    """

    def __init__(self, checkpoint: MedusaCheckpoint, parts: SharedParts, vocab_size: int, *, pack: bool = True) -> None:
        self._device, self._dtype = parts.device, parts.dtype
        self._pack = pack
        self.num_bytes = 0
        self._blocks = [[self._product(*layer) for layer in block] for block in checkpoint.blocks]
        token_map, heads = checkpoint.token_map, checkpoint.heads or ()
        real = slice(None) if token_map is None else token_map < vocab_size
        self.target_ids = None if token_map is None else token_map[real].to(device=parts.device, dtype=torch.int64)
        # By identity: a head that is there several times is kept once.
        own = {id(head): head for head in heads}
        products = {key: self._product(head[real], None) for key, head in own.items()}
        self._outputs: list[Callable[[torch.Tensor], torch.Tensor]] = [products[id(head)] for head in heads] or [
            parts.head
        ] * len(self._blocks)

    @property
    def num_heads(self) -> int:
        """How many heads there are."""
        return len(self._blocks)

    def __call__(self, hidden: torch.Tensor, num_heads: int) -> torch.Tensor:
        """The logits of the first heads.

        Args:
            hidden: rows of the target after its final norm. # [rows, hidden_size]
            num_heads: how many heads to compute.

        Returns:
            Head by head, in each row by row. # [num_heads * rows, columns]
        """
        hidden = hidden.to(device=self._device, dtype=self._dtype)
        states = [self._residual(block, hidden) for block in self._blocks[:num_heads]]
        outputs = self._outputs[:num_heads]
        if all(output is outputs[0] for output in outputs):
            return outputs[0](torch.cat(states))
        return torch.cat([output(state) for output, state in zip(outputs, states, strict=True)])

    def _residual(self, block: list[Weight], state: torch.Tensor) -> torch.Tensor:
        for layer in block:
            state = state + silu(layer(state))
        return state

    def _product(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Weight:
        weight = weight.to(device=self._device, dtype=self._dtype)
        bias = None if bias is None else bias.to(device=self._device, dtype=self._dtype)
        product = make_product(weight, bias, pack=self._pack)
        self.num_bytes += product.num_bytes
        return product
