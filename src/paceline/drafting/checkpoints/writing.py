"""Writes checkpoints of our own, in layouts that other tools read too.

A file appears whole or not at all, and config.json appears last: a folder without one is no checkpoint.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.drafting.checkpoints.eagle_checkpoint import EagleCheckpoint, EagleConfig
from paceline.drafting.checkpoints.eagle_names import stored_name
from paceline.drafting.checkpoints.eagle_options import FORMAT_MARK
from paceline.drafting.checkpoints.layouts import Layout
from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint
from paceline.errors import ConfigurationError


def write_eagle(folder: Path, checkpoint: EagleCheckpoint) -> None:
    """Writes an EAGLE-1 head as SafeAILab's tools have it.

    Args:
        folder: made if it is not there; other files in it stay.
        checkpoint: of kind `eagle`, without extra norms.

    Raises:
        ConfigurationError: that layout has no place for it.
    """
    config = checkpoint.config
    if config.kind != "eagle" or config.input_layernorm:
        raise ConfigurationError("write_eagle writes heads of kind eagle without extra norms", field="kind")
    values = {"architectures": ["LlamaForCausalLM"], **_layer_values(config), "bias": config.fc_bias}
    _write(folder, "model.safetensors", _stored(Layout.EAGLE, checkpoint), values)


def write_eagle3(folder: Path, checkpoint: EagleCheckpoint, *, verifier: str = "", architecture: str = "") -> None:
    """Writes an EAGLE-3 head as `speculators` has it.

    Args:
        folder: made if it is not there; other files in it stay.
        checkpoint: of kind `eagle3`.
        verifier: name of the target.
        architecture: class of the target in `transformers`, such as `LlamaForCausalLM`.

    Raises:
        ConfigurationError: that layout has no place for it.
    """
    config = checkpoint.config
    if config.kind != "eagle3":
        raise ConfigurationError("write_eagle3 writes heads of kind eagle3", field="kind")
    values = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
        FORMAT_MARK: 1,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_values(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": verifier or None, "architectures": [architecture] if architecture else []},
        },
    }
    _write(folder, "model.safetensors", _stored(Layout.SPECULATORS_EAGLE3, checkpoint), values)


def write_medusa(folder: Path, checkpoint: MedusaCheckpoint, *, target_vocab_size: int, base: str = "") -> None:
    """Writes Medusa heads: as TGI has them where they share the target's head, otherwise as vLLM has them.

    Args:
        folder: made if it is not there; other files in it stay.
        checkpoint: to be written.
        target_vocab_size: ids of the target.
        base: name of the target.
    """
    config = checkpoint.config
    values: dict[str, Any] = {"base_model_name_or_path": base, "hidden_size": config.hidden_size}
    values |= {"vocab_size": target_vocab_size, "head_accuracies": checkpoint.head_accuracies}
    tensors: dict[str, torch.Tensor] = {}
    pattern = "{}.{}.linear" if config.shared_head else "blocks.{}.layers.{}"
    for head, block in enumerate(checkpoint.blocks):
        for layer, (weight, bias) in enumerate(block):
            tensors[f"{pattern.format(head, layer)}.weight"] = weight
            if bias is not None:
                tensors[f"{pattern.format(head, layer)}.bias"] = bias
    if checkpoint.heads is None:
        values |= {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers, "version": "2"}
        _write(folder, "medusa_lm_head.safetensors", tensors, values)
        return
    one_head = len(checkpoint.heads) > 1 and len({id(head) for head in checkpoint.heads}) == 1
    stored = checkpoint.heads[:1] if one_head else checkpoint.heads
    tensors |= {f"lm_heads.{head}.weight": weight for head, weight in enumerate(stored)}
    values |= {"architectures": ["MedusaModel"], "model_type": "medusa", "num_heads": config.num_heads}
    values |= {"num_hidden_layers": config.num_layers, "medusa_fc_bias": config.has_bias, "original_lm_head": one_head}
    if checkpoint.token_map is not None:
        tensors["token_map"] = checkpoint.token_map
        values["truncated_vocab_size"] = config.vocab_size
    _write(folder, "model.safetensors", tensors, values)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Writes a safetensors file that appears whole or not at all; tensors of any device and layout."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    _replace(path, lambda scratch: save_file(plain, scratch, metadata={"format": "pt"}))


def write_json(path: Path, values: Mapping[str, Any], *, compact: bool = False) -> None:
    """Writes a file of JSON that appears whole or not at all; compact: for machines only, as short as can be."""
    if compact:
        text = json.dumps(values, ensure_ascii=False, separators=(",", ":"))
    else:
        text = json.dumps(values, indent=2) + "\n"
    _replace(path, lambda scratch: scratch.write_text(text, encoding="utf-8"))


def _write(folder: Path, name: str, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / name, tensors)
    write_json(folder / "config.json", values)


def _stored(layout: Layout, checkpoint: EagleCheckpoint) -> dict[str, torch.Tensor]:
    tensors = {stored_name(layout, name): tensor for name, tensor in checkpoint.weights.items()}
    maps = {"d2t": checkpoint.d2t, "t2d": checkpoint.t2d}
    return tensors | {name: tensor for name, tensor in maps.items() if tensor is not None}


def _layer_values(config: EagleConfig) -> dict[str, Any]:
    """The decoder layer's options, as `transformers` has them for a Llama."""
    rope = dict(config.rope)
    theta = rope.pop("rope_theta")
    values = {
        "model_type": "llama",
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": None if rope == {"rope_type": "default"} else rope,
        "vocab_size": config.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }
    if config.max_model_len is not None:
        values["max_position_embeddings"] = config.max_model_len
    return values


def _replace(path: Path, write: Callable[[Path], object]) -> None:
    """Lets a file be written under another name beside it, and renames it when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    os.close(handle)
    scratch = Path(name)
    try:
        write(scratch)
        scratch.chmod(0o644)
        with scratch.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
