"""From a trained EAGLE head to the checkpoint that drafting loads."""

from __future__ import annotations

from typing import Any

import torch
from transformers import LlamaConfig

from paceline.drafting.checkpoints.eagle import EagleConfig, EagleKind
from paceline.training.learner import Learner, stored


def checkpoint_config(config: LlamaConfig, kind: EagleKind, *, target_hidden_size: int, **options: Any) -> EagleConfig:
    """Sizes and options of a head.

    Args:
        config: of its layer.
        kind: `eagle` or `eagle3`.
        target_hidden_size: of the target.
        options: further fields of `EagleConfig` that are not as they are by default.
    """
    values: dict[str, Any] = {"draft_vocab_size": config.vocab_size} | options
    layer: dict[str, Any] = config.to_dict()
    return EagleConfig(
        kind=kind,
        hidden_size=config.hidden_size,
        target_hidden_size=target_hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        intermediate_size=config.intermediate_size,
        rms_norm_eps=config.rms_norm_eps,
        rope=layer["rope_parameters"],
        max_model_len=config.max_position_embeddings,
        vocab_size=config.vocab_size,
        hidden_act=config.hidden_act,
        **values,
    )


def stored_weights(learner: Learner) -> dict[str, torch.Tensor]:
    """The head's weights; the learner's names are the checkpoint's."""
    return {name: stored(weight) for name, weight in learner.trained_state().items()}
