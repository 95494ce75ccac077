"""Loads a model and chooses the code that runs it."""

from __future__ import annotations

import logging
from pathlib import Path

from paceline.engine.loader import ModelDtype, load_model
from paceline.engine.native.family import native_obstacle
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner_options import DEFAULT_OPTIONS, Quantization, RunnerChoice, RunnerOptions
from paceline.engine.transformers_runner import TransformersRunner
from paceline.errors import ConfigurationError, ModelError
from paceline.huge_pages import move_to_huge_pages

logger = logging.getLogger(__name__)

LoadedRunner = NativeRunner | TransformersRunner


def load_runner(
    folder: Path,
    *,
    dtype: ModelDtype = ModelDtype.FLOAT32,
    device: str = "cpu",
    options: RunnerOptions = DEFAULT_OPTIONS,
    num_layers: int | None = None,
) -> LoadedRunner:
    """Loads a model from safetensors and gets it ready to run.

    Args:
        folder: as `paceline.model_source.resolve` returns it.
        dtype: number format.
        device: "cpu" or "cuda:N".
        options: how to run it; `options.runner` says with which code.
        num_layers: only the first layers are loaded and run, before the final norm and the head; None for all.

    Raises:
        ModelError: the model cannot serve; says why and what to do.
        ConfigurationError: the device is not there, the key/value budget is too small, the native runner was asked for
            and does not know the model, or weights are to be quantised and cannot be.
    """
    runner = _load(folder, dtype, device, options, num_layers)
    if device == "cpu":
        move_to_huge_pages(runner.info.weights_bytes)
    return runner


def _load(folder: Path, dtype: ModelDtype, device: str, options: RunnerOptions, num_layers: int | None) -> LoadedRunner:
    """The runner that `options` asks for, or the one that can run the model."""
    loaded = load_model(folder, dtype=dtype, device=device, num_layers=num_layers)
    quantised = options.quantization is not Quantization.NONE
    if options.runner is RunnerChoice.TRANSFORMERS and not quantised:
        return TransformersRunner(loaded, options)
    reason = native_obstacle(loaded.model)
    if options.runner is RunnerChoice.TRANSFORMERS:
        reason = "runner is transformers"
    if not reason:
        try:
            return NativeRunner(loaded, options)
        except ModelError as error:
            reason = error.message
    if quantised:
        raise ConfigurationError(
            f"only the native runner quantises weights, and it cannot run {folder}: {reason}; set quantization to none",
            field="quantization",
        )
    if options.runner is RunnerChoice.NATIVE:
        raise ConfigurationError(
            f"the native runner cannot run {folder}: {reason}; set runner to auto or transformers", field="runner"
        )
    logger.info("the transformers runner serves", extra={"model": str(folder), "reason": reason})
    # Loaded anew, because the native runner may have taken the weights away.
    return TransformersRunner(load_model(folder, dtype=dtype, device=device, num_layers=num_layers), options)
