"""A decoder of the Llama family: the same few steps per layer for Llama, Mistral, Qwen2 and Qwen3.

| what | shape |
|---|---|
| hidden rows | [num_rows, hidden_size]: one per token of the pass, padded with zeros to what the kernels like |
| joined heads | [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values |
| attention | as in `paceline.engine.attention` |

What differs between models is in the weights and in `LayerShape`: biases, normalised queries and keys, windows, a tied
head. Rotary angles come from the `transformers` module, once per pass, so that every scaling of them is known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from paceline.engine.attention import PagedAttention
from paceline.engine.features import FeaturePlane
from paceline.engine.native.norms import Norm
from paceline.engine.native.tables import Embedding
from paceline.engine.native.weights import Weight
from paceline.engine.packing import pad_rows
from paceline.engine.pass_plan import PassPlan

Rotary = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""What `transformers` calls a rotary embedding: any tensor of the right type and positions # [1, num_tokens] to cosines
and sines # [1, num_tokens, head_dim]."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What all layers of a model have in common.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: numbers per head.
        scaling: factor of the products of queries and keys.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scaling: float


@dataclass(frozen=True, slots=True)
class PassState:
    """What the layers of one pass share.

    Attributes:
        attention: with the plan of the pass.
        num_tokens: tokens of the pass.
        cosines: # [num_tokens, 1, head_dim]
        sines: the first half negated # [num_tokens, 1, head_dim]
        attended: where attention's result is padded to the hidden rows # [num_rows, num_heads, head_dim]; None if there
            is nothing to pad.
    """

    attention: PagedAttention
    num_tokens: int
    cosines: torch.Tensor
    sines: torch.Tensor
    attended: torch.Tensor | None

    def rotate(self, heads: torch.Tensor) -> torch.Tensor:  # [num_tokens, any, head_dim]
        """The heads, each pair of numbers (i, i + head_dim / 2) turned by its position's angle."""
        return (heads * self.cosines).addcmul_(heads.roll(heads.shape[-1] // 2, -1), self.sines)


@dataclass(slots=True)
class DecoderLayer:
    """Attention and feed-forward of one layer.

    Attributes:
        index: of the layer.
        shape: of its heads.
        window: how many positions a token looks back, itself included; None for all.
        attention_norm, feed_forward_norm: of the hidden rows before the two halves.
        head_norm: of queries and keys; None without.
        qkv: queries, keys and values in one product.
        output: of the attention.
        gate_up: both halves of the gate in one product.
        down: back to the hidden size.
    """

    index: int
    shape: LayerShape
    window: int | None
    attention_norm: Norm
    feed_forward_norm: Norm
    head_norm: Norm | None
    qkv: Weight
    output: Weight
    gate_up: Weight
    down: Weight

    @property
    def weights(self) -> tuple[Weight, ...]:
        """The matrices, in the order of their use."""
        return (self.qkv, self.output, self.gate_up, self.down)

    def __call__(self, hidden: torch.Tensor, state: PassState) -> None:  # [num_rows, hidden_size]
        """Adds what the layer has to say to the hidden rows, in place."""
        hidden += self.output(self._attend(self.qkv(self.attention_norm(hidden)), state))
        gate, up = self.gate_up(self.feed_forward_norm(hidden)).chunk(2, dim=-1)
        hidden += self.down(functional.silu(gate).mul_(up))

    def _attend(self, joined: torch.Tensor, state: PassState) -> torch.Tensor:  # -> [num_rows, num_heads * head_dim]
        shape = self.shape
        num_rotated = shape.num_heads + shape.num_kv_heads
        heads = joined.view(joined.shape[0], -1, shape.head_dim)[: state.num_tokens]
        rotated = heads[:, :num_rotated]
        if self.head_norm is not None:
            rotated = self.head_norm(rotated)
        rotated = state.rotate(rotated).transpose(0, 1).unsqueeze(0)
        attended = state.attention(
            self.index,
            rotated[:, : shape.num_heads],
            rotated[:, shape.num_heads :],
            heads[:, num_rotated:].transpose(0, 1).unsqueeze(0),
            shape.scaling,
            self.window,
            None,
        )[0]  # [num_tokens, num_heads, head_dim]
        if state.attended is None:
            return attended.reshape(joined.shape[0], -1)
        state.attended[: state.num_tokens] = attended
        return state.attended.flatten(1)


@dataclass(slots=True)
class Decoder:
    """A whole model; matrices and norms may be replaced by wrappers that measure.

    Attributes:
        embedding: of the tokens.
        layers: in order.
        norm: before the head.
        head: to logits.
        vocab_size: columns of the logits.
        rotary: angles of positions.
        least_rows: of what the weights' kernels like, see `packing.padded_count`.
    """

    embedding: Embedding
    layers: Sequence[DecoderLayer]
    norm: Norm
    head: Weight
    vocab_size: int
    rotary: Rotary
    least_rows: int

    def __call__(
        self, plan: PassPlan, attention: PagedAttention, features: FeaturePlane | None = None
    ) -> torch.Tensor:  # [num_wanted, vocab_size]
        """One pass: the logits of the wanted tokens; keys and values are written by `attention`, features if wanted."""
        return self.finish(self.embedding.embed(plan.token_ids[0]), plan, attention, features)

    def begin(
        self, plan: PassPlan, attention: PagedAttention, num_layers: int
    ) -> torch.Tensor:  # [num_tokens, hidden_size]
        """The first layers of a pass: what leaves them for each token."""
        hidden = self._pad(self.embedding.embed(plan.token_ids[0]))
        state = self._state(hidden, plan, attention)
        for layer in self.layers[:num_layers]:
            layer(hidden, state)
        return hidden[: state.num_tokens]

    def finish(
        self,
        hidden: torch.Tensor,  # [num_tokens, hidden_size]
        plan: PassPlan,
        attention: PagedAttention,
        features: FeaturePlane | None = None,
        first_layer: int = 0,
    ) -> torch.Tensor:  # [num_wanted, vocab_size]
        """The rest of a pass: layers from `first_layer` on, and the logits of the wanted tokens.

        Args:
            hidden: what enters that layer; may be written over.
            plan: of the pass.
            attention: with that plan.
            features: where hidden states are kept; those that enter layers before `first_layer` cannot be.
            first_layer: the layer.
        """
        hidden = self._pad(hidden)
        state = self._state(hidden, plan, attention)
        layers = self.layers[first_layer:]
        if features is None:
            for layer in layers:
                layer(hidden, state)
        else:
            self._run_keeping(layers, hidden, state, features, plan)
        num_wanted = plan.wanted.shape[0]
        if num_wanted == 0:
            return hidden.new_empty(0, self.vocab_size)
        return self.logits(self.norm(hidden[plan.wanted]))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab_size]
        """The head's products with rows that are normalised already."""
        return self.head(self._pad(rows))[: rows.shape[0]]

    def _run_keeping(
        self,
        layers: Sequence[DecoderLayer],
        hidden: torch.Tensor,
        state: PassState,
        features: FeaturePlane,
        plan: PassPlan,
    ) -> None:
        """Runs the last layers and writes the features of all tokens of the pass."""
        tapped = features.taps.layers
        entering: dict[int, torch.Tensor] = {}
        for layer in layers:
            if layer.index in tapped:
                entering[layer.index] = hidden[: state.num_tokens].clone()  # the layer adds to it in place
            layer(hidden, state)
        leaving = hidden[: state.num_tokens]
        entering[len(self.layers)] = leaving
        streams = [entering[layer] for layer in tapped] if tapped else [self.norm(leaving)]
        features.write(plan.write, streams)

    def _pad(self, rows: torch.Tensor) -> torch.Tensor:
        return pad_rows(rows, self.least_rows)

    def _state(self, hidden: torch.Tensor, plan: PassPlan, attention: PagedAttention) -> PassState:
        num_tokens = plan.token_ids.shape[1]
        cosines, sines = self.rotary(hidden, plan.positions)
        sines[..., : sines.shape[-1] // 2].neg_()
        shape = self.layers[0].shape
        attended = None
        if num_tokens < hidden.shape[0]:
            attended = hidden.new_zeros(hidden.shape[0], shape.num_heads, shape.head_dim)
        return PassState(attention, num_tokens, cosines[0].unsqueeze(1), sines[0].unsqueeze(1), attended)
