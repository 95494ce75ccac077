"""Quantised weights: how near they are, that rows do not mix, and when they are refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.engine.load_runner import load_runner
from paceline.engine.loader import load_model
from paceline.engine.native import build
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.native.weights import MakeWeight, Weight
from paceline.engine.quantised_linear import (
    FbgemmInt8Weight,
    Int4Weight,
    OnednnInt8Weight,
    choose_kernel,
    try_kernel,
)
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import Quantization, RunnerChoice, RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.errors import ConfigurationError
from tests.fakes.tiny_models import SERVED, Architecture, write_model

INT8: list[MakeWeight] = [FbgemmInt8Weight, OnednnInt8Weight]
KERNELS: list[tuple[MakeWeight, float]] = [*((kernel, 0.03) for kernel in INT8), (Int4Weight, 0.15)]
WEIGHT = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
BIAS = torch.arange(48.0)


def paced(quantised_s: float, packed_s: float) -> Callable[[], float]:
    """A clock for `try_kernel`, which measures the quantised and the packed product in turn."""
    steps = itertools.cycle((0.0, quantised_s, 0.0, packed_s))
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += next(steps)
        return now

    return clock


class SharedScale:
    """Inputs rounded with one scale for all rows of a pass, as torch's dynamic quantisation does."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self.num_bytes = 0

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:
        scale = inputs.abs().max() / 127
        return (inputs / scale).round() * scale @ self._weight.T


class Wrong(OnednnInt8Weight):
    """Off by a half."""

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:
        return super().__call__(inputs) * 1.5


@pytest.mark.parametrize(("kernel", "most_error"), KERNELS)
@pytest.mark.parametrize("bias", [None, BIAS])
def test_products_are_near_those_of_float32(kernel: MakeWeight, most_error: float, bias: torch.Tensor | None) -> None:
    expected = ROWS @ WEIGHT.T + (0 if bias is None else bias)
    product = kernel(WEIGHT, bias)(ROWS)
    assert product.shape == expected.shape
    assert product.dtype == torch.float32
    assert float((product - expected).norm() / (ROWS @ WEIGHT.T).norm()) < most_error


@pytest.mark.parametrize(("kernel", "most_error"), KERNELS)
def test_one_huge_input_does_not_round_the_others_away(kernel: MakeWeight, most_error: float) -> None:
    """Rows of language models have such numbers; the weight that they meet is 0 here, so that only the others count."""
    rows, weight = ROWS.clone(), WEIGHT.clone()
    rows[:, 7], weight[:, 7] = 200.0, 0.0
    expected = rows @ weight.T
    bias = torch.zeros(48)
    # The 4-bit weight's zero is not exact, so what the kernel itself makes of the huge input is taken away.
    alone = torch.zeros_like(rows)
    alone[:, 7] = 200.0
    quantised = kernel(weight, bias)
    assert float((quantised(rows) - quantised(alone) - expected).norm() / expected.norm()) < 2 * most_error


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in KERNELS])
def test_a_row_does_not_depend_on_its_neighbours(kernel: MakeWeight) -> None:
    weight = kernel(WEIGHT, BIAS)
    together = weight(ROWS)
    for row in range(len(ROWS)):
        assert torch.allclose(weight(ROWS[row : row + 1])[0], together[row], rtol=1e-5, atol=1e-5)
    louder = ROWS.clone()
    louder[1:] *= 1000
    assert torch.allclose(weight(louder)[0], together[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [kernel for kernel, _ in KERNELS])
def test_rows_without_numbers_hurt_only_themselves(kernel: MakeWeight) -> None:
    rows = ROWS[:4].clone()
    rows[1, 3] = float("nan")
    rows[2, 5] = float("inf")
    rows[3] = 0.0
    product = kernel(WEIGHT, BIAS)(rows)
    assert torch.allclose(product[0], kernel(WEIGHT, BIAS)(ROWS[:1])[0], atol=1e-5)
    assert not product[1].isfinite().any()
    assert not product[2].isfinite().any()
    assert torch.equal(product[3], BIAS)


@pytest.mark.parametrize(("kernel", "bits"), [(FbgemmInt8Weight, 8), (OnednnInt8Weight, 8), (Int4Weight, 4)])
def test_weights_take_their_bits_and_scales(kernel: MakeWeight, bits: int) -> None:
    num_bytes = kernel(WEIGHT, None).num_bytes
    assert WEIGHT.numel() * bits // 8 < num_bytes <= WEIGHT.numel() * (bits + 2) // 8


def test_four_bits_take_any_number_of_outputs_but_whole_groups_of_inputs() -> None:
    assert Int4Weight(WEIGHT[:37], None)(ROWS).shape == (9, 37)
    with pytest.raises(ConfigurationError, match="63 inputs"):
        Int4Weight(WEIGHT[:, :63], None)


def test_the_fastest_kernel_is_taken() -> None:
    assert choose_kernel(Quantization.INT8, [WEIGHT], kernels=INT8[:1], clock=paced(0.5, 1.0)) is INT8[0]
    times = itertools.chain(*([0.0, pace, 0.0, 1.0] * 14 for pace in (0.9, 0.5)))
    clock = itertools.accumulate(times).__next__
    assert choose_kernel(Quantization.INT8, [WEIGHT], kernels=INT8, clock=clock) is INT8[1]


def test_what_is_slower_than_float32_is_refused_with_the_figures() -> None:
    with pytest.raises(ConfigurationError, match=r"takes 1\.25 and 1\.25 times as long .* set quantization to none"):
        choose_kernel(Quantization.INT8, [WEIGHT], clock=paced(1.25, 1.0))


def test_what_mixes_rows_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="SharedScale: a row's result depends on its neighbours"):
        choose_kernel(Quantization.INT8, [WEIGHT], kernels=[SharedScale], clock=paced(0.1, 1.0))


def test_what_is_wrong_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="Wrong: its products are off by 50%"):
        choose_kernel(Quantization.INT8, [WEIGHT], kernels=[Wrong], clock=paced(0.1, 1.0))


def test_an_operator_that_is_not_there_is_refused() -> None:
    def missing(_weight: torch.Tensor, _bias: torch.Tensor | None) -> Weight:
        raise RuntimeError("no such operator")

    with pytest.raises(ConfigurationError, match="missing: no such operator"):
        choose_kernel(Quantization.INT4, [WEIGHT], kernels=[missing])


def test_a_trial_reports_ratios_of_one_and_four_rows() -> None:
    trial = try_kernel(OnednnInt8Weight, [WEIGHT, WEIGHT], clock=paced(0.25, 0.5))
    assert trial.rows == (1, 4)
    assert trial.ratios == pytest.approx((0.5, 0.5))
    assert trial.error < 0.03
    assert trial.dependence <= 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tied = SERVED["llama_tied_bias"]
    whole_groups = Architecture(tied.config_class, {**tied.arguments, "intermediate_size": 64})
    return write_model(tmp_path_factory.mktemp("quantised") / "llama", whole_groups)


def options(quantization: Quantization, runner: RunnerChoice = RunnerChoice.AUTO) -> RunnerOptions:
    return RunnerOptions(kv_bytes=1 << 20, quantization=quantization, runner=runner)


def logits(runner: NativeRunner, tokens: tuple[int, ...]) -> torch.Tensor:
    kv = runner.new_sequence()
    kv.reserve(len(tokens))
    result = runner.forward([SequencePass(kv, tokens, num_logits=len(tokens))])[0]
    kv.free()
    return result


@pytest.mark.parametrize(
    ("quantization", "kernel", "most_error"),
    [(Quantization.INT8, OnednnInt8Weight, 0.15), (Quantization.INT4, Int4Weight, 0.6)],
)
def test_a_quantised_model_says_nearly_the_same(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    quantization: Quantization,
    kernel: MakeWeight,
    most_error: float,
) -> None:
    # Of a tiny model the products take no time, so that the real clock would refuse.
    monkeypatch.setattr(build, "choose_kernel", lambda _kind, _weights: kernel)
    plain, quantised = (load_runner(folder, options=options(kind)) for kind in (Quantization.NONE, quantization))
    assert isinstance(plain, NativeRunner)
    assert isinstance(quantised, NativeRunner)
    tokens = (1, 12, 53, 4, 9, 6, 7)
    expected = logits(plain, tokens)
    error = float((logits(quantised, tokens) - expected).norm() / expected.norm())
    assert 1e-4 < error < most_error
    assert quantised.info.quantization == quantization.value
    assert quantised.info.weights_bytes < plain.info.weights_bytes
    with pytest.raises(ConfigurationError, match="quantise draft models only"):
        TargetEngine(quantised)


@pytest.mark.parametrize(
    ("architecture", "runner", "reason"),
    [("phi3", RunnerChoice.AUTO, "Phi3ForCausalLM"), ("llama", RunnerChoice.TRANSFORMERS, "runner is transformers")],
)
def test_only_the_native_runner_quantises(tmp_path: Path, architecture: str, runner: RunnerChoice, reason: str) -> None:
    folder = write_model(tmp_path / architecture, SERVED[architecture])
    with pytest.raises(ConfigurationError, match=rf"only the native runner quantises.*{reason}"):
        load_runner(folder, options=options(Quantization.INT8, runner))


def test_only_float32_is_quantised(folder: Path) -> None:
    loaded = load_model(folder)
    loaded.model.bfloat16()
    with pytest.raises(ConfigurationError, match=r"weights are torch\.bfloat16"):
        NativeRunner(loaded, options(Quantization.INT8))
