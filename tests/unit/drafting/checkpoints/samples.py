"""Small checkpoints of every layout, with the keys and options that the tools which made the layouts write."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.drafting.checkpoints.draft_vocabulary import load_draft_vocabulary
from paceline.drafting.checkpoints.eagle import load_eagle
from paceline.drafting.checkpoints.layerskip import load_layerskip
from paceline.drafting.checkpoints.medusa import load_medusa
from paceline.drafting.checkpoints.target_facts import TargetFacts

HIDDEN, INNER, VOCAB, DRAFT_VOCAB, HEADS, KV_HEADS, HEAD_DIM = 8, 12, 20, 6, 2, 1, 4
TARGET = TargetFacts(hidden_size=HIDDEN, num_layers=12, vocab_size=VOCAB)
AUX = [2, 6, 9]
TARGET_IDS = [0, 3, 4, 9, 15, 19]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": 1,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}


@dataclass
class Sample:
    """A checkpoint on its way to the disk, to be spoilt by tests.

    Attributes:
        layout: what it must be detected as.
        load: its loader.
        file: name of the file with the tensors.
        config: of config.json.
        tensors: as stored.
        others: more files of JSON.
    """

    layout: str
    load: Callable[[Path, TargetFacts], object]
    file: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    others: dict[str, dict[str, Any]] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, values in self.others.items():
            (folder / name).write_text(json.dumps(values))
        path = folder / self.file
        if path.suffix == ".safetensors":
            save_file(self.tensors, path)
        else:
            torch.save(self.tensors, path)
        return folder

    def load_from(self, folder: Path) -> Any:
        return self.load(self.write(folder), TARGET)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def decoder_layer(prefix: str, attention_in: int) -> dict[str, torch.Tensor]:
    queries, keys = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        f"{prefix}.self_attn.q_proj.weight": rows(queries, attention_in),
        f"{prefix}.self_attn.k_proj.weight": rows(keys, attention_in),
        f"{prefix}.self_attn.v_proj.weight": rows(keys, attention_in),
        f"{prefix}.self_attn.o_proj.weight": rows(HIDDEN, queries),
        f"{prefix}.mlp.gate_proj.weight": rows(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": rows(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": rows(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": rows(HIDDEN),
    }


def vocabulary_maps() -> dict[str, torch.Tensor]:
    targets = torch.tensor(TARGET_IDS)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[targets] = True
    return {"d2t": targets - torch.arange(DRAFT_VOCAB), "t2d": t2d}


def eagle() -> Sample:
    """EAGLE-1 as for Vicuna: with a bias that the configuration does not mention, as a pickle."""
    tensors = {
        "embed_tokens.weight": rows(VOCAB, HIDDEN),
        "fc.weight": rows(HIDDEN, 2 * HIDDEN),
        "fc.bias": rows(HIDDEN),
    }
    config = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    return Sample(
        "safeailab-eagle", load_eagle, "pytorch_model.bin", config, tensors | decoder_layer("layers.0", HIDDEN)
    )


def eagle3() -> Sample:
    """EAGLE-3 as SafeAILab publishes it."""
    layer = decoder_layer("midlayer", 2 * HIDDEN)
    layer |= {"midlayer.input_layernorm.weight": rows(HIDDEN), "midlayer.hidden_norm.weight": rows(HIDDEN)}
    tensors = {
        "fc.weight": rows(HIDDEN, 3 * HIDDEN),
        "norm.weight": rows(HIDDEN),
        "lm_head.weight": rows(DRAFT_VOCAB, HIDDEN),
        **layer,
        **vocabulary_maps(),
    }
    config = LLAMA | {"draft_vocab_size": DRAFT_VOCAB}
    return Sample("safeailab-eagle3", load_eagle, "pytorch_model.bin", config, tensors)


def eagle3_nvidia() -> Sample:
    """EAGLE-3 with options in the block `eagle_config`, and layers numbered by what leaves them."""
    sample = eagle3()
    sample.file = "model.safetensors"
    sample.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in sample.tensors.items()}
    sample.tensors["input_norm.weight"] = rows(3 * HIDDEN)
    sample.config["eagle_config"] = {
        "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
        "norm_before_fc": True,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
    }
    return sample


def _speculators(kind: str) -> dict[str, Any]:
    return {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.2.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": "a/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {name: value for name, value in LLAMA.items() if name != "architectures"},
    }


def speculators_eagle() -> Sample:
    tensors = {"fusion_fc.weight": rows(HIDDEN, 2 * HIDDEN), "fusion_fc.bias": rows(HIDDEN)}
    config = _speculators("eagle") | {
        "fusion_bias": True,
        "layernorms": False,
        "transformer_layer_architecture": "LlamaDecoderLayer",
    }
    return Sample(
        "speculators-eagle", load_eagle, "model.safetensors", config, tensors | decoder_layer("transformer", HIDDEN)
    )


def speculators_eagle3() -> Sample:
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in eagle3().tensors.items()}
    tensors["embed_tokens.weight"] = rows(VOCAB, HIDDEN)
    config = _speculators("eagle3") | {
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        "norm_before_residual": True,
        "eagle_aux_hidden_state_layer_ids": AUX,
    }
    return Sample("speculators-eagle3", load_eagle, "model.safetensors", config, tensors)


def eagle31() -> Sample:
    """EAGLE-3.1: a norm per feature, and the state fed back after the norm."""
    sample = speculators_eagle3()
    sample.tensors |= {f"fc_norm.{index}.weight": rows(HIDDEN) for index in range(3)}
    sample.config |= {"fc_norm": True, "norm_output": True, "norm_before_fc": False}
    return sample


def medusa_v1() -> Sample:
    """Three heads, and a configuration that names two, as those of the published Vicuna heads."""
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = rows(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = rows(HIDDEN)
        tensors[f"{head}.1.weight"] = rows(VOCAB, HIDDEN)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "a/target"}
    return Sample("medusa-v1", load_medusa, "medusa_lm_head.pt", config, tensors)


def medusa_v2() -> Sample:
    tensors = {}
    for head in range(3):
        tensors[f"{head}.0.linear.weight"] = rows(HIDDEN, HIDDEN)
        tensors[f"{head}.0.linear.bias"] = rows(HIDDEN)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "version": "2"}
    return Sample("medusa-v2", load_medusa, "medusa_lm_head.safetensors", config, tensors)


def medusa_vllm() -> Sample:
    tensors = {"token_map": torch.tensor(TARGET_IDS)}
    for head in range(3):
        for layer in range(2):
            tensors[f"medusa_heads.blocks.{head}.layers.{layer}.weight"] = rows(HIDDEN, HIDDEN)
        tensors[f"medusa_heads.lm_heads.{head}.weight"] = rows(DRAFT_VOCAB, HIDDEN)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "truncated_vocab_size": DRAFT_VOCAB,
        "num_heads": 3,
        "num_hidden_layers": 2,
    }
    return Sample("medusa-vllm", load_medusa, "model.safetensors", config, tensors)


def layerskip_adapter() -> Sample:
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(2):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        tensors |= {f"{name}.lora_A.weight": rows(2, HIDDEN), f"{name}.lora_B.weight": rows(HIDDEN, 2)}
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "target_modules": ["q_proj"]}
    return Sample(
        "layerskip-adapter",
        load_layerskip,
        "adapter_model.safetensors",
        {"exit_layer": 3},
        tensors,
        {"adapter_config.json": adapter},
    )


def _load_draft_vocabulary(folder: Path, target: TargetFacts) -> torch.Tensor | None:
    return load_draft_vocabulary(folder, target.vocab_size)


def draft_vocabulary() -> Sample:
    return Sample(
        "causal-lm",
        _load_draft_vocabulary,
        "draft_vocabulary.safetensors",
        LLAMA | {"vocab_size": DRAFT_VOCAB},
        {"d2t": vocabulary_maps()["d2t"]},
    )


ALL: dict[str, Callable[[], Sample]] = {
    make.__name__: make
    for make in (
        eagle,
        eagle3,
        eagle3_nvidia,
        speculators_eagle,
        speculators_eagle3,
        eagle31,
        medusa_v1,
        medusa_v2,
        medusa_vllm,
        layerskip_adapter,
        draft_vocabulary,
    )
}
