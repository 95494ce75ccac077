"""What becomes of a block: the verifier's verdict, or that it refuses the block."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import PacelineError
from paceline.messages import Verified, Verify
from paceline.speculation.tree import DraftTree
from paceline_gateway.tail import EMPTY_TAIL, Tail


@dataclass(frozen=True, slots=True)
class Verdict:
    """An answer that was waited for.

    Attributes:
        block: the block that it judges, as sent.
        event: the answer.
        round_trip_s: from the command, as sent last, to the answer.
        next_block: what the verifier proposes for the next round; empty unless it was asked.
        next_depth: how deep it was asked to; 0 for not at all.
        reading: it had to read all tokens first: those of the prompt, or everything anew.
        gap_s: how long there was no verifier before it; None if none was lost.
        followed: it is what the follow-up counted on, which so is the next round.
    """

    block: DraftTree
    event: Verified
    round_trip_s: float
    next_block: Tail = EMPTY_TAIL
    next_depth: int = 0
    reading: bool = False
    gap_s: float | None = None
    followed: bool = False


@dataclass(frozen=True, slots=True)
class BlockRefused:
    """The verifier calls the block, not the request, invalid; the lane is idle again."""


def check_verdict(event: Verified, command: Verify) -> None:
    """A replica is a peer: what it says is checked before it becomes text.

    Raises:
        PacelineError: the answer does not fit the command.
    """
    block = command.block
    parent = 0
    sound = event.base_len == command.base_len and len(event.tokens) == len(event.accepted_path) + 1
    for node, token in zip(event.accepted_path, event.tokens, strict=False):
        sound = sound and 0 < node <= block.num_draft_tokens
        sound = sound and block.parents[node - 1] == parent and block.tokens[node - 1] == token
        parent = node
    if not sound or min(event.tokens, default=-1) < 0:
        raise PacelineError(
            f"the verifier's answer to round {command.round} of session {command.session} does not fit the block "
            f"it was sent: {len(event.accepted_path)} accepted nodes of {block.num_draft_tokens} and "
            f"{len(event.tokens)} tokens"
        )
