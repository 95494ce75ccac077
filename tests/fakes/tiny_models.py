"""Tiny random models of many architectures as folders on disk: real configurations, real attention, a few kilobytes.

    folder = write_model(tmp_path, ARCHITECTURES["llama"])

Each folder also holds the letters tokenizer of `tiny_tokenizer`, so that a loader takes it for a whole model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    OlmoConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    StableLmConfig,
)

from tests.fakes.tiny_tokenizer import write_letters

VOCAB_SIZE = 64
WINDOW = 8
"""Sliding window of the models that have one: less than any prompt of the tests."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 1,
    "pad_token_id": None,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A configuration class with tiny dimensions."""

    config_class: Callable[..., PreTrainedConfig]
    arguments: dict[str, Any]


SERVED = {
    "llama": Architecture(LlamaConfig, _GROUPED),
    "llama_tied_bias": Architecture(
        LlamaConfig, {**_GROUPED, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "qwen2": Architecture(Qwen2Config, _GROUPED),
    "qwen3": Architecture(Qwen3Config, {**_GROUPED, "head_dim": 12}),
    "qwen3_moe": Architecture(
        Qwen3MoeConfig,
        {**_GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ),
    "mistral_window": Architecture(MistralConfig, {**_GROUPED, "sliding_window": WINDOW}),
    "gemma2_window": Architecture(Gemma2Config, {**_GROUPED, "head_dim": 8, "sliding_window": WINDOW}),
    "gemma3_window": Architecture(
        Gemma3TextConfig,
        {
            **_GROUPED,
            "head_dim": 8,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "phi3": Architecture(Phi3Config, _GROUPED),
    "olmo": Architecture(OlmoConfig, _GROUPED),
    "cohere": Architecture(CohereConfig, _GROUPED),
    "stablelm": Architecture(StableLmConfig, _GROUPED),
    "gpt_neox": Architecture(GPTNeoXConfig, _COMMON),
}
"""Models that must be served exactly."""

REFUSED = {
    "mamba": Architecture(MambaConfig, {**_COMMON, "state_size": 4}),
    "jamba": Architecture(
        JambaConfig, {**_GROUPED, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1}
    ),
    "falcon_h1": Architecture(
        FalconH1Config, {**_GROUPED, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
    ),
    "qwen3_next": Architecture(Qwen3NextConfig, {**_GROUPED, "head_dim": 8, "num_experts": 0}),
    "gpt_oss": Architecture(
        GptOssConfig, {**_GROUPED, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    ),
}
"""Models with recurrent state, or with attention that is not supported: refused at start."""


def write_model(folder: Path, architecture: Architecture, *, seed: int = 0, spread: float = 0.3) -> Path:
    """Writes a random model; returns the folder.

    Args:
        folder: made if it does not exist.
        architecture: one of SERVED or REFUSED.
        seed: of the weights.
        spread: standard deviation of the weights; large enough that logits differ clearly.
    """
    write_letters(folder, VOCAB_SIZE, max_model_len=256)
    config = architecture.config_class(**architecture.arguments)
    config.initializer_range = spread
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.normal_(0.0, spread)
            elif "bias" in name or "sinks" in name:
                parameter.normal_(0.0, 1.0)
    model.save_pretrained(folder)
    return folder
