"""The matrices of drafting heads, packed for the CPU's kernels where that is possible."""

from __future__ import annotations

import torch
from torch import nn

from paceline.engine.native.weights import PlainWeight, Weight
from paceline.engine.packing import PackedLinear, least_rows, packing_obstacle


def make_product(weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = True) -> Weight:
    """A matrix that rows are multiplied by, however few they are.

    Args:
        weight: # [out_features, in_features]
        bias: # [out_features] or None.
        pack: whether to pack it where that is possible.
    """
    if pack and not packing_obstacle(nn.ParameterList([nn.Parameter(weight, requires_grad=False)])):
        return PackedLinear(weight, bias, least_rows())
    return PlainWeight(weight, bias)
