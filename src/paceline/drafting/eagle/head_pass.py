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
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.pass_plan import NewRows, join_rows, seen_in_order
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.runner_setup import make_pool


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
        self.pool = make_pool(self._attention.plane_shapes(), options, dtype=head.dtype, device=head.device)
        self._attention.attach(self.pool)

    def forward(self, parts: Sequence[HeadPart]) -> list[torch.Tensor]:
        """Runs one pass; writes rows without making them part of the sequences, which is the caller's to do.

        Returns:
            Per part its wanted states # [num_wanted, hidden_size]
        """
        device = self.head.device
        plan = join_rows([_new_rows(part, device) for part in parts], device)
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


def _new_rows(part: HeadPart, device: torch.device) -> NewRows:
    first, num_new = part.kv.num_rows, len(part.token_ids)
    visible = seen_in_order(num_new, first + num_new) if part.visible is None else part.visible
    return NewRows(
        kv=part.kv,
        first_row=first,
        token_ids=part.token_ids,
        positions=part.positions,
        num_wanted=part.num_wanted,
        visible=None if visible is None else visible.to(device),
        seen_by_all=first if part.visible is None else 0,
    )
