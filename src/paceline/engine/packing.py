"""Weights of linear layers, packed once for the CPU's matrix kernels.

A plain float32 `nn.Linear` on a CPU takes a fast path for one token and another, slower one from two tokens on, so that
a verify pass of five tokens costs twice a plain one. Weights reordered once into the kernel library's blocked layout
(oneDNN through `torch.ops.mkldnn`) serve one and several tokens at nearly the same price.

The blocked copy takes the place of the plain weight, which is freed, so weights are in memory once. The exception is a
head tied to the embedding: the embedding looks up rows of the plain table, the head multiplies by a packed copy of it.

A row's result may depend in its last bits on how many rows are multiplied together, here as with any matrix kernel: it
never depends on the other rows' values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

_ROWS_HINT = 4
"""Number of rows that the layout is chosen for: a verify pass of a few tokens."""


class PackedLinear(nn.Module):
    """A linear layer with a packed weight; for inference in float32 on a CPU.

    Args:
        weight: # [out_features, in_features]; not kept.
        bias: # [out_features] or None; kept.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        # An opaque tensor must not be moved or cast, so it is no buffer.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        num_bias = 0 if self._bias is None else self.out_features
        return 4 * (self.out_features * self.in_features + num_bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        """The product; the same shape rules as `nn.Linear`."""
        product = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return cast("torch.Tensor", product)


@dataclass(frozen=True, slots=True)
class PackingReport:
    """What packing did to the memory.

    Attributes:
        num_packed: layers replaced.
        packed_bytes: memory of their weights.
        duplicated_bytes: of those, copies of a weight that stays in use elsewhere (a tied head).
        reason: why nothing was packed; empty if it was.
    """

    num_packed: int = 0
    packed_bytes: int = 0
    duplicated_bytes: int = 0
    reason: str = ""


def packing_obstacle(model: nn.Module) -> str:
    """Why a model's weights cannot be packed here; empty if they can."""
    weight = next(model.parameters())
    if weight.device.type != "cpu":
        return f"weights are on {weight.device}"
    if weight.dtype != torch.float32:
        return f"weights are {weight.dtype}"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch lacks oneDNN"
    return ""


def pack_linears(model: nn.Module) -> PackingReport:
    """Replaces every plain `nn.Linear` of the model by a packed one, in place.

    Subclasses of `nn.Linear` are left alone: they do more than multiply. Where packing is not possible the model stays
    as it is and the report says why.
    """
    if reason := packing_obstacle(model):
        return PackingReport(reason=reason)
    shared = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    num_packed = packed_bytes = duplicated_bytes = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is not nn.Linear:
                continue
            packed = PackedLinear(child.weight, child.bias)
            setattr(parent, name, packed)
            num_packed += 1
            packed_bytes += packed.num_bytes
            if id(child.weight) in shared:
                duplicated_bytes += packed.num_bytes
    return PackingReport(num_packed, packed_bytes, duplicated_bytes)
