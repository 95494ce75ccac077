"""A head as a model: one decoder layer over pairs of a feature and the token after it.

Row t is the pair (feature t, token t + 1). The layer makes of it a state that stands for feature t + 1: its logits are
those of token t + 2, and with that token it is the next row's feature.

| | `eagle` | `eagle3` |
|---|---|---|
| feature | the target's output after its final norm | residual streams of the target, fused (`taps.py`) |
| into attention | fc of [embedding, feature] | [norm of the embedding, norm of the feature], twice as wide |
| residual | the same | the feature, before or after its norm |
| state fed back | the layer's output | the layer's output, or that after the final norm |
| logits | the target's head, no norm | its own norm and head, over a vocabulary of its own |

Some published heads of the kind `eagle` have norms where the original has none: on the embedding, before attention and
before the head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.native.decoder import LayerShape, Rotary
from paceline.engine.native.norms import Norm
from paceline.engine.native.weights import Weight

Rows = Callable[[torch.Tensor], torch.Tensor]
"""Rows to rows # [num_rows, any] -> [num_rows, any]"""


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention and feed-forward of the head.

    Attributes:
        shape: of its heads.
        qkv: queries, keys and values in one product.
        output: of the attention.
        feed_forward_norm: before the second half.
        gate_up: both halves of the gate in one product.
        activation: of the gate.
        down: back to the hidden size.
    """

    shape: LayerShape
    qkv: Weight
    output: Weight
    feed_forward_norm: Norm
    gate_up: Weight
    activation: Rows
    down: Weight

    def __call__(
        self,
        inputs: torch.Tensor,  # [num_tokens, in_width]
        residual: torch.Tensor,  # [num_tokens, hidden_size]
        angles: tuple[torch.Tensor, torch.Tensor],  # [1, num_tokens, head_dim] each
        attention: PagedAttention,
        wanted: torch.Tensor | None,  # [num_wanted]
    ) -> torch.Tensor:  # [num_wanted, hidden_size]
        """The layer's output for the wanted tokens, None for all; keys and values are written for all of them."""
        shape = self.shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = self.qkv(inputs).view(inputs.shape[0], -1, shape.head_dim).transpose(0, 1)
        rotated = _rotate(heads[:num_rotated], *angles).unsqueeze(0)
        attended = attention(
            0,
            rotated[:, : shape.num_heads],
            rotated[:, shape.num_heads :],
            heads[num_rotated:].unsqueeze(0),
            shape.scaling,
            None,
            None,
        )[0].flatten(1)
        if wanted is not None:
            attended, residual = attended[wanted], residual[wanted]
        if not len(residual):
            return residual
        hidden = residual + self.output(attended)
        gate, up = self.gate_up(self.feed_forward_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(self.activation(gate) * up)


def _rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Each pair of numbers (i, i + head_dim / 2) turned by its position's angle # [any, num_tokens, head_dim]."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines


@dataclass(frozen=True, slots=True)
class EagleHead:
    """A head, ready to run.

    Attributes:
        embed: token ids # [num_tokens] -> [num_tokens, hidden_size]
        fuse: `eagle`: of [embedding, feature] to hidden rows; None for `eagle3`.
        embed_norm, feature_norm: what embedding and feature go through before they are joined, and with `eagle3` the
            first of them is the layer's input norm; None for nothing.
        input_norm: `eagle`: before attention; None for nothing.
        layer: the decoder layer.
        final_norm: between the layer's output and the logits; None for nothing.
        logits_of: rows after the final norm # [num_rows, hidden_size] -> [num_rows, draft_vocab_size]
        target_ids: the target's id of each column of the logits; None where they are the same. # [draft_vocab_size]
        residual_is_normed: `eagle3`: the residual is the feature after `feature_norm`.
        feeds_back_normed: the state that is fed back is that after the final norm.
        rotary: angles of positions.
        hidden_size: numbers per state.
        vocab_size: ids that the embedding knows.
        weights_bytes: memory of its own weights.
        dtype, device: of its rows.
    """

    embed: Callable[[torch.Tensor], torch.Tensor]
    fuse: Weight | None
    embed_norm: Norm | None
    feature_norm: Norm | None
    input_norm: Norm | None
    layer: Layer
    final_norm: Norm | None
    logits_of: Rows
    target_ids: torch.Tensor | None
    residual_is_normed: bool
    feeds_back_normed: bool
    rotary: Rotary
    hidden_size: int
    vocab_size: int
    weights_bytes: int
    dtype: torch.dtype
    device: torch.device

    def states(
        self,
        features: torch.Tensor,  # [num_tokens, width]
        token_ids: torch.Tensor,  # [num_tokens]
        positions: torch.Tensor,  # [1, num_tokens]
        attention: PagedAttention,
        wanted: torch.Tensor | None,  # [num_wanted]
    ) -> torch.Tensor:  # [num_wanted, hidden_size]
        """One pass: the states of the wanted rows, None for all.

        Args:
            features: of the target, or states of this head.
            token_ids: the token after each feature.
            positions: of the features.
            attention: with the plan of the pass.
            wanted: rows whose states are needed.
        """
        embedded = _normed(self.embed_norm, self.embed(token_ids))
        normed = _normed(self.feature_norm, features)
        inputs = torch.cat([embedded, normed], dim=-1)
        residual = normed if self.residual_is_normed else features
        if self.fuse is not None:
            residual = self.fuse(inputs)
            inputs = _normed(self.input_norm, residual)
        output = self.layer(inputs, residual, self.rotary(features, positions), attention, wanted)
        return _normed(self.final_norm, output) if self.feeds_back_normed else output

    def logits(self, states: torch.Tensor) -> torch.Tensor:  # [num_rows, draft_vocab_size]
        """What the head says of the token two after each state's row # [num_rows, hidden_size]."""
        return self.logits_of(states if self.feeds_back_normed else _normed(self.final_norm, states))


def _normed(norm: Norm | None, rows: torch.Tensor) -> torch.Tensor:
    return rows if norm is None else norm(rows)
