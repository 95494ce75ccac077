"""An EAGLE head as the drafting method gets it, whatever layout it came in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

EagleKind = Literal["eagle", "eagle3"]


@dataclass(frozen=True, slots=True)
class EagleConfig:
    """Sizes and options of an EAGLE head.

    Attributes:
        kind: `eagle` (EAGLE-1 and 2: one head, two ways of growing drafts) or `eagle3`.
        hidden_size: numbers per row inside the head; for `eagle` the target's.
        target_hidden_size: numbers per row of the target's hidden states.
        num_heads: attention heads.
        num_kv_heads: heads of keys and values.
        head_dim: numbers per head.
        intermediate_size: width of the MLP.
        rms_norm_eps: of all norms.
        rope: rotary settings as `transformers` has them in `rope_parameters`: `rope_type`, `rope_theta`, and what the
            type needs.
        max_model_len: most tokens that the head was made for; None where its configuration names no limit.
        vocab_size: ids that its embedding knows: the target's.
        draft_vocab_size: columns of its head; below `vocab_size` there is a `d2t`.
        fc_bias: the layer that joins embedding and feature has a bias.
        aux_layers: `eagle3`: features are the residual stream entering these layers of the target, lowest first; empty
            for `eagle`, whose feature is the output of the target's final norm.
        norm_before_residual: `eagle3`: the layer's residual is the feature after `hidden_norm`, not before it.
        norm_before_fc: `eagle3`: one norm, `input_norm`, on the joined features before `fc`.
        fc_norm: `eagle3`: a norm for each joined feature before `fc`.
        norm_output: `eagle3`: the state fed back is the one after the final norm, not before it.
        input_layernorm: `eagle`: has the norms that the published heads lack: `embed_norm` on the embedding,
            `layer.input_layernorm` before attention, `norm` before the head. `eagle3` always has
            `layer.input_layernorm` (on the embedding), `layer.hidden_norm` (on the feature) and `norm`.
        attention_bias: query, key and value projections have a bias; the output projection may have one.
        mlp_bias: the MLP's projections have a bias.
        hidden_act: activation of the MLP.
    """

    kind: EagleKind
    hidden_size: int
    target_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: Mapping[str, object]
    max_model_len: int | None
    vocab_size: int
    draft_vocab_size: int
    fc_bias: bool = False
    aux_layers: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    input_layernorm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """An EAGLE head.

    Attributes:
        config: sizes and options.
        weights: by canonical name, number format as stored. Always there: `fc.weight`,
            `layer.self_attn.{q,k,v,o}_proj.weight`, `layer.mlp.{gate,up,down}_proj.weight`,
            `layer.post_attention_layernorm.weight`; with `eagle3` also `layer.input_layernorm.weight`,
            `layer.hidden_norm.weight`, `norm.weight` and `lm_head.weight`. By the options: `fc.bias`, the projections'
            `.bias`, `embed_norm.weight`, `input_norm.weight`, `fc_norm.{i}.weight`. `embed_tokens.weight` where the
            head has an embedding of its own; otherwise the target's is meant, as is the target's head for `eagle`.
        layout: name of the layout it came in.
        d2t: # [draft_vocab_size] int64 offsets: draft id i means target id i + d2t[i]; None where both are the same.
        t2d: # [vocab_size] bool: the target ids that have a draft id; None where the checkpoint has none.
    """

    config: EagleConfig
    weights: Mapping[str, torch.Tensor]
    layout: str
    d2t: torch.Tensor | None = None
    t2d: torch.Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Memory of the weights."""
        return sum(weight.nbytes for weight in self.weights.values())
