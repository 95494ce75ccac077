"""Between the rounds of one session and the governor of its speculation. Pure: times are handed in.

The governor decides for one round after another; here is what it is told and when. A round's decision is made when it
is first asked for, and holds until the verdict. A verifier that drafts by itself is told a round ahead how deep
to draft, so there the next decision is made when a block is sent.

What has happened is learnt when there is time, while replicas work: they wait for the next block, and nobody waits for
what it teaches. Only where the size is to be chosen it is learnt before that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from paceline.messages import Timing
from paceline.speculation.governor import Decision, Governor, Reason, RoundOutcome
from paceline.speculation.pair import Pair
from paceline.speculation.replica_times import DrafterTimes, DraftTimes, PassTimes, VerifierTimes
from paceline.speculation.room import Room
from paceline_gateway.drafts import Answer
from paceline_gateway.plan import GenerationPlan
from paceline_gateway.verdict import Verdict

_MAX_REPLICAS = 256
"""Of each kind; what was not asked for longest goes first."""
_MAX_PAIRS = 4096
"""A pair of dropped replicas is made anew when it is asked for."""
_US_PER_S = 1e6
_Key = TypeVar("_Key")
_Shared = TypeVar("_Shared")
_UNDECIDED = Decision(0, 0, 0, Reason.NO_ROOM)


class FleetTimes:
    """What rounds and drafts cost on each replica, as all sessions of this gateway have seen it."""

    def __init__(self) -> None:
        self._verifiers: OrderedDict[str, VerifierTimes] = OrderedDict()
        self._drafters: OrderedDict[str, DrafterTimes] = OrderedDict()
        self._pairs: OrderedDict[tuple[str, str, str], Pair] = OrderedDict()

    def pair(self, verifier: str, drafter: str, method: str, gather_window_s: float = 0.0) -> Pair:
        """That of sessions that use both, and no other method than that one if one is named.

        Args:
            verifier: address.
            drafter: address; empty where the verifier drafts by itself, or nobody does.
            method: as the request fixes it, or empty.
            gather_window_s: as the verifier says; it may have been started anew with another one.
        """
        verifier_times = _kept(self._verifiers, verifier, VerifierTimes, _MAX_REPLICAS)
        drafter_times = _kept(self._drafters, drafter, DrafterTimes, _MAX_REPLICAS) if drafter else None
        key = verifier, drafter, method
        pair = _kept(self._pairs, key, lambda: Pair(verifier_times, drafter_times), _MAX_PAIRS)
        if pair.verifier is not verifier_times or pair.drafter is not drafter_times:
            pair = self._pairs[key] = Pair(verifier_times, drafter_times)
        pair.verifier.gather_window_s = gather_window_s
        return pair


def _kept(shared: OrderedDict[_Key, _Shared], key: _Key, make: Callable[[], _Shared], most: int) -> _Shared:
    if key not in shared:
        shared[key] = make()
    shared.move_to_end(key)
    if len(shared) > most:
        shared.popitem(last=False)
    return shared[key]


class SessionGovernor:
    """Asks the governor, and tells it what came of each round.

    Args:
        plan: of the generation; the size is the governor's choice only if it says so.
        times: shared with the other sessions.
    """

    def __init__(self, plan: GenerationPlan, times: FleetTimes) -> None:
        self._pinned = None if plan.governed else plan.num_draft_tokens
        self._times = times
        self._method = plan.method
        self._pair = Pair()
        self._governor: Governor | None = None
        self._decision: Decision | None = None
        self._next: Decision | None = None
        self._branched = False
        self._wait_s = 0.0
        self._verdict_at: float | None = None
        self._changes_told = 0
        self._follow_up: tuple[Decision | None, bool] = None, False
        self._lessons: list[Callable[[], None]] = []

    def served_by(self, verifier: str, drafter: str, gather_window_s: float) -> None:
        """The session has these replicas from now on.

        Args:
            verifier: its address; empty for none.
            drafter: the same; empty too where the verifier drafts by itself.
            gather_window_s: longest wait of the verifier's passes for sessions that will soon be back.
        """
        self.learn()
        self._pair = self._times.pair(verifier, drafter, self._method, gather_window_s)
        self._next = None
        self._verdict_at = None
        if self._governor is not None:
            self._governor.served_by(self._pair)

    def decide(self, room: Room) -> Decision:
        """What to do in this round."""
        if self._decision is None:
            self._decision = self._next or self._ask(room)
            self._next = None
        return self._decision

    def decide_next(self, room: Room) -> Decision:
        """What to do in the round after this one, whose block is being sent."""
        if self._decision is None:
            self._decision, self._next = self._next or _UNDECIDED, None
        if self._next is None:
            self._next = self._ask(room)
        return self._next

    def _ask(self, room: Room) -> Decision:
        if self._pinned is None:
            self.learn()
        if self._governor is None:
            self._governor = Governor(self._pair, self._pinned)
        return self._governor.decide(room)

    # --- what happens -------------------------------------------------------------------------------------------------

    def sends(self, branched: bool) -> None:
        """A block is sent that is a part of a tree or of a chain."""
        self._branched = branched

    def sends_follow_up(self, branched: bool) -> None:
        """The next round's block is sent before the verdict, as `decide_next` has decided."""
        self._follow_up = self._next, branched

    def waited(self, seconds: float) -> None:
        """The verifier had nothing to do for the session because a draft was not there."""
        self._wait_s += seconds

    def interrupted(self) -> None:
        """What goes on now has nothing to do with speculation: the time until the next verdict tells nothing."""
        self._verdict_at = None

    def drafted(self, answer: Answer) -> None:
        """The drafter has answered."""
        self._lessons.append(partial(self._learn_draft, answer))

    def _learn_draft(self, answer: Answer) -> None:
        drafter = self._pair.drafter
        if drafter is not None and answer.took_s is not None and (answer.depth or answer.found_nothing):
            drafter.observe(answer.depth, _draft_times(answer.took_s, answer.timing))

    def ended(self) -> None:
        """The generation has ended."""
        self.learn()
        if self._governor is not None:
            self._governor.end()

    def judged(self, verdict: Verdict, asked: bool, now: float) -> Decision:
        """The round has ended.

        Args:
            verdict: its verdict.
            asked: there was somebody to draft its block.
            now: the time.

        Returns:
            What had been decided for it.
        """
        decision, self._decision = self._decision or _UNDECIDED, None
        begun_at, self._verdict_at = self._verdict_at, now
        wait_s, self._wait_s = self._wait_s, 0.0
        branched = self._branched
        if verdict.followed:
            (self._decision, self._branched), self._next = self._follow_up, None
        if verdict.reading:
            return decision  # a prompt, or everything anew: such a pass tells nothing of the next one

        def learn_round() -> None:
            block = verdict.block
            times = _pass_times(verdict, wait_s, None if begun_at is None else now - begun_at)
            if self._governor is None:
                self._pair.verifier.observe(times, block.num_draft_tokens)
                return
            self._governor.observe(
                RoundOutcome(
                    decision=decision,
                    times=times,
                    asked=asked and decision.max_depth > 0,
                    num_draft_tokens=block.num_draft_tokens,
                    depth=block.max_depth,
                    accepted_path=verdict.event.accepted_path,
                    branched=branched,
                    at=now,
                )
            )

        self._lessons.append(learn_round)
        return decision

    def learn(self) -> None:
        """Takes in what has happened since this was called last."""
        lessons, self._lessons = self._lessons, []
        for lesson in lessons:
            lesson()

    def take_changes(self) -> int:
        """How often the size was changed since this was asked last."""
        changes = 0 if self._governor is None else self._governor.num_changes
        told, self._changes_told = self._changes_told, changes
        return changes - told


def _draft_times(took_s: float, timing: Timing) -> DraftTimes:
    total_s = min(max(timing.total_us, 0) / _US_PER_S, took_s)
    queue_s = min(max(timing.queue_us, 0) / _US_PER_S, total_s)
    return DraftTimes(took_s, queue_s, took_s - total_s, timing.batch_sessions)


def _pass_times(verdict: Verdict, wait_s: float, period_s: float | None) -> PassTimes:
    timing = verdict.event.timing
    engine_us = max(timing.total_us - timing.queue_us, 0)
    draft_us = min(max(timing.draft_us, 0), engine_us)
    return PassTimes(
        verify_s=(engine_us - draft_us) / _US_PER_S,
        queue_s=max(timing.queue_us, 0) / _US_PER_S,
        draft_wait_s=wait_s,
        self_draft_s=draft_us / _US_PER_S,
        self_draft_depth=verdict.next_depth,
        period_s=period_s,
        batch_sessions=timing.batch_sessions,
        batch_tokens=timing.batch_tokens,
    )
