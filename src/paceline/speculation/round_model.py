"""How long a round takes and how many tokens it brings, for every way to speculate. Pure Python.

    plain       pass
    in turn     pass over the block + the draft's round trip
    ahead       the longer of both, and a draft's round trip more when the draft was made on a wrong assumption
    verifier    pass over the block + the time in which the verifier drafts the next one

A pass over a block is that of the whole batch, on the assumption that every session of the batch takes blocks of the
same size, and a draft is one of as many as all of them ask for. So a session charges itself with what its drafts cost
the others, and where passes are bound by arithmetic or drafters are full all of them stop in time. How sessions that
draft share passes is said in `replica_times.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.speculation.replica_times import DrafterTimes, VerifierTimes

_LOAD_ROUNDS = 4


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a round brings on average.

    Attributes:
        tokens: tokens that become final.
        seconds: its time.
    """

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class RoundModel:
    """Expected rounds of one session at one moment.

    Args:
        verifier: times of its verifier.
        drafter: times of its drafter; None where the verifier drafts by itself.
        gains: what each further draft of a block adds to the accepted ones, one more than blocks are large: for a
            chain, the last of them is the chance that a draft made ahead was made on the right assumption.
        tree_depth: of a block that is a tree, drafted as a whole however little of it is sent; 0 for chains.
        proposed_share: how often a draft that was asked for proposed anything.
        slower: rounds with blocks have taken so many times as long as this model says, drafted in turn and ahead.
    """

    def __init__(
        self,
        verifier: VerifierTimes,
        drafter: DrafterTimes | None,
        gains: Sequence[float],
        tree_depth: int = 0,
        proposed_share: float = 1.0,
        slower: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._gains = gains
        self._tree_depth = tree_depth
        self._proposed_share = proposed_share
        self._slower = slower

    @property
    def known(self) -> bool:
        """Whether it is known how long passes and drafts take."""
        drafting = self._verifier.self_draft if self._drafter is None else self._drafter.step_time
        return self._verifier.pass_time.known and drafting.known

    def plain(self) -> Expectation:
        """A round without a block."""
        return Expectation(1.0, self._verifier.round_s(0))

    def block(self, size: int, ahead: bool) -> Expectation:
        """A round with a block of so many drafts, at least one, drafted in turn or ahead."""
        tokens = 1.0 + self._proposed_share * sum(self._gains[:size])
        depth = self._tree_depth or size
        if self._drafter is None:
            seconds = self._verifier.round_s(self._sent(size)) + self._verifier.self_draft.at(depth)
        else:
            seconds = self._drafted_s(self._drafter, size, depth, ahead)
        return Expectation(tokens, self._slower[ahead] * seconds)

    def _drafted_s(self, drafter: DrafterTimes, size: int, depth: int, ahead: bool) -> float:
        """Seconds of a round if all sessions of the drafter do the same: they fall into step where that is possible.

        How many drafts of other verifiers' sessions share a step depends on how long drafts take, and the other way
        round; so does the number of all where they are not in step.
        """
        own = min(self._verifier.sessions, drafter.sessions)
        others, drafting, seconds = drafter.sessions - own, 0.0, 0.0
        for _ in range(_LOAD_ROUNDS if drafter.sessions > 1.0 else 1):
            strangers = others * drafting
            apart_s, busy_s = self._apart_s(drafter, size, depth, ahead, 1.0 + (own - 1.0) * drafting + strangers)
            seconds = min(
                apart_s,
                self._together_s(drafter, size, depth, ahead, own, strangers),
                self._halves_s(drafter, size, depth, ahead, own / 2, strangers),
            )
            drafting = min(busy_s / seconds, 1.0) if seconds > 0.0 else 0.0
        return seconds

    def _apart_s(self, drafter: DrafterTimes, size: int, depth: int, ahead: bool, batch: float) -> tuple[float, float]:
        """Seconds of a round, and those of it in which it drafts, where nobody is in step with anybody."""
        draft_s = drafter.draft_s(depth, batch, in_step=False)
        if not ahead:
            return self._verifier.passing_s(self._sent(size), ((1.0, draft_s),)), draft_s
        agrees = self._agrees(size, ahead)
        ahead_s = drafter.draft_s(depth + 1, batch, in_step=False)
        pass_s = self._verifier.round_s(self._sent(size))
        late_s = max(ahead_s - pass_s, 0.0)
        # What turns out wrong is dropped as soon as the next draft is asked for.
        busy_s = agrees * ahead_s + (1.0 - agrees) * (min(ahead_s, pass_s) + draft_s)
        waits = [(1.0 - agrees, draft_s)]
        # What is there in time is a follow-up, and misses no pass unless that waits for drafts of others anyway. Their
        # steps have to be too long for it by themselves: where it is the rest that is long the gateway may be full, and
        # what more rounds a second cost that is not known here.
        if late_s > 0.0 or depth * drafter.step_time.at(batch) <= self._verifier.gather_window_s:
            waits.append((agrees, late_s))
        return self._verifier.passing_s(self._sent(size), waits), busy_s

    def _together_s(
        self, drafter: DrafterTimes, size: int, depth: int, ahead: bool, own: float, strangers: float
    ) -> float:
        """Seconds of a round where all wait for all. All draft at once; those that were right, the next block."""
        agrees = self._agrees(size, ahead)
        batch = own + strangers
        # Those of other verifiers are not in step: none, half or all of a step of theirs goes before.
        half_step_s = 0.5 * min(strangers, 1.0) * drafter.step_time.at(batch)
        draft_s = drafter.draft_s(depth, batch, in_step=True) + half_step_s
        late_s = 0.0
        if ahead:
            pass_s = self._verifier.pass_time.at(self._verifier.sessions * (1.0 + self._sent(size)))
            late_s = max(drafter.draft_s(depth + 1, batch, in_step=True) - pass_s, 0.0)
        all_agree = agrees**own
        usual_s = all_agree * late_s + (1.0 - all_agree) * max(draft_s, late_s)
        return self._verifier.together_s(self._sent(size), max(draft_s + half_step_s, late_s), usual_s)

    def _halves_s(
        self, drafter: DrafterTimes, size: int, depth: int, ahead: bool, half: float, strangers: float
    ) -> float:
        """Seconds of a round where one half drafts while the other is in a pass; if ahead, both draft all the time."""
        batch = (2.0 * half if ahead else half) + strangers
        draft_s = drafter.draft_s(depth, batch, in_step=True)
        return self._verifier.halves_s(self._sent(size), draft_s, 0.5 * drafter.step_time.at(batch))

    def _agrees(self, size: int, ahead: bool) -> float:
        """How often a draft that was made ahead was made on the right assumption."""
        return self._proposed_share * self._gains[size] if ahead else 0.0

    def _sent(self, size: int) -> float:
        """Drafts of the average block: none was proposed for some."""
        return self._proposed_share * size
