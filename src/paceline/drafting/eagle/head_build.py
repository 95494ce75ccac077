"""From a checkpoint to a head that runs: weights joined, packed where that is possible, and bound to the target's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch.nn import functional
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting.checkpoints.eagle import EagleCheckpoint, EagleConfig
from paceline.drafting.checkpoints.vocabulary_map import target_ids_of
from paceline.drafting.eagle.head import EagleHead, Layer, Rows
from paceline.drafting.head_products import make_product
from paceline.engine.native.decoder import LayerShape, Rotary
from paceline.engine.native.norms import Norm
from paceline.engine.native.weights import Weight
from paceline.engine.shared_parts import SharedParts
from paceline.errors import ConfigurationError

_ANY_LENGTH = 1 << 20
"""Positions that rotary angles are asked for where the head names no limit; only some scalings look at it."""


def build_head(checkpoint: EagleCheckpoint, parts: SharedParts, *, vocab_size: int, pack: bool = True) -> EagleHead:
    """Makes a head that runs beside its target.

    Args:
        checkpoint: of the head.
        parts: of the target.
        vocab_size: of the target's real tokens: columns of other ids are left out of a draft vocabulary.
        pack: whether to pack weights where that is possible.

    Raises:
        ConfigurationError: the head was made for a target of another width.
    """
    config = checkpoint.config
    _check_sizes(checkpoint, parts)
    weights = _Weights(checkpoint, parts, pack)
    is_first = config.kind == "eagle"
    logits_of, target_ids = _output(weights, parts, vocab_size)
    return EagleHead(
        embed=_embedding(weights, parts),
        fuse=weights.product("fc") if is_first else None,
        embed_norm=weights.norm("embed_norm" if is_first else "layer.input_layernorm"),
        feature_norm=None if is_first else weights.norm("layer.hidden_norm"),
        input_norm=weights.norm("layer.input_layernorm") if is_first else None,
        layer=_layer(weights),
        final_norm=weights.norm("norm"),
        logits_of=logits_of,
        target_ids=target_ids,
        residual_is_normed=config.norm_before_residual,
        feeds_back_normed=config.norm_output,
        rotary=_rotary(config, parts.device),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        weights_bytes=weights.num_bytes,
        dtype=parts.dtype,
        device=parts.device,
    )


@dataclass
class _Weights:
    """The checkpoint's weights, in the format and on the device of the target's."""

    checkpoint: EagleCheckpoint
    parts: SharedParts
    pack: bool
    num_bytes: int = field(default=0, init=False)

    def tensor(self, name: str) -> torch.Tensor | None:
        """A copy; None where the checkpoint has none."""
        stored = self.checkpoint.weights.get(name)
        if stored is None:
            return None
        # Cloned out of a mapped file.
        weight = stored.detach().to(device=self.parts.device, dtype=self.parts.dtype, copy=True)
        self.num_bytes += weight.nbytes
        return weight

    def norm(self, name: str) -> Norm | None:
        """A norm; None where the checkpoint has none."""
        weight = self.tensor(f"{name}.weight")
        return None if weight is None else Norm(weight, self.checkpoint.config.rms_norm_eps)

    def product(self, *names: str) -> Weight:
        """Linear layers with the same input, side by side."""
        weight = torch.cat([cast("torch.Tensor", self.tensor(f"{name}.weight")) for name in names])
        biases = [self.tensor(f"{name}.bias") for name in names]
        bias = None if biases[0] is None else torch.cat(cast("list[torch.Tensor]", biases))
        return self.made(weight, bias)

    def made(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Weight:
        """A matrix, packed where that is possible."""
        return make_product(weight, bias, pack=self.pack)


def _check_sizes(checkpoint: EagleCheckpoint, parts: SharedParts) -> None:
    config = checkpoint.config
    if config.target_hidden_size != parts.hidden_size:
        raise ConfigurationError(
            f"this head was made for a target with hidden states of {config.target_hidden_size} numbers, the target's "
            f"have {parts.hidden_size}: give the head that was trained for this target",
            field="model",
        )
    borrows = "embed_tokens.weight" not in checkpoint.weights or "lm_head.weight" not in checkpoint.weights
    if borrows and config.hidden_size != parts.hidden_size:
        raise ConfigurationError(
            f"this head borrows the target's embedding or output layer, but its rows have {config.hidden_size} numbers "
            f"and the target's {parts.hidden_size}: the checkpoint must bring its own",
            field="model",
        )


def _layer(weights: _Weights) -> Layer:
    config = weights.checkpoint.config
    feed_forward_norm = weights.norm("layer.post_attention_layernorm")
    if feed_forward_norm is None:
        raise ConfigurationError("the checkpoint has no layer.post_attention_layernorm.weight", field="model")
    return Layer(
        shape=LayerShape(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5),
        qkv=weights.product(*(f"layer.self_attn.{name}_proj" for name in "qkv")),
        output=weights.product("layer.self_attn.o_proj"),
        feed_forward_norm=feed_forward_norm,
        gate_up=weights.product("layer.mlp.gate_proj", "layer.mlp.up_proj"),
        activation=ACT2FN[config.hidden_act],
        down=weights.product("layer.mlp.down_proj"),
    )


def _embedding(weights: _Weights, parts: SharedParts) -> Callable[[torch.Tensor], torch.Tensor]:
    table = weights.tensor("embed_tokens.weight")
    if table is None:
        return parts.embed
    return lambda token_ids: functional.embedding(token_ids, table)


def _output(weights: _Weights, parts: SharedParts, vocab_size: int) -> tuple[Rows, torch.Tensor | None]:
    """The output layer, and the target's ids of its columns."""
    weight = weights.tensor("lm_head.weight")
    if weight is None:
        return parts.head, None
    offsets = weights.checkpoint.d2t
    if offsets is None:
        return weights.made(weight, None), None
    target_ids = target_ids_of(offsets)
    known = target_ids < vocab_size
    if not known.all():
        target_ids, weight = target_ids[known], weight[known.to(weight.device)]
    return weights.made(weight, None), target_ids.to(parts.device)


def _rotary(config: EagleConfig, device: torch.device) -> Rotary:
    """The module of `transformers`, so that every scaling of the angles is known."""
    rope = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=config.num_heads * config.head_dim,  # only head_dim counts, and others are refused there
            num_attention_heads=config.num_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_model_len or _ANY_LENGTH,
            rope_parameters=dict(config.rope),
        )
    )
    return cast("Rotary", rope.to(device))
