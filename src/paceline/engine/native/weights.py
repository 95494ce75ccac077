"""Weights of a decoder: taken out of a model of `transformers`, joined, and packed where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional


class Weight(Protocol):
    """A matrix that rows are multiplied by."""

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:
        """The product # [num_rows, in_features] -> [num_rows, out_features]."""


MakeWeight = Callable[[torch.Tensor, torch.Tensor | None], Weight]
"""Makes a weight of a plain one # [out_features, in_features] and a bias # [out_features] or None."""


class PlainWeight:
    """A weight as it is, for a GPU or a number format that is not packed.

    Args:
        weight: # [out_features, in_features]; kept.
        bias: # [out_features] or None; kept.
    """

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:  # [num_rows, in_features] -> [num_rows, out_features]
        """The product with every row, bias added."""
        return functional.linear(inputs, self._weight, self._bias)

    def rows(self, indices: torch.Tensor) -> torch.Tensor:  # [n] int64 -> [n, in_features]
        """A copy of some of the weight's rows."""
        return self._weight[indices]


def take_linears(linears: Sequence[nn.Linear], make: MakeWeight) -> Weight:
    """Joins linear layers with the same input into one weight and takes it away from them, so that it exists once.

    Args:
        linears: their outputs lie side by side in the result's, in this order. All have a bias or none has.
        make: makes the result.
    """
    # Copied even if there is only one: it may lie in a mapped file, which is unmapped when nothing refers to it.
    weight = torch.cat([take_tensor(linear, "weight") for linear in linears])
    bias = None if linears[0].bias is None else torch.cat([take_tensor(linear, "bias") for linear in linears])
    return make(weight, bias)


def take_tensor(module: nn.Module, name: str) -> torch.Tensor:
    """A parameter's values; the module keeps an empty parameter."""
    values = module.get_parameter(name).detach()
    setattr(module, name, nn.Parameter(values.new_empty(0), requires_grad=False))
    return values
