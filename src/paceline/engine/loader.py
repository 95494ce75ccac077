"""Loads a decoder language model of `transformers` from a local folder, or says why it cannot serve here.

What is refused is refused at start, with the reason and what to do: models whose state cannot be rolled back (recurrent
or linear-attention layers), encoders, models whose attention does not go through `transformers`' attention interface,
and models whose logits through the paged pool differ from their own (`paceline.engine.self_check`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from paceline.adapted_model import ADAPTER_FOLDER, is_adapter
from paceline.checkpoint_files.lora import load_lora, merge_lora
from paceline.errors import ConfigurationError, ModelError

logger = logging.getLogger(__name__)

_NAMED = 6
"""Tensors that a message names."""
_RECURRENT_LAYERS = ("mamba", "hybrid", "linear_attention", "recurrent", "conv", "ssm", "rwkv")


class ModelDtype(Enum):
    """Number format of weights and key/value rows."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The same as torch calls it."""
        return _TORCH_DTYPES[self]


_TORCH_DTYPES = {
    ModelDtype.FLOAT32: torch.float32,
    ModelDtype.BFLOAT16: torch.bfloat16,
    ModelDtype.FLOAT16: torch.float16,
}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, not yet bound to a pool.

    Attributes:
        model: in evaluation mode, on its device.
        folder: where it came from.
        eos_token_ids: tokens that end a generation; at least one.
        max_model_len: most tokens of a sequence that the model was made for.
        vocab_size: number of token ids that the model knows; padding columns of the head included.
    """

    model: PreTrainedModel
    folder: Path
    eos_token_ids: tuple[int, ...]
    max_model_len: int
    vocab_size: int


def load_model(
    folder: Path, *, dtype: ModelDtype = ModelDtype.FLOAT32, device: str = "cpu", num_layers: int | None = None
) -> LoadedModel:
    """Loads a model from safetensors; code that comes with a model is never run.

    An adapter that `paceline.model_source.resolve` has put beside the weights is added to them.

    Args:
        folder: as `paceline.model_source.resolve` returns it.
        dtype: number format.
        device: "cpu" or "cuda:N".
        num_layers: only the first layers are loaded, before the final norm and the head; None for all.

    Raises:
        ModelError: the model cannot serve; says why and what to do.
        ConfigurationError: the device is not there.
    """
    _check_device(device)
    config = _load_config(folder)
    _check_config(config, folder)
    if num_layers is not None:
        _cut(config, num_layers)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{folder} has no tokenizer.json: give a model with a fast tokenizer", field="model")
    eos_token_ids = find_eos_token_ids(folder)
    if not eos_token_ids:
        raise ModelError(
            f"{folder} names no end-of-sequence token: set eos_token_id in its generation_config.json", field="model"
        )
    max_model_len = _context_limit(config)
    try:
        with _quiet():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype.torch_dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                attn_implementation="eager",
                device_map=None if device == "cpu" else {"": device},
                # All that does not fit is told at once, by `_check_weights`.
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except (ValueError, OSError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"{folder} cannot be loaded as a causal language model: {error}", field="model") from error
    model: PreTrainedModel
    model, found = loaded
    _check_weights(folder, found, whole=num_layers is None)
    model.train(mode=False).requires_grad_(requires_grad=False)
    if is_adapter(folder / ADAPTER_FOLDER):
        adapter = load_lora(folder / ADAPTER_FOLDER)
        merge_lora(model, adapter if num_layers is None else adapter.cut(num_layers))
    return LoadedModel(model, folder, eos_token_ids, max_model_len, config.get_text_config().vocab_size)


@torch.inference_mode()
def own_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """Logits of every token by the model's own attention, without any cache # [len(tokens), vocab_size] float32."""
    ids = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return logits.float()


def _check_weights(folder: Path, found: Mapping[str, Any], *, whole: bool) -> None:
    """Refuses weights that would be made up, and tells of those that are not used.

    Args:
        folder: of the model.
        found: what `transformers` says about loading.
        whole: all layers were wanted, so that nothing should be left.

    Raises:
        ModelError: tensors are missing or have another shape.
    """
    wrong = [f"{name} is missing" for name in sorted(found["missing_keys"])]
    wrong += [
        f"{name} is {list(stored)}, expected {list(expected)}"
        for name, stored, expected in sorted(found["mismatched_keys"])
    ]
    if wrong:
        raise ModelError(
            f"{folder} does not hold the model that its config.json describes: {_first_few(wrong)}; fetch or write it "
            "anew",
            field="model",
        )
    if whole and (unused := sorted(found["unexpected_keys"])):
        logger.warning(
            "tensors that config.json does not call for are not used",
            extra={"model": str(folder), "tensors": _first_few(unused)},
        )


def _first_few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps `transformers` from drawing into a service's log."""
    shown = transformers_logging.is_progress_bar_enabled()
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def find_eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Tokens that end a generation, from generation_config.json, else from config.json; empty if neither names any.

    Raises:
        ModelError: one of them is damaged.
    """
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.is_file():
            continue
        try:
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise ModelError(f"{path} is no JSON object: {error}", field="model") from error
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids:
            return tuple(ids)
    return ()


def _check_device(device: str) -> None:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return
    if kind != "cuda" or not (index or "0").isdecimal():
        raise ConfigurationError(f"device {device!r} is not known: use cpu or cuda:N", field="device")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= count:
        raise ConfigurationError(f"device {device!r} is not there: torch sees {count} CUDA devices", field="device")


def _load_config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError, StrictDataclassError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"the configuration of {folder} cannot be read: {reason}", field="model") from error
    if not isinstance(config, PreTrainedConfig):
        raise ModelError(f"{folder} has no model configuration", field="model")
    return config


def _check_config(config: PreTrainedConfig, folder: Path) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{folder} is an encoder-decoder model: give a decoder-only model", field="model")
    layer_types = getattr(config.get_text_config(), "layer_types", None) or ()
    recurrent = sorted({kind for kind in layer_types if any(word in kind for word in _RECURRENT_LAYERS)})
    if recurrent:
        raise ModelError(
            f"{folder} has layers of kind {', '.join(recurrent)}, whose state cannot be rolled back to an earlier "
            "token: give a model with attention layers only",
            field="model",
        )


def _cut(config: PreTrainedConfig, num_layers: int) -> None:
    """Makes a configuration that of the first layers alone.

    Raises:
        ConfigurationError: there are not as many.
    """
    text = config.get_text_config()
    if not 1 <= num_layers <= text.num_hidden_layers:
        raise ConfigurationError(
            f"{num_layers} layers are wanted of a model with {text.num_hidden_layers}", field="exit_layer"
        )
    text.num_hidden_layers = num_layers
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:num_layers]


def _context_limit(config: PreTrainedConfig) -> int:
    """Most tokens for which a position's encoding does not depend on the length of the pass it is computed in.

    Raises:
        ModelError: the configuration names no limit.
    """
    text = config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelError("the model's configuration names no max_position_embeddings", field="model")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"longrope", "dynamic"}:
        # Beyond the original length these recompute all angles from the longest position in the pass; rows computed
        # before would no longer fit.
        return min(limit, int(rope.get("original_max_position_embeddings") or limit))
    return limit
