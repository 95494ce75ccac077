"""What a scheduler is asked for, and what it answers: sequences, what they want computed, and the next pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.kv.pool import SequenceKV
from paceline.engine.runner import SequencePass
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree


class Holder:
    """One sequence in the scheduler's table. Made by `Scheduler.register`.

    Attributes:
        kv: its rows.
    """

    __slots__ = ("_started", "arrival", "blocked", "kv", "last_wanted_s", "queried")

    def __init__(self, kv: SequenceKV, arrival: int, now_s: float) -> None:
        self.kv = kv
        self.arrival = arrival
        """Place in the order of arrival."""
        self.last_wanted_s = now_s
        """When it last had a want."""
        self.blocked = False
        """There was no room for its rows when it was planned last."""
        self.queried = False
        """Its missing rows have been looked for in the prefix table."""
        self._started = False

    @property
    def started(self) -> bool:
        """Whether rows have been fed since it began or lost them."""
        return self._started and self.kv.num_rows > 0

    def fed(self, *, complete: bool) -> None:
        """It is in a pass, perhaps with all that it has to feed."""
        self._started, self.blocked = True, False
        if complete:
            self.queried = False

    def preempt(self) -> None:
        """Its rows are forgotten."""
        self.kv.rollback(0)
        self._started = self.queried = False


@dataclass(frozen=True, slots=True)
class Want:
    """What one sequence is to compute.

    Attributes:
        holder: the sequence; at most one want each.
        tokens: all its tokens from the first on, more than it has rows; read until the next plan.
        tree: draft tokens under the last of them.
        wants_logits: whether the part that ends the chain gives logits of its last token and the tree.
    """

    holder: Holder
    tokens: Sequence[int]
    tree: DraftTree = EMPTY_BLOCK
    wants_logits: bool = True

    @property
    def num_chain(self) -> int:
        """Tokens to be fed before the tree."""
        return len(self.tokens) - self.holder.kv.num_rows

    @property
    def num_tokens(self) -> int:
        """Tokens to be fed, the tree included."""
        return self.num_chain + self.tree.num_draft_tokens


@dataclass(frozen=True, slots=True)
class Part:
    """One sequence's part of the pass; its rows are reserved.

    Attributes:
        index: of its want.
        sequence: for the runner. Its tree is the want's or, without room for it, empty.
        complete: whether the chain ends in it.
    """

    index: int
    sequence: SequencePass
    complete: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The next pass.

    Attributes:
        parts: at most one for each want; none only if all wait for pages of idle sequences.
        retry_in_s: without parts and new wants: seconds until the next plan can have one; 0 otherwise.
    """

    parts: tuple[Part, ...]
    retry_in_s: float
