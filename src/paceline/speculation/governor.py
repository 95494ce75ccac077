"""The governor of one session's speculation: how large the next block is, drafted ahead or in turn, or none at all.

Each round it says what to do (`decide`), and is told what came of it (`observe`). What is chosen is what is expected to
bring the most tokens per second: expected tokens come from how many drafts were accepted (`estimates.py`), the time of
a round from measured passes, drafts and the rest (`round_model.py`). It never changes which tokens come out, only when.
No clock, no chance, no I/O: the same observations give the same decisions.

    all sessions of a pair      know what any of them has seen, and do the same (`pair.py`)
    a session unlike them       by more than chance explains: chooses by its own acceptance
    size > 0                    one plain round of the verifier's after 64 with blocks, then seldomer up to 512: to
                                measure what is being compared with
    size 0                      one of the sessions tries a block now and then (`probes.py`)

Choices are kept for a while and left only for what is better by a margin (`choice.py`).

Regret against plain decoding, in time, where nothing helps:

* at size 0: a probe that costs c plain rounds is followed by 200 c plain rounds at least, so half a percent; where
  probes pay by luck, what the lucky ones lose on average, less than one probe for each that was due,
* after a change for the worse, and at the start: until the estimates have seen it. That is two drafts where drafts have
  become slow, a few rounds where acceptance has collapsed and the loss is large, and where it is small about one window
  of 32 rounds, then what is left of the 16 rounds or half a second,
* in a steady state: 1 %, the margin that plain decoding must be better by, plus errors of the estimates.

An improvement that only a probe can show is seen after 16 to 200 c plain rounds of all sessions of the pair together.

The goodput of Liu et al. (TurboSpec, arXiv 2406.14066) is maximised with acceptance by place and drafting ahead added.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.speculation.choice import Choice, Chooser, best
from paceline.speculation.estimates import ChainAcceptance, Level, TreeGain
from paceline.speculation.pair import Pair
from paceline.speculation.replica_times import PassTimes
from paceline.speculation.room import Room
from paceline.speculation.round_model import RoundModel

_WORN_BY_A_PLAIN_ROUND = 1.0 / 512.0
"""Of what a session knows of its acceptance: the longer it is at size 0 the more it is thought like others."""
_UNLIKE = 9.0
_LIKE = 3.0
"""Squared distances from the others, in standard deviations: beyond the first a session chooses for itself, below the
second no more."""


class Reason(Enum):
    """Why a round has the block that it has."""

    PAYS = "pays"
    """It brings the most tokens per second, or nothing is known yet."""
    OFF = "off"
    """No block: plain decoding is faster."""
    PROBE = "probe"
    """A block although plain decoding seems faster: to see whether that still holds."""
    MEASURE = "measure"
    """No block although blocks seem faster: to see how long a plain round takes."""
    PINNED = "pinned"
    """The request or a setting fixes the size."""
    NO_ROOM = "no_room"
    """The end of the generation or a context leaves no room for a block."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do in the next round.

    Attributes:
        max_depth: how deep a block to ask for and to send; 0 for none.
        num_draft_tokens: most nodes of it to send.
        ahead_depth: how deep to draft the block after it while it is judged; 0 for not at all.
        reason: why.
        size: what was chosen: depth of a chain, nodes of a tree.
    """

    max_depth: int
    num_draft_tokens: int
    ahead_depth: int
    reason: Reason
    size: int = 0


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What came of a round.

    Attributes:
        decision: what had been decided.
        times: where its time went.
        asked: a draft had been asked for, in time to be sent.
        num_draft_tokens: nodes of the block that was judged; 0 for none.
        depth: its depth.
        accepted_path: accepted nodes, counted from 1.
        branched: what had been proposed was a tree and no chain.
        at: when its verdict came, in seconds of any clock that all sessions share.
    """

    decision: Decision
    times: PassTimes
    asked: bool = False
    num_draft_tokens: int = 0
    depth: int = 0
    accepted_path: tuple[int, ...] = ()
    branched: bool = False
    at: float = 0.0


class Governor:
    """Decides for one session.

    Args:
        pair: what the sessions of its verifier and its drafter share.
        pinned: size that is not to be changed, 0 for none at all; None to choose one.

    Attributes:
        num_changes: how often the size, or whether to draft ahead, was changed.
    """

    def __init__(self, pair: Pair, pinned: int | None = None) -> None:
        self._pinned = pinned
        self._proposed_share = Level(16)
        self._choice: Choice | None = None
        self._pair = pair
        self._join(pair)
        self.num_changes = 0

    @property
    def size(self) -> int:
        """Drafts of a block at present, probes aside."""
        return 0 if self._choice is None else self._choice.size

    def served_by(self, pair: Pair) -> None:
        """The session has these replicas from now on."""
        if pair is not self._pair:
            self._join(pair)

    def end(self) -> None:
        """The session has ended."""
        self._pair.leave(self)

    def _join(self, pair: Pair) -> None:
        self._pair.leave(self)
        self._pair = pair
        pair.join(self, drafts=self._pinned != 0)
        self._kind = pair.kind
        self._own: ChainAcceptance | TreeGain = TreeGain() if pair.tree_depth else ChainAcceptance()
        self._chooser = Chooser()
        self._differs = False

    # --- deciding -----------------------------------------------------------------------------------------------------

    def decide(self, room: Room) -> Decision:
        """What to do in the next round. To be asked once per round."""
        if room.size == 0:
            return _none(Reason.NO_ROOM)
        if self._pinned is not None:
            depth = min(self._pinned, room.max_depth)
            ahead_depth = self._pinned if room.may_draft_ahead else 0
            return Decision(depth, room.max_draft_tokens if depth else 0, ahead_depth, Reason.PINNED, depth)
        choice = self._choose(room)
        if choice.size == 0:
            return self._plain_or_probe(room)
        ahead_depth = choice.size if choice.ahead and room.may_draft_ahead else 0
        if self._pair.verifier.plain_due:
            return Decision(0, 0, ahead_depth, Reason.MEASURE)
        return self._block(choice.size, room, ahead_depth, Reason.PAYS)

    def _choose(self, room: Room) -> Choice:
        """What all do; something else only where this session is unlike them."""
        choice = self._pair.choose(room)
        if self._differs and self._kind == self._pair.kind:
            if self._chooser.choice is None:
                self._chooser.begin(choice)
            choice = self._chooser.choice or choice
            if not self._pair.is_narrow(room):
                choice, _ = self._chooser.look(
                    self._model(room), self._pair.limit(room), room.may_draft_ahead, self._pair.moment
                )
        if self._choice is not None and choice != self._choice and self._kind == self._pair.kind:
            self.num_changes += 1
        if self._kind != self._pair.kind:
            self._join(self._pair)
        self._choice = choice
        return choice

    def _model(self, room: Room) -> RoundModel:
        gains = self._pair.gains(self._pair.limit(room), self._own)
        share = self._proposed_share.get(self._pair.proposed_share.get(1.0))
        return self._pair.model(room, gains, share)

    def _plain_or_probe(self, room: Room) -> Decision:
        self._own.wear(1.0 - _WORN_BY_A_PLAIN_ROUND)
        if self._pair.is_narrow(room) or not self._pair.takes_probe():
            return _none(Reason.OFF)
        choice = best(self._model(room), self._pair.limit(room), may_ahead=False, with_plain=False)
        return self._block(choice.size, room, 0, Reason.PROBE)

    def _block(self, size: int, room: Room, ahead_depth: int, reason: Reason) -> Decision:
        if self._pair.tree_depth:
            size = min(size, room.max_draft_tokens)
            return Decision(room.max_depth, size, ahead_depth, reason, size)
        size = min(size, room.max_depth)
        return Decision(size, room.max_draft_tokens, ahead_depth, reason, size)

    # --- learning -----------------------------------------------------------------------------------------------------

    def observe(self, outcome: RoundOutcome) -> None:
        """Takes in what came of a round, whoever decided it."""
        pair = self._pair
        pair.verifier.observe(outcome.times, outcome.num_draft_tokens)
        pair.round_ended(outcome.at, outcome.times.period_s)
        if outcome.asked:
            proposed = 1.0 if outcome.num_draft_tokens else 0.0
            self._proposed_share.observe(proposed)
            pair.proposed_share.observe(proposed)
        if outcome.num_draft_tokens:
            self._learn_acceptance(outcome)
        decision, period_s = outcome.decision, outcome.times.period_s
        if decision.reason is Reason.PROBE:
            self._probed(outcome)
        elif decision.reason is Reason.PAYS and not self._differs and period_s is not None:
            pair.block_ended(decision.size, decision.ahead_depth > 0, period_s)

    def _learn_acceptance(self, outcome: RoundOutcome) -> None:
        pair, accepted = self._pair, len(outcome.accepted_path)
        if outcome.branched:
            pair.tree_judged(outcome.depth, outcome.num_draft_tokens, outcome.accepted_path)
        else:
            pair.chain_judged(outcome.depth, accepted)
        if isinstance(self._own, ChainAcceptance):
            self._own.observe(outcome.depth, accepted)
        else:
            self._own.observe(outcome.num_draft_tokens, outcome.accepted_path)
        if self._kind != pair.kind:
            return
        unlike = pair.unlike(self._own)
        if not self._differs and unlike > _UNLIKE:
            self._differs, self._chooser = True, Chooser()
        elif self._differs and unlike < _LIKE:
            self._differs = False

    def _probed(self, outcome: RoundOutcome) -> None:
        """Plans the next probe by what this one cost, in plain rounds: as it happened, and as is to be expected."""
        verifier = self._pair.verifier
        plain_s = verifier.round_s(0)
        if plain_s <= 0.0:
            return
        took_s = verifier.round_s(outcome.num_draft_tokens, outcome.times.draft_wait_s)
        if self._pair.drafter is None:
            took_s += verifier.self_draft.at(max(outcome.depth, 1))
        # Others do not wait for the one that probes, which so may miss a pass.
        took_s = max(took_s, outcome.times.period_s or 0.0)
        cost = took_s / plain_s - 1.0 - len(outcome.accepted_path)
        gains = self._pair.gains(outcome.num_draft_tokens, self._own)[: outcome.num_draft_tokens]
        expected_cost = took_s / plain_s - 1.0 - sum(gains)
        if outcome.num_draft_tokens and min(cost, expected_cost) <= 0.0:
            self._pair.probes.paid()
        else:
            self._pair.probes.cost(cost)


def _none(reason: Reason) -> Decision:
    return Decision(0, 0, 0, reason)
