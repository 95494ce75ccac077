"""Parts of the target that drafting heads use: its embedding, its head and its final norm, kept in memory once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from paceline.adapted_model import ADAPTER_FOLDER, is_adapter
from paceline.checkpoint_files.lora import load_lora
from paceline.engine.loader import ModelDtype
from paceline.engine.native.family import KNOWN_MODELS
from paceline.engine.native.norms import Norm
from paceline.engine.native.tables import PlainTable, TiedTable
from paceline.engine.native.weights import MakeWeight, PlainWeight, Weight
from paceline.engine.packing import PackedWeight, least_rows, packing_obstacle, pad_rows
from paceline.errors import ModelError


@dataclass(frozen=True, slots=True)
class SharedParts:
    """What a drafting head borrows from the target.

    Attributes:
        embed: token ids # [n] int64 -> [n, hidden_size]
        head: rows after the final norm # [n, hidden_size] -> logits # [n, vocab_size]
        norm: the final norm # [n, hidden_size] -> [n, hidden_size]
        hidden_size: numbers per row.
        num_layers: decoder layers of the target.
        vocab_size: columns of the logits.
        dtype: of rows and weights.
        device: where they are.
        weights_bytes: memory of these parts where they are there for the head alone; 0 where they are the runner's own.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    head: Callable[[torch.Tensor], torch.Tensor]
    norm: Callable[[torch.Tensor], torch.Tensor]
    hidden_size: int
    num_layers: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    weights_bytes: int = 0


def load_shared_parts(
    folder: Path, *, dtype: ModelDtype = ModelDtype.FLOAT32, device: str = "cpu", pack: bool = True
) -> SharedParts:
    """Loads only what a drafting head borrows, for a process that runs a head without its target.

    A tied table is in memory once, packed for the CPU's kernels where that is possible.

    Args:
        folder: the target's, with safetensors.
        dtype: number format.
        device: "cpu" or "cuda:N".
        pack: whether to pack weights where that is possible.

    Raises:
        ModelError: the target is of an architecture whose parts are not known, its files lack one of them, or it is an
            adapter that changes one of them.
    """
    config = _read_config(folder)
    _check_adapter(folder)
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}
    if not config.tie_word_embeddings:
        names["head"] = "lm_head.weight"
    place = torch.device(device)
    tensors = _read(folder, names, place, dtype.torch_dtype)
    table, norm = tensors["embed"], Norm(tensors["norm"], config.rms_norm_eps)
    packed = pack and not packing_obstacle(nn.Embedding(table.shape[0], table.shape[1], _weight=table))
    make: MakeWeight = PackedWeight if packed else PlainWeight
    embedding: PlainTable | TiedTable
    head: Weight
    if "head" in tensors:
        embedding, head = PlainTable(table), make(tensors["head"], None)
        num_bytes = embedding.num_bytes + head.num_bytes
    elif packed:
        embedding = head = TiedTable(table)
        num_bytes = head.num_bytes
    else:
        embedding, head = PlainTable(table), PlainWeight(table)
        num_bytes = head.num_bytes
    return SharedParts(
        embed=embedding.embed,
        head=_PaddedHead(head, least_rows() if packed else 0),
        norm=norm,
        hidden_size=config.hidden_size,
        num_layers=config.num_hidden_layers,
        vocab_size=tensors.get("head", table).shape[0],
        dtype=dtype.torch_dtype,
        device=place,
        weights_bytes=num_bytes + norm.weight.nbytes,
    )


@dataclass(frozen=True, slots=True)
class _PaddedHead:
    """A head that is given as many rows as its kernel likes; see `packing.padded_count`."""

    weight: Weight
    least_rows: int

    def __call__(self, rows: torch.Tensor, /) -> torch.Tensor:  # [n, hidden_size] -> [n, vocab_size]
        return self.weight(pad_rows(rows, self.least_rows))[: rows.shape[0]]


def _read_config(folder: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"the configuration of {folder} cannot be read: {error}", field="model") from error
    known = [kind.__name__ for kind in KNOWN_MODELS]
    if not isinstance(config, PreTrainedConfig) or not set(getattr(config, "architectures", None) or ()) & set(known):
        raise ModelError(
            f"{folder} is none of {', '.join(known)}: which of its weights are its embedding, norm and head is not "
            "known; let the verifier draft by itself",
            field="model",
        )
    return config


def _check_adapter(folder: Path) -> None:
    if not is_adapter(folder / ADAPTER_FOLDER):
        return
    changed = [name for name in load_lora(folder / ADAPTER_FOLDER).pairs if not name.startswith("model.layers.")]
    if changed:
        raise ModelError(
            f"the adapter of {folder} changes {', '.join(changed)}, which a head borrows as the base has it: let the "
            "verifier draft by itself",
            field="model",
        )


def _read(folder: Path, names: dict[str, str], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Copies of these tensors, by the keys of `names`."""
    index = folder / "model.safetensors.index.json"
    try:
        places = json.loads(index.read_text("utf-8"))["weight_map"] if index.is_file() else {}
        tensors = {}
        for key, name in names.items():
            with safe_open(folder / places.get(name, "model.safetensors"), framework="pt") as file:
                tensors[key] = file.get_tensor(name).to(device=device, dtype=dtype, copy=True)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"{folder} has no {', '.join(names.values())} as safetensors ({error}): give the folder of the target",
            field="model",
        ) from error
    return tensors
