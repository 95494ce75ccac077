"""Medusa heads from a folder, whatever layout they are in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.tensor_table import TensorTable
from paceline.checkpoint_files.weight_files import FIELD, read_tensors
from paceline.drafting.checkpoints.layouts import MEDUSA_STEMS, Layout, medusa_layout, without_medusa_prefix
from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint, MedusaConfig, ResidualLayer
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.drafting.checkpoints.vocabulary_map import check_token_map
from paceline.errors import ModelError

__all__ = ["MedusaCheckpoint", "MedusaConfig", "ResidualLayer", "load_medusa"]

_OPTIONS = frozenset(
    {
        "medusa_num_heads",
        "medusa_num_layers",
        "num_heads",
        "num_hidden_layers",
        "hidden_size",
        "vocab_size",
        "truncated_vocab_size",
        "medusa_fc_bias",
        "original_lm_head",
        "head_accuracies",
    }
)
_MOST = 100
"""Heads, and residual layers of one, are fewer: what a file claims beyond that is left over, and reported as such."""
_NUMBERED = re.compile(r"(\d\d?)\.(\d\d?)\.linear\.(weight|bias)")
_NUMBERED_HEAD = re.compile(r"(\d\d?)\.(\d\d?)\.weight")
_VLLM = re.compile(r"blocks\.(\d\d?)\.layers\.(\d\d?)\.(weight|bias)")
_VLLM_HEAD = re.compile(r"lm_heads\.(\d\d?)\.weight")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How many of everything there should be."""

    num_heads: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    has_bias: bool


def load_medusa(folder: Path, target: TargetFacts) -> MedusaCheckpoint:
    """Loads heads strictly: every tensor has its place, and every place its tensor.

    Args:
        folder: in the layout of Medusa (version 1 or 2, as a pickle or as safetensors) or of vLLM.
        target: the model that they draft for.

    Raises:
        ModelError: tensors are missing, left over or of another shape, or the vocabulary map is wrong.
        ConfigurationError: an option is wrong, contradicts the tensors, or stands where nobody reads it.
    """
    config = HeadConfig.read(folder / "config.json")
    config.refuse_nested(_OPTIONS)
    stored = read_tensors(folder, MEDUSA_STEMS)
    layout = medusa_layout(stored.keys())
    if layout is None:
        raise ModelError(
            f"{folder} has no Medusa heads: neither 0.0.linear nor blocks.0.layers.0 is among its tensors "
            f"({', '.join(sorted(stored)[:6])}, ...); docs/checkpoints.md lists the layouts",
            field=FIELD,
        )
    names: dict[str, str] = {}
    for name in stored:
        ours = _canonical(layout, name)
        names[f"second {name}" if ours in names else ours] = name  # a second one is left over, and reported as such
    table = TensorTable(f"{folder} ({layout.value})", {ours: stored[name] for ours, name in names.items()}, names)
    if layout is Layout.MEDUSA_VLLM:
        loaded = _load_vllm(config, table, target)
    else:
        loaded = _load_numbered(config, layout, table, target)
    return replace(loaded, head_accuracies=_head_accuracies(config, loaded.config.num_heads))


def _canonical(layout: Layout, stored: str) -> str:
    """`block.<head>.<layer>.weight|bias` for residual layers, `head.<head>.weight` for heads, else the stored name."""
    name = without_medusa_prefix(stored)
    residual = (_VLLM if layout is Layout.MEDUSA_VLLM else _NUMBERED).fullmatch(name)
    if residual:
        return f"block.{residual[1]}.{residual[2]}.{residual[3]}"
    own_head = (_VLLM_HEAD if layout is Layout.MEDUSA_VLLM else _NUMBERED_HEAD).fullmatch(name)
    return f"head.{own_head[1]}.weight" if own_head else name


def _stored(layout: Layout, name: str, num_layers: int) -> str:
    """What a layout calls a tensor of ours."""
    kind, head, *rest = name.split(".")
    if layout is Layout.MEDUSA_VLLM:
        return f"blocks.{head}.layers.{rest[0]}.{rest[1]}" if kind == "block" else f"lm_heads.{head}.weight"
    return f"{head}.{rest[0]}.linear.{rest[1]}" if kind == "block" else f"{head}.{num_layers}.weight"


def _load_numbered(config: HeadConfig, layout: Layout, table: TensorTable, target: TargetFacts) -> MedusaCheckpoint:
    """Version 1 (a head of its own each) and 2 (the target's head)."""
    own = layout is Layout.MEDUSA_V1
    if config.text("version") == "2" and own:
        raise config.wrong("version", "is 2, which has no heads of its own, and there are some: it should be 1")
    num_layers = _last(table, "block", 1) + 1
    if own:
        # A head comes after its residual layers. Version 1 makes them by repeating one module, which some tools store
        # once; then the head's number shows how often it is passed.
        places = {int(table.stored_names[name].split(".")[-2]) for name in table.tensors if name.startswith("head.")}
        if len(places) > 1:
            raise ModelError(
                f"{table.title}: heads come after {sorted(places)} residual layers: all must have as many", field=FIELD
            )
        table = _repeat_shared_layer(table, num_layers, places.pop())
        num_layers = _last(table, "block", 1) + 1
    _check_count(config, "medusa_num_layers", num_layers)
    sizes = _Sizes(
        _count_heads(config, "medusa_num_heads", table),
        num_layers,
        config.integer("hidden_size") or target.hidden_size,
        config.integer("vocab_size") or target.vocab_size,
        has_bias=True,
    )
    _check(table, layout, sizes, {f"head.{head}.weight" for head in range(sizes.num_heads)} if own else set())
    _check_target(table.title, sizes, sizes.vocab_size, target)
    heads = tuple(table.tensors[f"head.{head}.weight"] for head in range(sizes.num_heads)) if own else None
    return _checkpoint(table, layout, sizes, heads, None)


def _repeat_shared_layer(table: TensorTable, stored_layers: int, num_layers: int) -> TensorTable:
    """The table with a residual layer that was stored once for all places that it is passed in."""
    if stored_layers != 1 or num_layers <= 1:
        return table
    tensors, names = dict(table.tensors), dict(table.stored_names)
    for name in list(table.tensors):
        kind, head, *rest = name.split(".")
        if kind == "block":
            for layer in range(1, num_layers):
                repeated = f"block.{head}.{layer}.{rest[1]}"
                tensors[repeated], names[repeated] = tensors[name], names[name]
    return TensorTable(table.title, tensors, names)


def _load_vllm(config: HeadConfig, table: TensorTable, target: TargetFacts) -> MedusaCheckpoint:
    has_bias = config.flag("medusa_fc_bias") or False
    if not has_bias and any(name.startswith("block.") and name.endswith(".bias") for name in table.tensors):
        raise config.wrong("medusa_fc_bias", "is not true, and the residual layers have a bias: set it to true")
    num_layers = _last(table, "block", 1) + 1
    _check_count(config, "num_hidden_layers", num_layers)
    _check_count(config, "medusa_num_layers", num_layers)
    vocab_size = config.integer("vocab_size") or target.vocab_size
    columns = config.integer("truncated_vocab_size") or vocab_size
    shared = config.flag("original_lm_head") or False
    token_map = table.tensors.get("token_map")
    if columns != vocab_size and token_map is None:
        raise ModelError(
            f"{table.title}: wrong vocabulary map: truncated_vocab_size is {columns} of {vocab_size} and there is no "
            "token_map to say which ids they are; give the head with the map that it was trained with",
            field=FIELD,
        )
    if columns == vocab_size and token_map is not None:
        raise config.wrong("truncated_vocab_size", f"is not below vocab_size {vocab_size}, and there is a token_map")
    if token_map is not None:
        token_map = check_token_map(table.title, token_map, columns, vocab_size)
    single = "lm_head.weight" if "lm_head.weight" in table.tensors else "head.0.weight"
    num_heads = _count_heads(config, "num_heads", table)
    wanted = {single} if shared else {f"head.{head}.weight" for head in range(num_heads)}
    # Whole heads beside a map are cut to its ids.
    whole = token_map is not None and table.rows(single) == vocab_size
    sizes = _Sizes(
        num_heads,
        num_layers,
        config.integer("hidden_size") or target.hidden_size,
        vocab_size if whole else columns,
        has_bias,
    )
    _check(table, Layout.MEDUSA_VLLM, sizes, wanted, optional={"token_map"})
    _check_target(table.title, sizes, vocab_size, target)
    rows = token_map if whole and token_map is not None else slice(None)
    cut = {name: table.tensors[name][rows] for name in wanted}
    heads = tuple(cut[single if shared else f"head.{head}.weight"] for head in range(num_heads))
    return _checkpoint(table, Layout.MEDUSA_VLLM, sizes, heads, token_map)


def _checkpoint(
    table: TensorTable,
    layout: Layout,
    sizes: _Sizes,
    heads: tuple[torch.Tensor, ...] | None,
    token_map: torch.Tensor | None,
) -> MedusaCheckpoint:
    blocks = tuple(
        tuple(
            (table.tensors[f"block.{head}.{layer}.weight"], table.tensors.get(f"block.{head}.{layer}.bias"))
            for layer in range(sizes.num_layers)
        )
        for head in range(sizes.num_heads)
    )
    config = MedusaConfig(
        num_heads=sizes.num_heads,
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size if heads is None else int(heads[0].shape[0]),
        shared_head=heads is None,
        has_bias=sizes.has_bias,
    )
    return MedusaCheckpoint(config, blocks, heads, layout.value, token_map)


def _head_accuracies(config: HeadConfig, num_heads: int) -> tuple[tuple[float, ...], ...]:
    given = config.items("head_accuracies")
    rows = [row for row in given if isinstance(row, list) and row and all(map(_is_share, row))]
    if len(rows) != len(given) or len(given) not in {0, num_heads}:
        raise config.wrong("head_accuracies", f"must be {num_heads} lists of shares, one for each head")
    return tuple(tuple(float(share) for share in row) for row in rows)


def _is_share(value: object) -> bool:
    return type(value) in {int, float} and 0 <= value <= 1  # type: ignore[operator]


def _last(table: TensorTable, kind: str, part: int) -> int:
    """The largest number in a place of the names of a kind; -1 if there is none."""
    return max((int(name.split(".")[part + 1]) for name in table.tensors if name.startswith(f"{kind}.")), default=-1)


def _count_heads(config: HeadConfig, option: str, table: TensorTable) -> int:
    """Number of heads: what is there, since published configurations name fewer; never fewer than they name."""
    found = _last(table, "block", 0) + 1
    named = config.integer(option) or config.integer("medusa_num_heads") or 0
    return max(found, min(named, _MOST))


def _check_count(config: HeadConfig, option: str, found: int) -> None:
    named = config.integer(option)
    if named is not None and named != found:
        raise config.wrong(option, f"is {named}, and there are {found} residual layers per head")


def _check(
    table: TensorTable,
    layout: Layout,
    sizes: _Sizes,
    heads: set[str],
    optional: frozenset[str] | set[str] = frozenset(),
) -> None:
    kinds = ("weight", "bias") if sizes.has_bias else ("weight",)
    needed = {
        f"block.{head}.{layer}.{kind}"
        for head in range(sizes.num_heads)
        for layer in range(sizes.num_layers)
        for kind in kinds
    } | heads
    stored_as = {
        name: _stored(layout, name, sizes.num_layers) for name in needed if name.partition(".")[0] in {"block", "head"}
    }
    table.check_names(needed, optional, stored_as)
    shapes: Mapping[str, tuple[int, ...]] = {
        name: (sizes.vocab_size, sizes.hidden_size)
        if name in heads
        else (sizes.hidden_size, sizes.hidden_size)[: 2 if name.endswith("weight") else 1]
        for name in needed
    }
    table.check_shapes(shapes, "hidden_size and vocab_size are the target's: give the heads that were trained for it")


def _check_target(title: str, sizes: _Sizes, vocab_size: int, target: TargetFacts) -> None:
    if (sizes.hidden_size, vocab_size) != (target.hidden_size, target.vocab_size):
        raise ModelError(
            f"{title}: made for another target: hidden_size {sizes.hidden_size} (target: {target.hidden_size}), "
            f"vocab_size {vocab_size} (target: {target.vocab_size}); give the heads that were trained for this one",
            field=FIELD,
        )
