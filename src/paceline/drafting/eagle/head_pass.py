"""One pass of a head over the paged rows of many sessions.

A part feeds rows at the end of a sequence: true pairs of a context, or one level of a growing draft. The nodes of a
level share a position and see the context, their own ancestors and themselves; the levels before lie in the rows
between, so that no row is computed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.drafting.eagle.head import EagleHead
from paceline.engine.attention import PagedAttention
from paceline.engine.kv.pool import KVPool, SequenceKV
from paceline.engine.kv.sequence import page_runs
from paceline.engine.pass_plan import MAX_RUNS, PassPlan, SequencePlan, Slots
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.runner_setup import MIN_POOL_TOKENS
from paceline.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class HeadPart:
    """One session's part of a pass; its rows are reserved.

    Attributes:
        kv: rows [0, kv.num_rows) are computed and this pass writes the rows after them, one per token.
        features: of the target, or states of the head # [num_tokens, width]
        token_ids: the token after each feature.
        positions: of the features.
        num_wanted: how many of the last rows' states are wanted.
        visible: which rows each new one sees # [num_tokens, kv.num_rows + num_tokens] bool; None for all up to itself.
    """

    kv: SequenceKV
    features: torch.Tensor
    token_ids: Sequence[int]
    positions: Sequence[int]
    num_wanted: int
    visible: torch.Tensor | None = None


class HeadRunner:
    """A head with the pool of its rows. Used from one thread at a time.

    Args:
        head: the model.
        options: of its pool: memory, page size, whether rows of equal beginnings are shared.

    Attributes:
        head: the model.
        pool: its rows.

    Raises:
        ConfigurationError: the memory is too small.
    """

    def __init__(self, head: EagleHead, options: RunnerOptions) -> None:
        self.head = head
        shape = head.layer.shape
        self._attention = PagedAttention.for_layers([None], shape.num_kv_heads, shape.head_dim)
        self.pool = KVPool.within_budget(
            self._attention.plane_shapes(),
            options.kv_bytes,
            options.page_tokens,
            dtype=head.dtype,
            device=head.device,
            prefix_caching=options.prefix_caching,
        )
        if self.pool.capacity_tokens < MIN_POOL_TOKENS:
            raise ConfigurationError(
                f"a KV budget of {options.kv_bytes} bytes holds {self.pool.capacity_tokens} rows of the head; at least "
                f"{MIN_POOL_TOKENS * self.pool.bytes_per_token} bytes are needed",
                field="kv_bytes",
            )
        self._attention.attach(self.pool)

    def forward(self, parts: Sequence[HeadPart]) -> list[torch.Tensor]:
        """Runs one pass; writes rows without making them part of the sequences, which is the caller's to do.

        Returns:
            Per part its wanted states # [num_wanted, hidden_size]
        """
        device = self.head.device
        plan = _plan(parts, device)
        features = [part.features.to(device=device, dtype=self.head.dtype) for part in parts]
        self._attention.plan = plan
        try:
            states = self.head.states(
                features[0] if len(features) == 1 else torch.cat(features),
                plan.token_ids[0],
                plan.positions,
                self._attention,
                plan.wanted if len(plan.wanted) < plan.token_ids.shape[1] else None,
            )
        finally:
            self._attention.plan = None
        return list(torch.split(states, list(plan.num_wanted)))


def _plan(parts: Sequence[HeadPart], device: torch.device) -> PassPlan:
    """Lays the parts side by side; a sequence whose pages are badly scattered is moved together first."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    write: list[int] = []
    plans: list[SequencePlan] = []
    for part in parts:
        kv, num_new = part.kv, len(part.token_ids)
        if len(page_runs(kv.pages)) > MAX_RUNS:
            kv.straighten()
        num_rows = kv.num_rows + num_new
        start, stop = len(tokens), len(tokens) + num_new
        tokens += part.token_ids
        positions += part.positions
        wanted += range(stop - part.num_wanted, stop)
        write += kv.slot_list(kv.num_rows, num_rows)
        plans.append(
            SequencePlan(
                start=start,
                stop=stop,
                num_rows=num_rows,
                pages=kv.pages[: -(-num_rows // kv.page_tokens)],
                page_tokens=kv.page_tokens,
                visible=_visible(part, num_rows, device),
                positions=torch.tensor(part.positions, device=device),
                seen_by_all=kv.num_rows if part.visible is None else 0,
            )
        )
    return PassPlan(
        sequences=tuple(plans),
        token_ids=torch.tensor([tokens], device=device),
        positions=torch.tensor([positions], device=device),
        wanted=torch.tensor(wanted, device=device, dtype=torch.long),
        num_wanted=tuple(part.num_wanted for part in parts),
        write=_as_slots(write, device),
    )


def _visible(part: HeadPart, num_rows: int, device: torch.device) -> torch.Tensor | None:
    """Which rows each new one sees # [num_new, num_rows]; None for a single one that sees all."""
    if part.visible is not None:
        return part.visible.to(device)
    num_new = len(part.token_ids)
    if num_new == 1:
        return None
    return torch.ones(num_new, num_rows, dtype=torch.bool).tril_(num_rows - num_new).to(device)


def _as_slots(slots: list[int], device: torch.device) -> Slots:
    """Neighbouring slots as a slice, which is written faster."""
    first = slots[0]
    if slots == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return torch.tensor(slots, device=device)
