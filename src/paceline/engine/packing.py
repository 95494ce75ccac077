"""Weights of linear layers, packed once for the CPU's matrix kernels.

A plain float32 `nn.Linear` on a CPU takes a fast path for one token and another, slower one from two tokens on, so that
a verify pass of five tokens costs twice a plain one. Weights reordered once into the kernel library's blocked layout
(oneDNN through `torch.ops.mkldnn`) serve one and several tokens at nearly the same price.

The blocked copy takes the place of the plain weight, which is freed, so weights are in memory once. The exception is a
head tied to the embedding in a model of `transformers`: the embedding looks up rows of the plain table, the head
multiplies by a packed copy of it. The native runner has one copy for both (`paceline.engine.native.tables`).

A row's result never depends on the other rows' values. With any matrix kernel its last bits may depend on how many
rows are multiplied together; the packed kernel has given the same bits for every number of rows so far, which nothing
promises.

On processors with AVX-512 that kernel takes longer for one to three rows than for four, so there fewer rows are padded
with zeros.

oneDNN compiles a kernel for every number of rows that it meets, and keeps it for as long as the process lives: half a
megabyte for each shape of a weight, so that a replica whose batches have had every size up to 256 had grown by
hundreds of megabytes. So many rows are padded to one of a few numbers (`padded_count`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn
from torch.nn import functional

_ROWS_HINT = 4
"""Number of rows that the layout is chosen for: a verify pass of a few tokens."""

_EXACT_ROWS = 32
"""Up to so many rows each number has kernels of its own: plain steps and blocks of one session or a few."""
_COUNTS_PER_DOUBLING = 16
"""Above, so many numbers from each power of two to the next one: at most a sixteenth of the rows are for nothing."""


def padded_count(num_rows: int, least: int) -> int:
    """How many rows to multiply where there are so many.

    Up to 512 rows that gives 93 different numbers, each with 0.3 to 0.6 MiB of kernels per shape of a weight.

    Args:
        num_rows: rows that are there.
        least: fewer are never multiplied; 0 where weights have no kernels of oneDNN: all numbers stay what they are.
    """
    if not least or num_rows <= _EXACT_ROWS:
        return max(num_rows, least)
    step = (1 << (num_rows - 1).bit_length()) // (2 * _COUNTS_PER_DOUBLING)
    return -(-num_rows // step) * step


def pad_rows(rows: torch.Tensor, least: int) -> torch.Tensor:  # [..., num_rows, width] -> [..., padded_count, width]
    """The rows, and zeros after them; see `padded_count`."""
    missing = padded_count(rows.shape[-2], least) - rows.shape[-2]
    return functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def least_rows() -> int:
    """Number of rows below which the kernel is not faster on this processor.

    Bare products of a 135-million-weight model on an EPYC with AVX-512, one thread, milliseconds: 41, 49, 35 and 32 for
    one to four rows.
    """
    return 4 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


class PackedWeight:
    """A weight in the kernel library's layout; for inference in float32 on a CPU.

    Args:
        weight: # [out_features, in_features]; not kept.
        bias: # [out_features] or None; kept.
    """

    __slots__ = ("_bias", "_packed", "in_features", "out_features")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_HINT)
        self._bias = None if bias is None else bias.detach()

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        num_bias = 0 if self._bias is None else self.out_features
        return 4 * (self.out_features * self.in_features + num_bias)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        """The product with every row, bias added. Rows are the caller's to pad: `pad_rows` with `least_rows`."""
        product = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self._bias, "none", [], "")
        return cast("torch.Tensor", product)

    def plain(self) -> torch.Tensor:  # [out_features, in_features]
        """A copy of the weight in the usual layout, the same to the bit."""
        return cast("torch.Tensor", self._packed.to_dense())


class PackedLinear(nn.Module):
    """A linear layer with a packed weight; for inference in float32 on a CPU.

    Args:
        weight: # [out_features, in_features]; not kept.
        bias: # [out_features] or None; kept.
        pad_to_rows: fewer rows are padded to this many, and more to one of a few numbers (`padded_count`).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, pad_to_rows: int = 1) -> None:
        super().__init__()
        self._pad_to_rows = pad_to_rows
        self.out_features, self.in_features = weight.shape
        # An opaque tensor must not be moved or cast, so it is no buffer.
        self._weight = PackedWeight(weight, bias)

    @property
    def num_bytes(self) -> int:
        """Memory of weight and bias."""
        return self._weight.num_bytes

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:  # [..., in_features] -> [..., out_features]
        """The product; the same shape rules as `nn.Linear`."""
        num_rows = inputs.shape[-2] if inputs.dim() > 1 else 0
        if num_rows and inputs.numel() == num_rows * self.in_features:
            return self._weight(pad_rows(inputs, self._pad_to_rows))[..., :num_rows, :]
        return self._weight(inputs)


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
            packed = PackedLinear(child.weight, child.bias, least_rows())
            setattr(parent, name, packed)
            num_packed += 1
            packed_bytes += packed.num_bytes
            if id(child.weight) in shared:
                duplicated_bytes += packed.num_bytes
    _let_go_of_the_file(model)
    return PackingReport(num_packed, packed_bytes, duplicated_bytes)


def _let_go_of_the_file(model: nn.Module) -> None:
    """Copies what is left of the plain weights out of the mapped file, so that the whole mapping can be dropped."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.clone()
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, buffer.clone(), persistent=name not in module._non_persistent_buffers_set)
