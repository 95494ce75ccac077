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
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface

from paceline.engine.kv.pool import KVPool, PlaneShape
from paceline.engine.runner import SequencePass

ATTENTION_NAME = "paceline_paged"
"""Name under which the function is registered with `transformers`."""

LAYER_STATE = "paceline_attention"
"""Attribute of an attention module that holds its model's `PagedAttention`."""

Slots = slice | torch.Tensor


@dataclass(slots=True)
class SequencePlan:
    """One sequence in a pass.

    Attributes:
        start, stop: its columns [start, stop) among the pass's tokens.
        num_rows: rows that exist after the pass, old and new.
        write: slots of its new rows.
        read: slots of all its rows.
        visible: # [stop - start, num_rows] which rows each new token sees without a window; None when all see all
            rows (a single token).
        positions: of the new tokens.
    """

    start: int
    stop: int
    num_rows: int
    write: Slots
    read: Slots
    visible: torch.Tensor | None
    positions: torch.Tensor
    _masks: dict[tuple[int | None, int], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        """Additive mask # [repeats * num_new, num_rows], or None when every new token sees every row.

        Args:
            window: how many positions a token looks back, itself included; None for all.
            repeats: query heads per key/value head; the mask is repeated for each.
            dtype: of the result.
        """
        if window is not None and window >= self.num_rows:
            window = None
        key = (window, repeats)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, repeats, dtype)
        return self._masks[key]

    def _build_mask(self, window: int | None, repeats: int, dtype: torch.dtype) -> torch.Tensor | None:
        if self.visible is None and window is None:
            return None
        num_new = self.stop - self.start
        device = self.positions.device
        visible = self.visible
        if visible is None:
            visible = torch.ones(num_new, self.num_rows, dtype=torch.bool, device=device)
        if window is not None:
            # Rows of older tokens lie at their positions; the new ones may share a position (siblings of a tree).
            rows = torch.cat([torch.arange(self.num_rows - num_new, device=device), self.positions])
            visible = visible & (self.positions[:, None] - rows[None, :] < window)
        mask = torch.zeros(num_new, self.num_rows, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        return mask.repeat(repeats, 1)


@dataclass(frozen=True, slots=True)
class PassPlan:
    """All sequences of a pass and the inputs of the model.

    Attributes:
        sequences: in order of their columns.
        token_ids: # [1, num_tokens]
        positions: # [1, num_tokens]
        wanted: columns whose logits are wanted # [num_wanted]
        num_wanted: how many of `wanted` belong to each sequence.
        write: slots of all new rows, when they are one range or there are several sequences; see `SequencePlan`.
    """

    sequences: tuple[SequencePlan, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    num_wanted: tuple[int, ...]
    write: Slots


def plan_pass(batch: Sequence[SequencePass], device: torch.device) -> PassPlan:
    """Lays the parts of a pass side by side.

    The rows that the parts write must be reserved.
    """
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    plans: list[SequencePlan] = []
    write: list[int] = []
    for part in batch:
        start, first = len(tokens), part.kv.num_rows
        root = first + len(part.tokens) - 1
        part_positions = [*range(first, root + 1), *(root + depth for depth in part.tree.depths[1:])]
        tokens += part.tokens
        tokens += part.tree.tokens
        positions += part_positions
        stop = len(tokens)
        wanted += range(stop - part.num_logits, stop)
        num_rows = first + stop - start
        slots = part.kv.slot_list(first, num_rows)
        write += slots
        plans.append(
            SequencePlan(
                start=start,
                stop=stop,
                num_rows=num_rows,
                write=_as_slots(slots, device),
                read=part.kv.slots(num_rows),
                visible=_visible(part, num_rows, device),
                positions=torch.tensor(part_positions, device=device),
            )
        )
    return PassPlan(
        sequences=tuple(plans),
        token_ids=torch.tensor([tokens], device=device),
        positions=torch.tensor([positions], device=device),
        wanted=torch.tensor(wanted, device=device, dtype=torch.long),
        num_wanted=tuple(part.num_logits for part in batch),
        write=_as_slots(write, device),
    )


def _as_slots(slots: list[int], device: torch.device) -> Slots:
    first = slots[0]
    if slots[-1] - first == len(slots) - 1 and slots == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return torch.tensor(slots, device=device)


def _visible(part: SequencePass, num_rows: int, device: torch.device) -> torch.Tensor | None:
    """Which rows each new token sees # [num_tokens, num_rows]; None for a single token, which sees all."""
    num_new = part.num_tokens
    if num_new == 1:
        return None
    visible = torch.ones(num_new, num_rows, dtype=torch.bool).tril_(num_rows - num_new)
    if not part.tree.is_chain:
        root = len(part.tokens) - 1
        nodes = torch.eye(part.tree.num_draft_tokens + 1, dtype=torch.bool)
        for index, parent in enumerate(part.tree.parents):
            nodes[index + 1] |= nodes[parent]
        visible[root:, num_rows - num_new + root :] = nodes
    return visible.to(device)


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
            self._keys[layer] = next(groups[facts.num_kv_heads, facts.key_dim])
            self._values[layer] = next(groups[facts.num_kv_heads, facts.value_dim])

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
        keys[:, self.plan.write] = key[0]
        values[:, self.plan.write] = value[0]
        query = query[0]
        if len(self.plan.sequences) == 1:
            return _attend(self.plan.sequences[0], query, keys, values, scaling, window, softcap).unsqueeze(0)
        result = query.new_empty(query.shape[1], query.shape[0], value.shape[-1])
        for plan in self.plan.sequences:
            part = query[:, plan.start : plan.stop]
            result[plan.start : plan.stop] = _attend(plan, part, keys, values, scaling, window, softcap)
        return result.unsqueeze(0)

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


def _attend(
    plan: SequencePlan,
    query: torch.Tensor,  # [num_heads, num_new, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, num_slots, head_dim]
    values: torch.Tensor,  # [num_kv_heads, num_slots, value_dim]
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:  # [num_new, num_heads, value_dim]
    """Attention of one sequence.

    Query heads that share a key/value head become more rows of one matrix, so that keys and values are read in place
    and never repeated.
    """
    num_heads, num_new, head_dim = query.shape
    keys, values = keys[:, plan.read], values[:, plan.read]
    num_kv_heads = keys.shape[0]
    repeats = num_heads // num_kv_heads
    mask = plan.mask(window, repeats, query.dtype)
    rows = query.reshape(num_kv_heads, repeats * num_new, head_dim)
    if softcap is None:
        # [1, num_kv_heads, repeats * num_new, value_dim]
        result = functional.scaled_dot_product_attention(
            rows[None], keys[None], values[None], attn_mask=mask, scale=scaling
        )
    else:
        result = _softcapped(rows, keys, values, mask, scaling, softcap)
    return result.view(num_heads, num_new, -1).transpose(0, 1)


def _softcapped(
    rows: torch.Tensor,  # [num_kv_heads, num_queries, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,  # [num_queries, num_rows]
    scaling: float | None,
    softcap: float,
) -> torch.Tensor:
    """Attention with scores squeezed into (-softcap, softcap), as Gemma 2 does."""
    scores = torch.matmul(rows, keys.transpose(1, 2)) * (rows.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(rows.dtype)
    return torch.matmul(weights, values)


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
