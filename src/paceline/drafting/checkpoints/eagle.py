"""EAGLE heads from a folder, whatever layout they are in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.tensor_table import TensorTable
from paceline.checkpoint_files.weight_files import FIELD, read_tensors
from paceline.drafting.checkpoints.eagle_checkpoint import EagleCheckpoint, EagleConfig, EagleKind
from paceline.drafting.checkpoints.eagle_names import (
    ATTENTION,
    INV_FREQ,
    MAPS,
    canonical_name,
    expected_shapes,
    needed_names,
    stored_name,
)
from paceline.drafting.checkpoints.eagle_options import read_eagle_config
from paceline.drafting.checkpoints.layouts import Layout, eagle_layout
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.drafting.checkpoints.vocabulary_map import check_draft_map
from paceline.errors import ConfigurationError, ModelError

__all__ = ["EagleCheckpoint", "EagleConfig", "EagleKind", "load_eagle"]


def load_eagle(folder: Path, target: TargetFacts) -> EagleCheckpoint:
    """Loads a head strictly: every tensor has its place, and every place its tensor.

    Args:
        folder: in one of the layouts of SafeAILab (EAGLE-1 to 3) or `speculators` (eagle, eagle3).
        target: the model that it drafts for.

    Raises:
        ModelError: tensors are missing, left over or of another shape, or the vocabulary map is wrong.
        ConfigurationError: an option is not supported, contradicts another, or stands where nobody reads it.
    """
    config_file = HeadConfig.read(folder / "config.json")
    stored = read_tensors(folder)
    layout = eagle_layout(config_file, stored.keys())
    if layout is None:
        raise ModelError(
            f"{folder} is no EAGLE head: no fc or midlayer among its tensors ({', '.join(sorted(stored)[:6])}, "
            "...); docs/checkpoints.md lists the layouts",
            field=FIELD,
        )
    table = _table(folder, layout, stored)
    config = read_eagle_config(config_file, layout, table, target)
    title = table.title
    optional = {"embed_tokens.weight", INV_FREQ}
    if config.kind == "eagle3":
        optional |= set(MAPS)
    if config.attention_bias:
        optional.add(f"{ATTENTION[3]}.bias")
    needed = needed_names(config)
    table.check_names(needed, optional, {name: stored_name(layout, name) for name in needed})
    table.check_shapes(
        expected_shapes(config), "the sizes must be those of config.json: give the file that belongs to it"
    )
    _check_attention(title, config)
    _check_target(title, config, table.tensors, target)
    _check_angles(title, config, table.tensors.get(INV_FREQ))
    d2t, t2d = (table.tensors.get(name) for name in MAPS)
    d2t = check_draft_map(title, d2t, t2d, config.draft_vocab_size, config.vocab_size)
    weights = {name: tensor for name, tensor in table.tensors.items() if name not in {*MAPS, INV_FREQ}}
    return EagleCheckpoint(config, weights, layout.value, d2t, t2d)


def _table(folder: Path, layout: Layout, stored: Mapping[str, torch.Tensor]) -> TensorTable:
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in stored.items():
        canonical = canonical_name(layout, name)
        canonical = f"second {name}" if canonical in tensors else canonical  # left over, and reported as such
        tensors[canonical], names[canonical] = tensor, name
    return TensorTable(f"{folder} ({layout.value})", tensors, names)


def _check_attention(title: str, config: EagleConfig) -> None:
    """Query heads share key/value heads evenly, and angles turn pairs of numbers."""
    if config.head_dim % 2:
        raise ConfigurationError(f"{title}: head_dim is {config.head_dim}: it must be even", field="head_dim")
    if config.num_heads % config.num_kv_heads:
        raise ConfigurationError(
            f"{title}: num_key_value_heads is {config.num_kv_heads}: it must divide num_attention_heads, "
            f"{config.num_heads}; put the numbers that the head was trained with into config.json",
            field="num_key_value_heads",
        )


def _check_target(title: str, config: EagleConfig, tensors: Mapping[str, torch.Tensor], target: TargetFacts) -> None:
    """The head fits the target."""
    own = {"hidden_size": config.hidden_size} if config.kind == "eagle" or "embed_tokens.weight" not in tensors else {}
    sizes = {"target_hidden_size": config.target_hidden_size, "vocab_size": config.vocab_size, **own}
    actual = {
        "target_hidden_size": target.hidden_size,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
    }
    if wrong := [f"{name} {size} (target: {actual[name]})" for name, size in sizes.items() if size != actual[name]]:
        raise ModelError(
            f"{title}: made for another target: {', '.join(wrong)}; give the head that was trained for this one",
            field=FIELD,
        )


def _check_angles(title: str, config: EagleConfig, stored: torch.Tensor | None) -> None:
    """A stored table of rotary frequencies is that of the settings."""
    if stored is None or config.rope["rope_type"] != "default":
        return
    exponents = torch.arange(0, config.head_dim, 2) / config.head_dim
    expected = float(str(config.rope["rope_theta"])) ** -exponents
    if stored.shape != expected.shape or not torch.allclose(stored.float(), expected, rtol=1e-2):
        raise ModelError(
            f"{title}: the stored rotary frequencies are not those of rope_theta {config.rope['rope_theta']} and "
            f"{config.head_dim} numbers per head: put the value that it was trained with into config.json",
            field=FIELD,
        )
