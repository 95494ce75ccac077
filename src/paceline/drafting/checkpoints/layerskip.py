"""LayerSkip: a target trained for early exit, as a whole repository or as an adapter on a base."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.adapted_model import ADAPTER_CONFIG, ADAPTER_FOLDER, EXIT_LAYER, is_adapter
from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.lora import LoraAdapter, load_lora
from paceline.checkpoint_files.weight_files import FIELD
from paceline.drafting.checkpoints.draft_vocabulary import load_exit_vocabulary
from paceline.drafting.checkpoints.layouts import Layout, is_causal_lm
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.errors import ConfigurationError, ModelError


@dataclass(frozen=True, slots=True)
class LayerSkipCheckpoint:
    """A target that drafts with its first layers.

    Attributes:
        folder: where it came from.
        exit_layer: drafts come from layers [0, exit_layer), the final norm and the head.
        layout: name of the layout it came in.
        adapter: to be added to the base when that is loaded, by `merge_lora`; None where `folder` is the whole model.
            The target is then base and adapter together, and so are plain decoding and its tokens.
        target_ids: ids that the first layers propose # [any number] int64; None for all.
    """

    folder: Path
    exit_layer: int
    layout: str
    adapter: LoraAdapter | None = None
    target_ids: torch.Tensor | None = None


def load_layerskip(folder: Path, target: TargetFacts, exit_layer: int | None = None) -> LayerSkipCheckpoint:
    """Reads what is needed to draft with a target's first layers.

    Args:
        folder: an adapter of `peft`, the repository of a whole model, or a base with an adapter, as
            `paceline.model_source.resolve` joins them. The whole model is loaded, and checked, as any target is.
        target: the base of the adapter, or that model.
        exit_layer: goes before the one that the folder names: in `config.json`, or an adapter's `adapter_config.json`.

    Raises:
        ModelError: the folder holds none of them, or the ids that it proposes are not the target's.
        ConfigurationError: no exit layer is named, or it is none of the target's.
    """
    names: tuple[str, ...]
    if is_adapter(folder):
        adapter, layout = load_lora(folder), Layout.LAYERSKIP_ADAPTER.value
        names = ("config.json", ADAPTER_CONFIG)
    else:
        config = HeadConfig.read(folder / "config.json")
        if not is_causal_lm(folder, config):
            raise ModelError(
                f"{folder} is neither a language model with a tokenizer nor an adapter: LayerSkip needs one of them",
                field=FIELD,
            )
        adapter, layout, names = None, Layout.CAUSAL_LM.value, ("config.json",)
    named = _exit_layer(folder, names)
    chosen = exit_layer if exit_layer is not None else named
    if chosen is None:
        raise ConfigurationError(
            f"{folder} names no exit layer: put one, such as {max(target.num_layers // 4, 1)}, into its config.json as "
            f"{EXIT_LAYER}, or into the setting",
            field=EXIT_LAYER,
        )
    if not 1 <= chosen < target.num_layers:
        raise ConfigurationError(
            f"{EXIT_LAYER} {chosen} is outside [1, {target.num_layers}), the layers of the target: drafts must leave "
            "before its last layer",
            field=EXIT_LAYER,
        )
    trained = folder / ADAPTER_FOLDER if is_adapter(folder / ADAPTER_FOLDER) else folder
    target_ids = load_exit_vocabulary(trained, target.vocab_size)
    return LayerSkipCheckpoint(folder, chosen, layout, adapter, target_ids)


def _exit_layer(folder: Path, names: tuple[str, ...]) -> int | None:
    """The exit layer that a folder names, in one of these files or in both alike."""
    found: dict[str, int] = {}
    for name in names:
        if not (folder / name).is_file():
            continue
        config = HeadConfig.read(folder / name)
        config.refuse_nested({EXIT_LAYER})
        if value := config.integer(EXIT_LAYER):
            found[name] = value
    if len(set(found.values())) > 1:
        said = ", ".join(f"{value} in {name}" for name, value in found.items())
        raise ConfigurationError(f"{folder}: {EXIT_LAYER} is {said}: keep the right one", field=EXIT_LAYER)
    return next(iter(found.values()), None)
