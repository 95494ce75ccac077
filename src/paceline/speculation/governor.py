"""The governor of one session's speculation: how large the next block is, drafted ahead or in turn, or none at all.

Each round it says what to do (`decide`), and is told what came of it (`observe`). What it chooses is what it expects
to bring the most tokens per second: expected tokens come from how many drafts were accepted (`estimates.py`), the time
of a round from measured passes, drafts and the rest (`round_model.py`). It never changes which tokens come out, only
when. No clock, no chance, no I/O: the same observations give the same decisions.

    size > 0    now and then, and for all sessions of a replica together, one plain round, at first after 64 rounds
                with blocks, then seldomer up to 512: to measure what is being compared with
    size 0      one block is probed after 16 rounds, then after 32 and so on up to 256; after a probe that paid, the
                next one at once, and 16 again if it is expected to pay once more

A size is kept for 16 rounds and half a second, plain decoding for a second, and each is left only for what is better by
a margin. Plain decoding that is a quarter better is the exception and comes at once. So there are at most 120 changes
per minute whatever is observed, and in a steady state almost none; in its first 16 rounds a session may change every
other one.

Regret against plain decoding, in time, of a session that nothing can help:

* at size 0: a probe that costs c plain rounds is followed by 100 c plain rounds at least, so 1 %; where probes pay by
  luck, what the lucky ones lose on average, less than one probe for each that was due,
* after a change for the worse, and at the start: until the estimates have seen it. That is two drafts where drafts have
  become slow, a few rounds where acceptance has collapsed and the loss is large, and where it is small about one window
  of 32 judged blocks, then what is left of the 16 rounds or half a second,
* in a steady state: 1 %, the margin that plain decoding must be better by, plus errors of the estimates.

An improvement that only a probe can show is seen after 256 plain rounds at the latest.

The goodput of Liu et al. (TurboSpec, arXiv 2406.14066) is maximised with acceptance by place and drafting ahead added.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.speculation.estimates import Level, TreeGain
from paceline.speculation.round_model import (
    DrafterTimes,
    Expectation,
    PassTimes,
    RoundModel,
    SharedAcceptance,
    VerifierTimes,
)

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)
"""Sizes that are compared; in between the difference is small."""
_START_SIZE = 4
_MIN_ROUNDS = 16
_MIN_SECONDS = 0.5
_MIN_SECONDS_PLAIN = 1.0
_START_ROUNDS = 16
_START_MIN_ROUNDS = 2
_COMPARE_EVERY = 8
_MARGIN = 1.02
_MARGIN_TO_PLAIN = 1.01
_MARGIN_FROM_PLAIN = 1.05
_MARGIN_AT_ONCE = 1.25
"""Plain decoding that is better by so much need not wait."""
_PROBE_AFTER = 16
_PROBE_AFTER_AT_MOST = 256
_PROBE_COST_SHARE = 0.01


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
    """

    decision: Decision
    times: PassTimes
    asked: bool = False
    num_draft_tokens: int = 0
    depth: int = 0
    accepted_path: tuple[int, ...] = ()
    branched: bool = False


class Governor:
    """Decides for one session.

    Args:
        pinned: size that is not to be changed, 0 for none at all; None to choose one.
        verifier: times of its verifier, shared with other sessions.
        drafter: times of its drafter, shared with other sessions; None where the verifier drafts by itself.

    Attributes:
        num_changes: how often the size, or whether to draft ahead, was changed.
    """

    def __init__(
        self,
        verifier: VerifierTimes,
        drafter: DrafterTimes | None = None,
        pinned: int | None = None,
    ) -> None:
        self._pinned = pinned
        self._verifier = verifier
        self._drafter = drafter
        self._tree = TreeGain()
        self._tree_depth = 0
        self._tree_nodes = 0
        self._chains_in_a_row = 0
        self._proposed_share = Level(16)
        self._size: int | None = None
        self._ahead = True
        self._drafts_itself = False
        self._widest = 0
        self._rounds = 0
        self._rounds_at_size = 0
        self._seconds_at_size = 0.0
        self._probe_after = _PROBE_AFTER
        self._probe_in = _PROBE_AFTER
        self._chains = self._shared_acceptance.begin()
        self.num_changes = 0

    @property
    def _shared_acceptance(self) -> SharedAcceptance:
        return self._verifier.acceptance if self._drafter is None else self._drafter.acceptance

    @property
    def size(self) -> int:
        """Drafts of a block at present, probes aside."""
        return self._size or 0

    def served_by(self, verifier: VerifierTimes, drafter: DrafterTimes | None) -> None:
        """The session has other replicas now."""
        if verifier is not self._verifier or drafter is not self._drafter:
            self._widest = 0
        self._verifier, self._drafter = verifier, drafter

    # --- deciding -----------------------------------------------------------------------------------------------------

    def decide(self, room: Room) -> Decision:
        """What to do in the next round. To be asked once per round."""
        if room.size == 0:
            return _none(Reason.NO_ROOM)
        if self._pinned is not None:
            depth = min(self._pinned, room.max_depth)
            ahead_depth = self._pinned if room.may_draft_ahead else 0
            return Decision(depth, room.max_draft_tokens if depth else 0, ahead_depth, Reason.PINNED, depth)
        self._drafts_itself = room.drafts_itself
        self._rounds += 1
        self._rounds_at_size += 1
        self._widest = max(self._widest, self._limit(room))
        if self._size is None:
            self._begin(room)
        elif self._may_compare(room):
            self._compare(room)
        if self._size == 0:
            return self._plain_or_probe(room)
        ahead_depth = self.size if self._ahead and room.may_draft_ahead else 0
        if self._verifier.plain_due:
            return Decision(0, 0, ahead_depth, Reason.MEASURE)
        return self._block(self.size, room, ahead_depth, Reason.PAYS)

    def _begin(self, room: Room) -> None:
        self._size = min(_START_SIZE, self._limit(room))
        self._ahead = room.may_draft_ahead
        if self._known(room):
            self._size, self._ahead = self._best(self._model(room), room, with_plain=True)

    def _limit(self, room: Room) -> int:
        """Largest size: of trees no larger than those that are proposed."""
        return min(room.max_draft_tokens, self._tree_nodes) if self._tree_depth else room.size

    def _known(self, room: Room) -> bool:
        verifier = self._verifier
        drafting = verifier.self_draft if room.drafts_itself or self._drafter is None else self._drafter.draft_time
        return verifier.pass_time.known and drafting.known

    def _may_compare(self, room: Room) -> bool:
        return self._limit(room) >= self._widest and self._known(room)  # near the end there is less room

    @property
    def _stayed(self) -> bool:
        if self._rounds <= _START_ROUNDS:
            return self._rounds_at_size >= _START_MIN_ROUNDS
        seconds = _MIN_SECONDS if self._size else _MIN_SECONDS_PLAIN
        return self._rounds_at_size >= _MIN_ROUNDS and self._seconds_at_size >= seconds

    def _model(self, room: Room) -> RoundModel:
        limit = self._limit(room)
        drafter = None if room.drafts_itself else self._drafter
        gains = (*self._gains(limit), 0.0) if self._tree_depth else self._gains(limit + 1)
        tree_depth = min(self._tree_depth, room.max_depth)
        return RoundModel(self._verifier, drafter, gains, tree_depth, self._proposed_share.get(1.0))

    def _gains(self, num_draft_tokens: int) -> tuple[float, ...]:
        if self._tree_depth:
            return self._tree.gains(num_draft_tokens)
        return self._chains.survival(num_draft_tokens)

    def _expect(self, model: RoundModel, size: int, ahead: bool) -> Expectation:
        return model.block(size, ahead) if size else model.plain()

    def _best(self, model: RoundModel, room: Room, with_plain: bool) -> tuple[int, bool]:
        limit = self._limit(room)
        sizes = [size for size in _SIZES if size < limit] + [limit]
        ways = (False, True) if room.may_draft_ahead and not room.drafts_itself else (False,)
        choices = [(size, ahead) for size in sizes for ahead in ways]
        if with_plain:
            choices.insert(0, (0, False))
        return max(choices, key=lambda choice: self._expect(model, *choice).rate)

    def _compare(self, room: Room) -> None:
        model = self._model(room)
        current = self._expect(model, min(self.size, self._limit(room)), self._ahead and room.may_draft_ahead)
        if not self._stayed or (self._rounds > _START_ROUNDS and self._rounds % _COMPARE_EVERY):
            if self.size and model.plain().rate > _MARGIN_AT_ONCE * current.rate:
                self._change(0, self._ahead)
            return
        size, ahead = self._best(model, room, with_plain=True)
        margin = _MARGIN_TO_PLAIN if size == 0 else _MARGIN_FROM_PLAIN if self._size == 0 else _MARGIN
        if self._expect(model, size, ahead).rate > margin * current.rate:
            self._change(size, ahead)

    def _change(self, size: int, ahead: bool) -> None:
        self._size, self._ahead = size, ahead
        self.num_changes += 1
        self._rounds_at_size = 0
        self._seconds_at_size = 0.0
        self._probe_after = self._probe_in = _PROBE_AFTER

    def _plain_or_probe(self, room: Room) -> Decision:
        if self._probe_in > 0 or self._limit(room) < self._widest:
            self._probe_in = max(self._probe_in - 1, 0)
            return _none(Reason.OFF)
        self._probe_in = self._probe_after  # until its outcome is known: a verifier that drafts is told a round ahead
        size, _ = self._best(self._model(room), room, with_plain=False)
        return self._block(size, room, 0, Reason.PROBE)

    def _block(self, size: int, room: Room, ahead_depth: int, reason: Reason) -> Decision:
        if self._tree_depth:
            size = min(size, room.max_draft_tokens)
            return Decision(room.max_depth, size, ahead_depth, reason, size)
        size = min(size, room.max_depth)
        return Decision(size, room.max_draft_tokens, ahead_depth, reason, size)

    # --- learning -----------------------------------------------------------------------------------------------------

    def observe(self, outcome: RoundOutcome) -> None:
        """Takes in what came of a round, whoever decided it."""
        self._verifier.observe(outcome.times, outcome.num_draft_tokens)
        self._seconds_at_size += outcome.times.period_s or outcome.times.verify_s
        if outcome.asked:
            self._proposed_share.observe(1.0 if outcome.num_draft_tokens else 0.0)
        if outcome.num_draft_tokens:
            self._learn_acceptance(outcome)
        plain_s = self._verifier.round_s(0)
        if outcome.decision.reason is Reason.PROBE and plain_s > 0:
            self._probed(outcome, plain_s)

    def _learn_acceptance(self, outcome: RoundOutcome) -> None:
        if outcome.branched:
            if not self._tree_depth:
                self._size, self._widest = None, 0  # from now on they count nodes
            self._tree_depth = max(self._tree_depth, outcome.depth)
            self._tree_nodes = max(self._tree_nodes, outcome.num_draft_tokens)
            self._tree.observe(outcome.num_draft_tokens, outcome.accepted_path)
            self._chains_in_a_row = 0
            return
        self._chains.observe(outcome.depth, len(outcome.accepted_path))
        self._shared_acceptance.observe(outcome.depth, len(outcome.accepted_path))
        self._chains_in_a_row += 1
        if self._tree_depth and self._chains_in_a_row >= _START_ROUNDS:
            self._tree_depth, self._size, self._widest = 0, None, 0

    def _probed(self, outcome: RoundOutcome, plain_s: float) -> None:
        """Plans the next probe by what this one cost, in plain rounds: as it happened, and as is to be expected."""
        took_s = self._verifier.round_s(outcome.num_draft_tokens, ((1.0, outcome.times.draft_wait_s),))
        if self._drafts_itself:
            took_s += self._verifier.self_draft.at(max(outcome.depth, 1))
        cost = took_s / plain_s - 1.0 - len(outcome.accepted_path)
        expected_cost = took_s / plain_s - 1.0 - sum(self._gains(outcome.num_draft_tokens))
        if outcome.num_draft_tokens and min(cost, expected_cost) <= 0.0:
            self._probe_in = 0
            if expected_cost <= 0.0:  # it was no luck alone
                self._probe_after = _PROBE_AFTER
            return
        self._probe_after = min(2 * self._probe_after, _PROBE_AFTER_AT_MOST)
        self._probe_in = max(self._probe_after, int(cost / _PROBE_COST_SHARE))


def _none(reason: Reason) -> Decision:
    return Decision(0, 0, 0, reason)
