"""How many tokens of a drafted chain would be accepted, measured on answers that were not learnt from.

A chain's draft i counts only where drafts before it were right, so what the drafter sees at draft i are true tokens and
its own states: all anchors of a text can be measured at once. Drafts are the drafter's best tokens; for answers that
were sampled this is less than what keyed noise reaches in service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from paceline.training.batches import Batch


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of chains.

    Attributes:
        positions: anchors measured.
        at_least: at_least[i]: share of anchors at which drafts 0 to i were all right.
    """

    positions: int
    at_least: tuple[float, ...]

    @property
    def tokens_per_pass(self) -> float:
        """Expected tokens per target pass when a whole chain is drafted each time: the target's own token and these."""
        return 1.0 + sum(self.at_least)

    @property
    def per_position(self) -> tuple[float, ...]:
        """Acceptance of draft i where the drafts before it were right."""
        before = (1.0, *self.at_least)
        return tuple(now / past if past else 0.0 for now, past in zip(self.at_least, before, strict=False))


def acceptance_of(counts: torch.Tensor) -> Acceptance:
    """From counts # [1 + depth]: anchors, then anchors with draft 0 right, with drafts 0 and 1 right, ..."""
    positions = int(counts[0])
    return Acceptance(positions, tuple(int(count) / max(positions, 1) for count in counts[1:]))


def count_chains(batch: Batch, matches: torch.Tensor) -> torch.Tensor:
    """Counts for `acceptance_of` # [1 + depth] int64.

    Args:
        batch: what was measured.
        matches: whether draft i is right at each anchor # [batch, length, depth] bool; what it says away from anchors
            does not matter.
    """
    anchors = batch.anchors(matches.shape[2])
    chains = matches[anchors].cumprod(dim=1, dtype=torch.int64)
    return torch.cat([anchors.sum().view(1), chains.sum(dim=0)])


def chain_matches(batch: Batch, depth: int, draft: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Matches for `count_chains`, asking for drafts only where the chain is still right.

    Args:
        batch: the answers.
        depth: drafts per chain.
        draft: number of the draft and anchors # [batch, length] bool, to the drafted ids at those anchors # [anchors];
            called for 0, 1, ... in order.
    """
    alive = batch.anchors(depth)
    matches = torch.zeros(*alive.shape, depth, dtype=torch.bool, device=alive.device)
    for index in range(depth):
        wanted = batch.shifted_tokens(2 + index)
        right = torch.zeros_like(alive)
        right[alive] = draft(index, alive) == wanted[alive]
        matches[..., index] = right
        alive = right
    return matches
