"""The one attention function for every architecture: ragged batches over the paged pool.

`transformers` hands each layer's queries, keys and values to a registered function. All sequences of a pass lie side by
side in one row of tokens; this function writes the new keys and values to their slots and lets each sequence attend to
its own rows under its own mask. What the sequences are is in a `PassPlan`, made once per pass and shared by all layers.

| tensor | shape |
|---|---|
| query | [1, num_heads, num_tokens, head_dim] |
| key, value | [1, num_kv_heads, num_tokens, head_dim], of the new tokens only |
| result | [1, num_tokens, num_heads, value_dim] |

Every row of a sequence stays in the pool and a sliding window is a mask, so a model with a window rolls back exactly.
It does not know of sessions, blocks or acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from paceline.engine.kv.pool import KVPool, PlaneShape
from paceline.engine.pass_plan import PassPlan, Piece, SequencePlan

ATTENTION_NAME = "paceline_paged"
"""Name under which the function is registered with `transformers`."""

LAYER_STATE = "paceline_attention"
"""Attribute of an attention module that holds its model's `PagedAttention`."""


@dataclass(slots=True)
class LayerFacts:
    """What one layer's attention looked like in the probing pass."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    other_arguments: tuple[str, ...]
    num_calls: int = 1


_USUAL_ARGUMENTS = frozenset({"position_ids", "use_cache", "is_causal", "output_attentions", "cache_position"})


class PagedAttention:
    """The attention of one model: its layers' rows in the pool and the plan of the running pass.

    Before `attach` it only records what each layer asks for (`facts`).

    Attributes:
        facts: layer index to what the probing pass saw.
        plan: sequences of the running pass.
    """

    def __init__(self) -> None:
        self.facts: dict[int, LayerFacts] = {}
        self.plan: PassPlan | None = None
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    @classmethod
    def for_layers(cls, windows: Sequence[int | None], num_kv_heads: int, head_dim: int) -> PagedAttention:
        """The attention of a model whose layers are known and alike, so that nothing need be probed.

        Args:
            windows: of each layer, how many positions a token looks back, itself included; None for all.
            num_kv_heads: key/value heads of every layer.
            head_dim: numbers per head, of keys and of values.
        """
        attention = cls()
        for layer, window in enumerate(windows):
            attention.facts[layer] = LayerFacts(num_kv_heads, head_dim, head_dim, window, ())
        return attention

    @property
    def attached(self) -> bool:
        """Whether the layers have their planes."""
        return bool(self._keys)

    def plane_shapes(self) -> list[PlaneShape]:
        """Shapes of the planes that the probed layers need, equal ones grouped."""
        counts: dict[tuple[int, int], int] = {}
        for facts in self.facts.values():
            for width in (facts.key_dim, facts.value_dim):
                counts[facts.num_kv_heads, width] = counts.get((facts.num_kv_heads, width), 0) + 1
        return [PlaneShape(count, heads, width) for (heads, width), count in counts.items()]

    def attach(self, pool: KVPool) -> None:
        """Gives every probed layer its planes of a pool made from `plane_shapes`."""
        groups = {(group.shape[1], group.shape[3]): iter(group) for group in pool.groups}
        num_layers = max(self.facts) + 1
        self._keys = [torch.empty(0)] * num_layers
        self._values = [torch.empty(0)] * num_layers
        for layer, facts in self.facts.items():
            self._keys[layer] = next(groups[facts.num_kv_heads, facts.key_dim])[None]
            self._values[layer] = next(groups[facts.num_kv_heads, facts.value_dim])[None]

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
        key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
        value: torch.Tensor,  # [1, num_kv_heads, num_tokens, value_dim]
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Writes the new rows and attends; see the module's description."""
        if self.plan is None:
            raise RuntimeError("attention was called outside a pass")
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self.plan.write] = key
        values[:, :, self.plan.write] = value
        if len(self.plan.sequences) == 1:
            return attend(self.plan.sequences[0], query, keys, values, scaling, window, softcap)
        result = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
        for plan in self.plan.sequences:
            part = query[:, :, plan.start : plan.stop]
            result[:, plan.start : plan.stop] = attend(plan, part, keys, values, scaling, window, softcap)
        return result

    def probe(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, arguments: dict[str, Any]
    ) -> torch.Tensor:
        """Records a layer's shapes and arguments; the result has the right shape and no meaning."""
        if layer in self.facts:
            self.facts[layer].num_calls += 1
        else:
            window = arguments.get("sliding_window")
            known = _USUAL_ARGUMENTS | {"sliding_window", "softcap", "scaling", "dropout"}
            self.facts[layer] = LayerFacts(
                num_kv_heads=key.shape[1],
                key_dim=key.shape[3],
                value_dim=value.shape[3],
                window=window if isinstance(window, int) else None,
                other_arguments=tuple(
                    name
                    for name, argument in arguments.items()
                    if name not in known and argument is not None and argument is not False
                ),
            )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def attend(
    plan: SequencePlan,
    query: torch.Tensor,  # [1, num_heads, num_new, head_dim]
    keys: torch.Tensor,  # [1, num_kv_heads, num_slots, head_dim]
    values: torch.Tensor,  # [1, num_kv_heads, num_slots, value_dim]
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:  # [1, num_new, num_heads, value_dim]
    """Attention of one sequence.

    Query heads that share a key/value head become more rows of one matrix, so that keys and values are read in place
    and never repeated.
    """
    _, num_heads, num_new, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    repeats = num_heads // num_kv_heads
    pieces = plan.pieces(window, repeats, query.dtype)
    rows = query.reshape(1, num_kv_heads, repeats * num_new, head_dim)
    scale = head_dim**-0.5 if scaling is None else scaling
    if softcap is not None:
        result = _squeezed(rows, pieces, keys, values, scale, softcap)
    elif len(pieces) == 1:
        (piece,) = pieces
        result = functional.scaled_dot_product_attention(
            rows, piece.rows(keys), piece.rows(values), attn_mask=piece.mask, scale=scale
        )
    else:
        result = _merged(rows, pieces, keys, values, scale)
    return result.view(1, num_heads, num_new, -1).transpose(1, 2)


def _squeezed(
    rows: torch.Tensor,  # [1, num_kv_heads, num_queries, head_dim]
    pieces: Sequence[Piece],
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:  # [1, num_kv_heads, num_queries, value_dim]
    """Attention whose scores are squeezed into (-softcap, softcap), as in Gemma 2: no fused kernel has it."""
    rows = rows * scale
    scores = []
    for piece in pieces:
        score = torch.tanh(rows @ piece.rows(keys).transpose(2, 3) / softcap) * softcap
        scores.append(score if piece.mask is None else score + piece.mask)
    weights = torch.cat(scores, dim=-1).float().softmax(-1).to(rows.dtype)
    split = torch.split(weights, [piece.num_rows for piece in pieces], dim=-1)
    result = split[0] @ pieces[0].rows(values)
    for weight, piece in zip(split[1:], pieces[1:], strict=True):
        result += weight @ piece.rows(values)
    return result


def _merged(
    rows: torch.Tensor,  # [1, num_kv_heads, num_queries, head_dim]
    pieces: Sequence[Piece],
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:  # [1, num_kv_heads, num_queries, value_dim]
    """Fused attention over each piece, weighed by the mass that each one has: for several pieces, on a CPU.

    A piece's mass is the log-sum-exp of its scores, so its share beside the pieces before it is a sigmoid of the
    difference (as in Flash-Decoding, https://pytorch.org/blog/flash-decoding/).
    """
    result, mass = _fused(rows, pieces[0], keys, values, scale)
    for piece in pieces[1:]:
        part, part_mass = _fused(rows, piece, keys, values, scale)
        result = torch.lerp(result, part, torch.sigmoid(part_mass - mass).unsqueeze(-1))
        if piece is not pieces[-1]:
            mass = torch.logaddexp(mass, part_mass)
    return result.to(rows.dtype)


def _fused(
    rows: torch.Tensor,  # [1, num_kv_heads, num_queries, head_dim]
    piece: Piece,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over one piece # [1, num_kv_heads, num_queries, value_dim] float32.

    And each query's mass there # [1, num_kv_heads, num_queries]
    """
    result, mass = torch._scaled_dot_product_flash_attention_for_cpu(
        rows, piece.rows(keys), piece.rows(values), 0.0, False, attn_mask=piece.mask, scale=scale
    )
    if piece.blind is not None:
        # The kernel gives 0 for both where a query sees nothing. Not -inf: two of these must have a difference.
        mass = mass.masked_fill(piece.blind, torch.finfo(mass.dtype).min)
    return result.float(), mass


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **arguments: Any,
) -> tuple[torch.Tensor, None]:
    """What `transformers` calls; `attention_mask` is ignored, each sequence has its own."""
    state: PagedAttention = getattr(module, LAYER_STATE)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if not state.attached:
        return state.probe(layer, query, key, value, arguments), None
    window = arguments.get("sliding_window")
    return state(layer, query, key, value, scaling, window, arguments.get("softcap")), None


# No mask function is registered under this name: `transformers` then builds no mask at all.
AttentionInterface.register(ATTENTION_NAME, paged_attention)
