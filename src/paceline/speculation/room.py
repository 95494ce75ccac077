"""What a round allows. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Room:
    """What the next round allows.

    Attributes:
        max_depth: deepest block.
        max_draft_tokens: most nodes of it.
        may_draft_ahead: drafting ahead is possible and not switched off.
        drafts_itself: the verifier makes the drafts.
    """

    max_depth: int
    max_draft_tokens: int
    may_draft_ahead: bool = True
    drafts_itself: bool = False

    @property
    def size(self) -> int:
        """Longest chain."""
        return max(min(self.max_depth, self.max_draft_tokens), 0)
