"""Which outcomes of a block are likeliest, as far as its drafter can tell before the verdict.

An outcome is where the target stops agreeing and what it writes there instead: a position of the block and the rank of
a token among the drafter's candidates for it. Rank 0 is the draft itself. Behind the last draft, where nothing is there
to be agreed with, rank 0 is the guess of the target's extra token, which drafting ahead assumes anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

_ACCEPTANCE = 0.8
"""How often a draft is accepted, about. It only orders outcomes, and the order hardly depends on it."""
NUM_CANDIDATES = 4
"""Ranks that are looked at, the draft included; beyond, the target's token is found in one case of ten."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One way in which the judging of a block may end.

    Attributes:
        position: drafts that are accepted.
        rank: of the target's next token among the drafter's candidates, at least 1.
    """

    position: int
    rank: int


@cache
def likeliest_outcomes(num_draft_tokens: int, num: int) -> tuple[Outcome, ...]:
    """The likeliest outcomes of a chain besides that all of it is accepted and the guess behind it is right.

    To stop at a position all drafts before it must be accepted. Where the target's token is not the draft, it is the
    candidate of rank r in a share of the cases that falls about as 1 / r**2 (`bench/outcomes.py`).

    Args:
        num_draft_tokens: of the block.
        num: how many, at most; there are no more than the candidates give.

    Returns:
        The likeliest first.
    """
    outcomes = [
        Outcome(position, rank) for position in range(num_draft_tokens + 1) for rank in range(1, NUM_CANDIDATES)
    ]
    outcomes.sort(key=lambda outcome: _ACCEPTANCE**outcome.position / outcome.rank**2, reverse=True)
    return tuple(outcomes[:num])
