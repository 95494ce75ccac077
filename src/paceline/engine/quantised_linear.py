"""Weights of 8 or 4 bits for the linear layers of draft models on a CPU: less memory to read, so shorter passes.

| kind | weight | inputs |
|---|---|---|
| int8 | 8 bits, a scale for each output | 16 bits in two parts of 8, a scale for each row |
| int4 | 4 bits, scale and zero point for each group of 32 inputs and each output | bfloat16 |

Inputs of 8 bits would not do: a few numbers of a language model's rows are a hundred times as large as the others,
which one scale for the row then rounds away. Two parts are two rows of the product, and a row more costs little.

Rounded weights give other logits, so a target never has them: they would change the output. A drafter's only change how
often it is right.

Whether a kernel is of use depends on the processor: without its instructions it may take ten times as long as float32.
So `choose_kernel` tries the kernels on weights of the model itself, and takes the fastest that is faster than packed
float32 (`packing.py`), near enough, and gives a row the same result whatever its neighbours are. The last one keeps a
session's drafts the same alone and in a batch; kernels that share one scale over all rows of a pass fail it.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from paceline.engine.native.weights import MakeWeight, Weight
from paceline.engine.packing import PackedWeight, least_rows
from paceline.engine.runner_options import Quantization
from paceline.errors import ConfigurationError

_GROUP_INPUTS = 32
"""Inputs with a common scale in 4 bits."""
_OUTPUTS_MULTIPLE = 16
"""The 4-bit kernel works on this many outputs at once."""
_LEAST_NORM = 1e-20
"""Keeps a row of zeros from dividing by zero."""

_MEASURED_ROWS = (1, 4)
_REPEATS = 7
_CHECKED_ROWS = 8


_MOST_ERROR = {Quantization.INT8: 0.05, Quantization.INT4: 0.25}
"""Of the product with random rows, relative to its norm: int8 has 0.007 and int4 0.08 where the kernels work."""
_MOST_DEPENDENCE = 1e-5
"""How much a row's result may move with its neighbours, relative to its largest number: rounding, no more."""


class FbgemmInt8Weight:
    """8-bit weight for FBGEMM, which rounds the inputs inside its product."""

    __slots__ = ("_bias", "_levels", "_packed", "_shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._shape = weight.shape
        self._levels = _input_levels()
        scale = _output_scale(weight)
        zero_point = torch.zeros(len(scale), dtype=torch.long)
        with warnings.catch_warnings():
            # Torch means to drop quantised tensors one day; then `OnednnInt8Weight` is what is left.
            warnings.simplefilter("ignore", UserWarning)
            rounded = torch.quantize_per_channel(
                weight.detach().contiguous(), scale.double(), zero_point, 0, torch.qint8
            )
            self._packed = torch.ops.quantized.linear_prepack(rounded, None)
        self._bias = None if bias is None else bias.detach()

    @property
    def num_bytes(self) -> int:
        """Memory of weight, scales and bias."""
        outputs, inputs = self._shape
        return outputs * (inputs + 4) + _bytes_of(self._bias)

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:  # [num_rows, in_features] -> [num_rows, out_features]
        """The product; the two parts of a row are two rows of the 8-bit product."""
        parts, step = _split(inputs, self._levels)
        products = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            parts, 1.0, self._levels + 1, self._packed
        )
        return _with_bias(_join(products, step, self._levels), self._bias)


class OnednnInt8Weight:
    """8-bit weight for oneDNN."""

    __slots__ = ("_bias", "_levels", "_packed", "_scale", "_shape", "_zero_points")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._shape = weight.shape
        self._levels: int = _input_levels()
        scale = _output_scale(weight)
        rounded = (weight.detach() / scale.unsqueeze(1)).round_().to(torch.int8)
        self._packed = torch.ops.onednn.qlinear_prepack(rounded, None)
        self._scale = scale
        self._zero_points = torch.zeros(len(scale), dtype=torch.int32)
        self._bias = None if bias is None else bias.detach()

    @property
    def num_bytes(self) -> int:
        """Memory of weight, scales and bias."""
        outputs, inputs = self._shape
        return outputs * (inputs + 4) + _bytes_of(self._bias)

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:  # [num_rows, in_features] -> [num_rows, out_features]
        """The product; the two parts of a row are two rows of the 8-bit product."""
        parts, step = _split(inputs, self._levels)
        # Cut off by the conversion to an integer, a half more is rounding.
        rounded = parts.add_(self._levels + 1.5).to(torch.uint8)
        products = torch.ops.onednn.qlinear_pointwise(
            *(rounded, 1.0, self._levels + 1),
            *(self._packed, self._scale, self._zero_points, None),
            *(1.0, 0, torch.float32),
            *("none", [], ""),
        )
        return _with_bias(_join(products, step, self._levels), self._bias)


class Int4Weight:
    """4-bit weight, in groups of inputs.

    Raises:
        ConfigurationError: the inputs are no whole number of groups.
    """

    __slots__ = ("_bias", "_packed", "_scales", "_shape")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        outputs, inputs = self._shape = weight.shape
        if inputs % _GROUP_INPUTS:
            raise ConfigurationError(
                f"a layer with {inputs} inputs cannot be quantised to int4, which takes groups of {_GROUP_INPUTS}: set "
                "quantization to int8 or none",
                field="quantization",
            )
        padded = functional.pad(weight.detach(), (0, 0, 0, -outputs % _OUTPUTS_MULTIPLE))
        groups = padded.view(len(padded), -1, _GROUP_INPUTS)  # [outputs, groups, _GROUP_INPUTS]
        least = groups.amin(-1)
        step = ((groups.amax(-1) - least) / 15).clamp_min_(_LEAST_NORM)
        rounded = ((groups - least.unsqueeze(-1)) / step.unsqueeze(-1)).round_().clamp_(0, 15).to(torch.int32)
        self._packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(rounded.view(len(padded), inputs), 1)
        # The kernel counts from the middle of the 16 levels. # [groups, outputs, 2]
        self._scales = torch.stack([step, least + 8 * step], -1).transpose(0, 1).contiguous().bfloat16()
        self._bias = None if bias is None else bias.detach()

    @property
    def num_bytes(self) -> int:
        """Memory of weight, scales and bias."""
        return int(self._packed.nbytes) + self._scales.nbytes + _bytes_of(self._bias)

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:  # [num_rows, in_features] -> [num_rows, out_features]
        """The product, in bfloat16."""
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(
            inputs.bfloat16(), self._packed, _GROUP_INPUTS, self._scales
        )
        return _with_bias(product[:, : self._shape[0]].float(), self._bias)


_KERNELS: dict[Quantization, tuple[MakeWeight, ...]] = {
    Quantization.INT8: (FbgemmInt8Weight, OnednnInt8Weight),
    Quantization.INT4: (Int4Weight,),
}


@dataclass(frozen=True, slots=True)
class KernelTrial:
    """How a kernel did on a model's weights, compared with packed float32.

    Attributes:
        name: of the kernel.
        ratios: time of a product / time of the float32 product, one for each of `rows`.
        rows: numbers of rows that were multiplied.
        error: of the product, relative.
        dependence: of a row's result on its neighbours, relative.
    """

    name: str
    ratios: tuple[float, ...]
    rows: tuple[int, ...]
    error: float
    dependence: float

    def obstacle(self, kind: Quantization) -> str:
        """Why the kernel is refused; empty if it is not."""
        if not self.dependence <= _MOST_DEPENDENCE:
            return f"{self.name}: a row's result depends on its neighbours (by {self.dependence:.0e} of its size)"
        if not self.error <= _MOST_ERROR[kind]:
            return f"{self.name}: its products are off by {self.error:.0%} ({_MOST_ERROR[kind]:.0%} allowed)"
        if max(self.ratios) >= 1:
            times = " and ".join(f"{ratio:.2f}" for ratio in self.ratios)
            rows = " and ".join(str(rows) for rows in self.rows)
            return f"{self.name}: takes {times} times as long as float32 for {rows} rows"
        return ""


@torch.inference_mode()
def choose_kernel(
    kind: Quantization,
    weights: Sequence[torch.Tensor],
    *,
    kernels: Sequence[MakeWeight] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> MakeWeight:
    """The kernel for a kind of quantised weights that is fastest here.

    Args:
        kind: not NONE.
        weights: a few layers' weights # [out_features, in_features] each; together larger than the processor's cache,
            or the times are those of the cache.
        kernels: candidates; None for all of the kind.
        clock: seconds.

    Raises:
        ConfigurationError: every kernel is slower than float32, wrong, or mixes rows here; says which and what to set.
    """
    refused: list[str] = []
    best: tuple[float, MakeWeight] | None = None
    for kernel in _KERNELS[kind] if kernels is None else kernels:
        try:
            trial = try_kernel(kernel, weights, clock=clock)
        except (RuntimeError, AttributeError) as error:  # the operator does not exist, or not for this processor
            refused.append(f"{_name(kernel)}: {str(error).splitlines()[0]}")
            continue
        if obstacle := trial.obstacle(kind):
            refused.append(obstacle)
        elif best is None or sum(trial.ratios) < best[0]:
            best = sum(trial.ratios), kernel
    if best is None:
        raise ConfigurationError(
            f"weights cannot be quantised to {kind.value} here: {'; '.join(refused)}; set quantization to none, or "
            "runner to onnx",
            field="quantization",
        )
    return best[1]


def try_kernel(
    kernel: MakeWeight, weights: Sequence[torch.Tensor], *, clock: Callable[[], float] = time.perf_counter
) -> KernelTrial:
    """Measures a kernel on some layers' weights, taking turns with packed float32."""
    quantised = [kernel(weight, None) for weight in weights]
    error, dependence = _check(quantised[0], weights[0])
    packed = [PackedWeight(weight) for weight in weights]
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(max(*_MEASURED_ROWS, least_rows()), weights[0].shape[1], generator=generator)
    ratios: list[float] = []
    for rows in _MEASURED_ROWS:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(_REPEATS):
            times[0].append(_time(quantised, inputs[:rows], clock))
            times[1].append(_time(packed, inputs[: max(rows, least_rows())], clock))
        ratios.append(statistics.median(times[0]) / statistics.median(times[1]))
    return KernelTrial(_name(kernel), tuple(ratios), _MEASURED_ROWS, error, dependence)


def _time(
    weights: Sequence[Callable[[torch.Tensor], torch.Tensor]], inputs: torch.Tensor, clock: Callable[[], float]
) -> float:
    started = clock()
    for weight in weights:
        weight(inputs)
    return clock() - started


def _check(quantised: Weight, weight: torch.Tensor) -> tuple[float, float]:
    """Relative error of the product, and how far a row's result moves with the rows beside it."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(_CHECKED_ROWS, weight.shape[1], generator=generator)
    expected, product = functional.linear(inputs, weight), quantised(inputs)
    error = float((product - expected).norm() / expected.norm())
    alone = torch.cat([quantised(inputs[row : row + 1]) for row in range(_CHECKED_ROWS)])
    # The first row stays, the others become a hundred times as large: a common scale would follow them.
    louder = inputs * torch.tensor([1.0] + [100.0] * (_CHECKED_ROWS - 1)).unsqueeze(1)
    moved = max(float((product - alone).abs().max()), float((quantised(louder)[0] - product[0]).abs().max()))
    return error, moved / float(product.abs().max())


def _name(kernel: MakeWeight) -> str:
    return getattr(kernel, "__name__", repr(kernel))


def _input_levels() -> int:
    """Steps from 0 to the largest input of a row: 127, or 63 on processors whose 8-bit products may overflow."""
    return 127 if torch.cpu._is_vnni_supported() else 63


def _output_scale(weight: torch.Tensor) -> torch.Tensor:  # -> [out_features]
    return weight.detach().abs().amax(1).clamp_min_(_LEAST_NORM) / 127


def _split(inputs: torch.Tensor, levels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as two 8-bit parts: row = step * (high + low / (2 * levels)), high and low within [-levels, levels].

    Args:
        inputs: # [num_rows, in_features]
        levels: largest number of a part.

    Returns:
        All high parts, then all low ones, the latter not yet rounded # [2 * num_rows, in_features]; each row's step
        # [num_rows, 1], which depends on that row only.
    """
    step = torch.linalg.vector_norm(inputs, float("inf"), 1, keepdim=True).clamp_min_(_LEAST_NORM).div_(levels)
    scaled = inputs / step
    high = scaled.round()
    return torch.cat([high, scaled.sub_(high).mul_(2 * levels)]), step


def _join(products: torch.Tensor, step: torch.Tensor, levels: int) -> torch.Tensor:
    """The rows' products from those of their parts # [2 * num_rows, out_features] -> [num_rows, out_features]."""
    high, low = products.chunk(2)
    return torch.add(high, low, alpha=0.5 / levels).mul_(step)


def _with_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product if bias is None else product.add_(bias)


def _bytes_of(bias: torch.Tensor | None) -> int:
    return 0 if bias is None else bias.nbytes
