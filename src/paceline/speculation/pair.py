"""What all sessions of one verifier and one drafter know and do together. Pure Python.

What a session learns of acceptance and of times, the others know; and they all do the same, because a mixture is worse
than its parts: a session that waits for drafts misses the passes of those that do not. So the pair chooses, by what is
expected of the average of its sessions; a session that is unlike them chooses for itself (`governor.py`).

Acceptance is forgotten at the pace of one session: what n sessions see in 32 rounds counts as much as what one does.
"""

from __future__ import annotations

from paceline.speculation.choice import Choice, Chooser, Moment, expect
from paceline.speculation.estimates import NEWEST_SHARE, ChainAcceptance, Level, TreeGain
from paceline.speculation.probes import ProbeSchedule
from paceline.speculation.replica_times import DrafterTimes, VerifierTimes
from paceline.speculation.room import Room
from paceline.speculation.round_model import RoundModel
from paceline.speculation.slowness import Slowness

_LARGEST_SHARE = 1.0 / 16.0
"""Of what is known of the acceptance, what one verdict replaces that comes after a long time: a probe."""
_CHAINS_IN_A_ROW = 16
"""So many, and blocks are trees no more."""
_NARROW_S = 2.0
"""Without more room for so long, what room there is now is what there is: nobody is just near its end."""


class Pair:
    """Knowledge and choice of the sessions of one verifier and one drafter.

    Args:
        verifier: times of the verifier, shared with other pairs.
        drafter: times of the drafter, shared with other pairs; None where the verifier drafts by itself.

    Attributes:
        verifier, drafter: the same.
        probes: of sessions that decode plainly.
        proposed_share: how often a draft that was asked for proposed anything.
        tree_depth: of blocks that are trees; 0 for chains.
        kind: a number that changes when chains become trees or the other way round: sizes are counted anew.
    """

    def __init__(self, verifier: VerifierTimes | None = None, drafter: DrafterTimes | None = None) -> None:
        self.verifier = VerifierTimes() if verifier is None else verifier
        self.drafter = drafter
        self.probes = ProbeSchedule()
        self.proposed_share = Level(64)
        self.tree_depth = 0
        self.kind = 0
        self._tree_nodes = 0
        self._chains = ChainAcceptance()
        self._tree = TreeGain()
        self._chains_in_a_row = 0
        self._round_s = Level(16)
        self._now = 0.0
        self._judged_at = 0.0
        self._chooser = Chooser()
        self._slowness = Slowness()
        self._expected: tuple[Choice, float] | None = None
        self._widest = 0
        self._wide_at = 0.0
        self._may_ahead = False

    @property
    def moment(self) -> Moment:
        """Now, as the newest verdict says."""
        return Moment(self._now, self._round_s.get(0.0))

    def join(self, session: object, drafts: bool) -> None:
        """A session uses the verifier from now on, and may ask the drafter if it `drafts`."""
        self.verifier.users.add(session)
        if self.drafter is not None and drafts:
            self.drafter.users.add(session)

    def leave(self, session: object) -> None:
        """It does not any more."""
        self.verifier.users.discard(session)
        if self.drafter is not None:
            self.drafter.users.discard(session)

    # --- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, room: Room) -> Choice:
        """What sessions are to do.

        Args:
            room: of the session that asks; near its end there is little, and that tells nothing.
        """
        limit = self.limit(room)
        if limit >= self._widest or self._now > self._wide_at + _NARROW_S:
            self._widest, self._wide_at = limit, self._now
        self._may_ahead = self._may_ahead or room.may_draft_ahead
        if self._chooser.choice is not None and self.is_narrow(room):
            return self._chooser.choice
        model = self.model(room, self.gains(limit), self.proposed_share.get(1.0))
        choice, compared = self._chooser.look(model, limit, self._may_ahead, self.moment)
        if compared:
            done = Choice(min(choice.size, limit), choice.ahead)
            factor = self._slowness.factors[done.ahead] if done.size else 1.0
            self._expected = done, expect(model, done).seconds / factor
        return choice

    def limit(self, room: Room) -> int:
        """Largest size: of trees no larger than those that are proposed."""
        return min(room.max_draft_tokens, self._tree_nodes) if self.tree_depth else room.size

    def is_narrow(self, room: Room) -> bool:
        """There is less room than there was lately: the session is near its end."""
        return self.limit(room) < self._widest

    def gains(self, limit: int, own: ChainAcceptance | TreeGain | None = None) -> tuple[float, ...]:
        """What each draft of a block adds to the accepted ones, and what one more would.

        Args:
            limit: drafts of the largest block.
            own: what a session has seen itself.
        """
        if self.tree_depth:
            gains = self._tree.gains(limit)
            return (*(own.gains(limit, gains) if isinstance(own, TreeGain) else gains), 0.0)
        if isinstance(own, ChainAcceptance):
            return own.survival(limit + 1, self._chains.conditional(limit + 1))
        return self._chains.survival(limit + 1)

    def unlike(self, own: ChainAcceptance | TreeGain) -> float:
        """How far what a session has seen is from what all have, squared, in standard deviations of chance."""
        if isinstance(own, TreeGain):
            return own.unlike(self._tree.gains(self._tree_nodes))
        return own.unlike(self._chains.conditional(self._widest))

    def model(self, room: Room, gains: tuple[float, ...], proposed_share: float) -> RoundModel:
        """What rounds are expected to bring with such gains."""
        tree_depth = min(self.tree_depth, room.max_depth)
        return RoundModel(self.verifier, self.drafter, gains, tree_depth, proposed_share, self._slowness.factors)

    # --- learning -----------------------------------------------------------------------------------------------------

    def round_ended(self, at: float, period_s: float | None) -> None:
        """A session's round has ended."""
        self._now = max(self._now, at)
        if period_s is not None:
            self._round_s.observe(period_s)

    def block_ended(self, size: int, ahead: bool, period_s: float) -> None:
        """A round with a block has ended, as large as all are to be."""
        if self._expected is not None and self._expected[0] == Choice(size, ahead):
            self._slowness.observe(ahead, self._expected[1], period_s, self.verifier.sessions)

    def takes_probe(self) -> bool:
        """A session at size 0 has a round before it; whether it is to probe."""
        if self._chooser.choice is not None and not self._chooser.choice.size:
            # Otherwise blocks are in use, and this session is just unlike the others.
            self._slowness.unused(self.verifier.sessions)
        return self.probes.take()

    def chain_judged(self, depth: int, accepted: int) -> None:
        """A session's chain was judged."""
        self._chains.observe(depth, accepted, self._share())
        self._chains_in_a_row += 1
        if self.tree_depth and self._chains_in_a_row >= _CHAINS_IN_A_ROW:
            self._become(0)

    def tree_judged(self, depth: int, num_nodes: int, accepted_path: tuple[int, ...]) -> None:
        """A session's block was judged that was, or was made from, a tree."""
        self._chains_in_a_row = 0
        if not self.tree_depth:
            self._tree_nodes = 0
            self._become(depth)
        self.tree_depth = max(self.tree_depth, depth)
        self._tree_nodes = max(self._tree_nodes, num_nodes)
        self._tree.observe(num_nodes, accepted_path, self._share())

    def _become(self, tree_depth: int) -> None:
        self.tree_depth = tree_depth
        self.kind += 1
        self._chooser = Chooser()
        self._widest = 0

    def _share(self) -> float:
        """Of what is known, what a verdict of now replaces."""
        passed_s, self._judged_at = self._now - self._judged_at, self._now
        round_s = self._round_s.get(0.0)
        share = passed_s / round_s * NEWEST_SHARE if round_s > 0.0 else NEWEST_SHARE
        return min(share, _LARGEST_SHARE)
