"""Adapters of `peft` (LoRA): read strictly, and added to the weights of a model when it is loaded."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from paceline.adapted_model import ADAPTER_CONFIG
from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.tensor_table import TensorTable
from paceline.checkpoint_files.weight_files import FIELD, read_tensors
from paceline.errors import ModelError

_KEY = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_OPTIONS = frozenset({"r", "lora_alpha", "peft_type", "use_rslora", "fan_in_fan_out", "exit_layer"})
_REFUSED = ("use_dora", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern", "lora_bias")


@dataclass(frozen=True, slots=True)
class LoraPair:
    """What is added to one weight: scale * up @ down.

    Attributes:
        down: # [rank, in_features]
        up: # [out_features, rank]
    """

    down: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter.

    Attributes:
        folder: where it came from.
        scale: of every product.
        pairs: by name of the module whose weight they are added to.
    """

    folder: Path
    scale: float
    pairs: Mapping[str, LoraPair]

    def cut(self, num_layers: int) -> LoraAdapter:
        """What of it concerns a model that is cut after its first layers."""
        behind = [name for name in self.pairs if (match := _LAYER.search(name)) and int(match[1]) >= num_layers]
        return replace(self, pairs={name: pair for name, pair in self.pairs.items() if name not in behind})


def load_lora(folder: Path) -> LoraAdapter:
    """Loads an adapter strictly.

    Args:
        folder: holds `adapter_config.json` and `adapter_model.safetensors` (or `.bin`).

    Raises:
        ModelError: tensors are missing, left over or of another shape.
        ConfigurationError: it is not a plain LoRA, or an option stands where nobody reads it.
    """
    config = HeadConfig.read(folder / ADAPTER_CONFIG)
    config.refuse_nested(_OPTIONS)
    if config.text("peft_type") not in {None, "LORA"}:
        raise config.wrong("peft_type", f"is {config.text('peft_type')!r}: LORA is supported")
    for name in _REFUSED:
        if config.values.get(name):
            raise config.wrong(name, "is not supported: plain LoRA of one rank is")
    if config.text("bias") not in {None, "none"}:
        raise config.wrong("bias", "must be none: trained biases are not supported")
    rank = config.integer("r")
    alpha = config.number("lora_alpha")
    if rank is None or alpha is None:
        raise config.wrong("r" if rank is None else "lora_alpha", "is missing")
    tensors = read_tensors(folder, ("adapter_model",))
    modules = {match[1] for name in tensors if (match := _KEY.fullmatch(name))}
    if not modules:
        raise ModelError(f"{folder} (layerskip-adapter): no LoRA pair is among its tensors", field=FIELD)
    table = TensorTable(f"{folder} (layerskip-adapter)", tensors, {name: name for name in tensors})
    needed = {_key(module, part) for module in modules for part in "AB"}
    table.check_names(needed, (), {})
    shapes = {}
    for module in modules:
        down, up = tensors[_key(module, "A")], tensors[_key(module, "B")]
        shapes[_key(module, "A")] = (rank, down.shape[-1] if down.dim() else 1)
        shapes[_key(module, "B")] = (up.shape[0] if up.dim() else 1, rank)
    table.check_shapes(shapes, "r must be that of adapter_config.json: give the file that belongs to it")
    pairs = {module: LoraPair(tensors[_key(module, "A")], tensors[_key(module, "B")]) for module in sorted(modules)}
    return LoraAdapter(folder, alpha / (rank**0.5 if config.flag("use_rslora") else rank), pairs)


@torch.no_grad()
def merge_lora(model: nn.Module, adapter: LoraAdapter) -> None:
    """Adds an adapter to a model's weights, in float32 and rounded once.

    Args:
        model: with the modules that the adapter was trained on; changed in place.
        adapter: to be added.

    Raises:
        ModelError: the model lacks one of them, or has it in another shape. The model is as it was then.
    """
    weights: dict[str, torch.Tensor] = {}
    wrong = []
    for name, pair in adapter.pairs.items():
        weight = _parameter(model, f"{name}.weight")
        shape = (pair.up.shape[0], pair.down.shape[1])
        if weight is None:
            wrong.append(f"{name} is missing")
        elif tuple(weight.shape) != shape:
            wrong.append(f"{name} is {list(weight.shape)}, expected {list(shape)}")
        else:
            weights[name] = weight
    if wrong:
        raise ModelError(
            f"{adapter.folder} was trained on another model: {'; '.join(wrong[:6])}; give the base that its "
            f"{ADAPTER_CONFIG} names",
            field=FIELD,
        )
    for name, weight in weights.items():
        pair = adapter.pairs[name]
        change = pair.up.to(weight.device, torch.float32) @ pair.down.to(weight.device, torch.float32)
        weight.copy_(weight.float() + adapter.scale * change)


def _parameter(model: nn.Module, name: str) -> torch.Tensor | None:
    try:
        return model.get_parameter(name)
    except AttributeError:
        return None


def _key(module: str, part: str) -> str:
    return f"base_model.model.{module}.lora_{part}.weight"
