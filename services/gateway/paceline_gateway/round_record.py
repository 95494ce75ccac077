"""What one round cost and brought, for the metrics. The sum over a generation's records is its `Evidence`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.speculation.governor import Decision


class Fallback(Enum):
    """Why a round of a generation that speculates went without a block."""

    NO_DRAFTER = "no_drafter"
    """None has been found yet."""
    DRAFTER_LOST = "drafter_lost"
    """Its link broke, or it was given up: it failed, was silent, or its blocks were refused again and again."""
    LATE_DRAFT = "late_draft"
    """The draft did not come in time."""
    NOTHING_PROPOSED = "nothing_proposed"
    """The drafter, or the verifier that drafts by itself, has answered and proposes nothing."""
    FEATURES_LACKING = "features_lacking"
    """The drafter does not have the target's features of all tokens yet."""
    CONTEXT_FULL = "context_full"
    """The drafter's context leaves no room."""
    BLOCK_REFUSED = "block_refused"
    """The verifier called the block invalid."""


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """Where the time went, in seconds.

    Attributes:
        draft_s, draft_queue_s, draft_wire_s: of drafts: in the drafter, in its queue, on the way there and back; of
            drafts that the verifier makes only the first.
        draft_wait_s: the verifier was idle for a draft.
        verify_s, verify_queue_s, verify_wire_s: the same three for the verdict.
    """

    draft_s: float = 0.0
    draft_queue_s: float = 0.0
    draft_wire_s: float = 0.0
    draft_wait_s: float = 0.0
    verify_s: float = 0.0
    verify_queue_s: float = 0.0
    verify_wire_s: float = 0.0

    def plus(self, other: RoundTimes) -> RoundTimes:
        """Both together."""
        return RoundTimes(
            self.draft_s + other.draft_s,
            self.draft_queue_s + other.draft_queue_s,
            self.draft_wire_s + other.draft_wire_s,
            self.draft_wait_s + other.draft_wait_s,
            self.verify_s + other.verify_s,
            self.verify_queue_s + other.verify_queue_s,
            self.verify_wire_s + other.verify_wire_s,
        )


NO_TIMES = RoundTimes()


@dataclass(frozen=True, slots=True)
class FirstRound:
    """What only the first verdict of a generation tells.

    Attributes:
        prompt_tokens: tokens that it read.
        queue_s: from the request's arrival until its first round was sent.
        time_to_first_token_s: from the request's arrival until the verdict.
    """

    prompt_tokens: int
    queue_s: float
    time_to_first_token_s: float


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One round. A generation that ends without another verdict has a last record with what was left.

    Attributes:
        target_passes: 1; 0 in a record of what was left.
        new_tokens: tokens that became final.
        draft_tokens: of the block that was judged; 0 for a plain round.
        accepted_tokens: drafts among the new tokens.
        wasted_draft_tokens: drafts that were dropped unjudged.
        ahead_hit: the block had been drafted while the one before it was judged.
        method: who drafted the block; empty for a plain round.
        fallback: why it was plain although the generation speculates; None if it was not, or had to be.
        times: where the time went.
        since_last_s: from the verdict before to this one; 0 for the first.
        first: of the first round only.
        decision: what the governor had decided; None where it does not choose.
        size_changes: how often it has changed its choice since the round before.
        overhead_s: of `since_last_s`, what went neither into judging nor into drafts that were waited for: wire,
            gateway and store. None for the first round, for one that waited in vain, and for one with a gap.
        verifier_gap_s: how long the session was without its verifier: from the loss until the verdict that this round
            has brought from another one, or from the same one back again. None if it was not lost.
        drafter_gap_s: the same of its drafter, until a draft came.
    """

    target_passes: int
    new_tokens: int
    draft_tokens: int
    accepted_tokens: int
    wasted_draft_tokens: int
    ahead_hit: bool
    method: str
    fallback: Fallback | None
    times: RoundTimes
    since_last_s: float
    first: FirstRound | None = None
    decision: Decision | None = None
    size_changes: int = 0
    overhead_s: float | None = None
    verifier_gap_s: float | None = None
    drafter_gap_s: float | None = None

    @property
    def empty(self) -> bool:
        """Nothing happened."""
        counts = (self.target_passes, self.wasted_draft_tokens, self.ahead_hit)
        return not any(counts) and self.times == NO_TIMES
