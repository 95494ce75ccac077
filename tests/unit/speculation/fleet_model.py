"""A verifier, a drafter and sessions that share them, in simulated time: what a governor is judged against.

A pass starts when the verifier is free and a session has a block for it; it waits a moment for others if more sessions
per second are served that way, as verifiers do, and takes all that are there. It takes
`fixed_s + per_token_s * batch_tokens`; drafts take their time without waiting for each other. Acceptance is drawn place
by place from a seeded source, so a run can be repeated.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from paceline.speculation.governor import Decision, Governor, RoundOutcome
from paceline.speculation.pair import Pair
from paceline.speculation.replica_times import DrafterTimes, DraftTimes, PassTimes, VerifierTimes
from paceline.speculation.room import Room

_GATHER_S = 0.020
_ARRIVES_EVERY_S = 0.007


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of time in which nothing changes.

    Attributes:
        seconds: how long.
        sessions: how many decode.
        acceptance: of each draft, given those before it.
        fixed_s, per_token_s: time of a pass.
        draft_fixed_s, draft_token_s: time of a draft.
        wire_s: there and back, for each of both.
    """

    seconds: float
    sessions: int = 1
    acceptance: float = 0.8
    fixed_s: float = 0.030
    per_token_s: float = 0.00005
    draft_fixed_s: float = 0.0
    draft_token_s: float = 0.003
    wire_s: float = 0.0004

    def draft_s(self, depth: int) -> float:
        """From asking for a draft to its answer."""
        return self.draft_fixed_s + depth * self.draft_token_s + self.wire_s if depth else 0.0


@dataclass(slots=True)
class _Session:
    governor: Governor
    chance: random.Random
    decision: Decision
    depth: int = 0
    sent_at: float = 0.0
    ready_at: float = 0.0
    verdict_at: float = 0.0
    wait_s: float = 0.0
    asked: bool = False
    drafter_busy_until: float = 0.0
    owed: tuple[int, float] | None = None
    usual_draft_s: float = 0.0
    usual_round_s: float = 0.0


@dataclass(slots=True)
class PhaseResult:
    """What came of a phase.

    Attributes:
        goodput: tokens per second of all sessions together.
        changes_per_minute: the most of any session.
        sizes: how often each size was sent.
    """

    goodput: float = 0.0
    changes_per_minute: float = 0.0
    sizes: dict[int, int] = field(default_factory=dict)


class FleetModel:
    """Runs phases one after another with the same governors.

    Args:
        max_depth: deepest block.
        pinned: size of every block; None lets the governors choose.
        ahead: drafting ahead is possible.
        seed: of all chance.
    """

    def __init__(self, max_depth: int = 8, pinned: int | None = None, ahead: bool = True, seed: int = 0) -> None:
        self._room = Room(max_depth, max_depth, may_draft_ahead=ahead)
        self._pinned = pinned
        self._seed = seed
        self._drafter = DrafterTimes()
        self._pair = Pair(VerifierTimes(_GATHER_S), self._drafter)
        self._sessions: list[_Session] = []
        self._now = 0.0

    def run(self, phases: Sequence[Phase]) -> list[PhaseResult]:
        """What came of each phase."""
        return [self._phase(phase) for phase in phases]

    def _phase(self, phase: Phase) -> PhaseResult:
        while len(self._sessions) < phase.sessions:
            number = len(self._sessions)
            governor = Governor(self._pair, self._pinned)
            session = _Session(governor, random.Random(f"{self._seed} {number}"), governor.decide(self._room))
            session.verdict_at = self._now + number * _ARRIVES_EVERY_S
            self._sessions.append(session)
            self._next_block(session, phase, hit=False)
        sessions = self._sessions[: phase.sessions]
        before = [session.governor.num_changes for session in sessions]
        result, started, tokens = PhaseResult(), self._now, 0.0
        for session in sessions:
            session.sent_at = max(session.sent_at, started)
            session.ready_at = max(session.ready_at, started)
            session.verdict_at = max(session.verdict_at, started)
        waiting = [(session.ready_at, number) for number, session in enumerate(sessions)]
        heapq.heapify(waiting)
        while self._now < started + phase.seconds:
            begin = self._begins_at(waiting, sessions, phase)
            batch: list[int] = []
            while waiting and waiting[0][0] <= begin:
                batch.append(heapq.heappop(waiting)[1])
            batch_tokens = sum(1 + sessions[number].depth for number in batch)
            pass_s = phase.fixed_s + phase.per_token_s * batch_tokens
            self._now = begin + pass_s
            for number in batch:
                session = sessions[number]
                size = session.depth
                result.sizes[size] = result.sizes.get(size, 0) + 1
                tokens += self._verdict(session, phase, begin, pass_s, len(batch), batch_tokens)
                heapq.heappush(waiting, (session.ready_at, number))
        seconds = self._now - started
        result.goodput = tokens / seconds
        most = max(session.governor.num_changes - count for session, count in zip(sessions, before, strict=True))
        result.changes_per_minute = 60 * most / seconds
        return result

    def _begins_at(self, waiting: list[tuple[float, int]], sessions: Sequence[_Session], phase: Phase) -> float:
        """When the next pass begins: so that most sessions per second are served."""
        first = begins_at = max(self._now, waiting[0][0])
        tokens, best = 0, 0.0
        for count, (ready_at, number) in enumerate(sorted(waiting), start=1):
            tokens += 1 + sessions[number].depth
            pass_s, wait_s = phase.fixed_s + phase.per_token_s * tokens, max(ready_at - first, 0.0)
            if wait_s > min(_GATHER_S, pass_s):
                break
            if count / (wait_s + pass_s) >= best or wait_s == 0.0:
                best, begins_at = count / (wait_s + pass_s), first + wait_s
        return begins_at

    def _verdict(
        self, session: _Session, phase: Phase, begin: float, pass_s: float, batch_sessions: int, batch_tokens: int
    ) -> float:
        """Ends a round of a session and prepares the next one.

        Returns:
            The tokens that a round with such a block brings on average, so that luck does not decide.
        """
        accepted = 0
        while accepted < session.depth and session.chance.random() < phase.acceptance:
            accepted += 1
        agrees = accepted == session.depth and session.chance.random() < phase.acceptance
        expected = sum(phase.acceptance**place for place in range(session.depth + 1))
        verdict_at = begin + pass_s + phase.wire_s
        session.governor.observe(
            RoundOutcome(
                decision=session.decision,
                times=PassTimes(
                    verify_s=pass_s,
                    queue_s=begin - session.ready_at,
                    draft_wait_s=session.wait_s,
                    period_s=verdict_at - session.verdict_at,
                    batch_sessions=batch_sessions,
                    batch_tokens=batch_tokens,
                ),
                asked=session.asked,
                num_draft_tokens=session.depth,
                depth=session.depth,
                accepted_path=tuple(range(1, accepted + 1)),
                at=verdict_at,
            )
        )
        session.usual_round_s += 0.3 * (verdict_at - session.ready_at - session.usual_round_s)
        session.verdict_at = verdict_at
        hit = agrees and session.decision.ahead_depth > 0
        session.decision = session.governor.decide(self._room)
        self._next_block(session, phase, hit)
        return expected

    def _next_block(self, session: _Session, phase: Phase, hit: bool) -> None:
        """Drafts; a draft that does not come in time is not waited for, and the round goes without."""
        now, depth = session.verdict_at, session.decision.max_depth
        session.wait_s = 0.0
        session.asked = depth > 0
        late_before = session.drafter_busy_until > now
        if session.owed is not None and not late_before:
            self._drafter.observe(session.owed[0], DraftTimes(session.owed[1], batch_sessions=phase.sessions))
            session.owed = None
        if depth and not late_before:
            draft_s = phase.draft_s(depth)
            patience_s = min(max(0.05, 3 * session.usual_draft_s, 2 * session.usual_round_s), 1.0)
            session.usual_draft_s += 0.3 * (draft_s - session.usual_draft_s)
            session.wait_s = max(session.sent_at + phase.draft_s(depth + 1) - now, 0.0) if hit else draft_s
            if session.wait_s > patience_s:
                session.drafter_busy_until, session.owed = now + session.wait_s, (depth, draft_s)
                session.wait_s = patience_s
                depth = 0
            else:
                self._drafter.observe(depth, DraftTimes(draft_s, batch_sessions=phase.sessions))
        elif late_before:
            depth = 0
        session.depth = depth
        session.sent_at = session.ready_at = now + session.wait_s


def goodputs(phases: Sequence[Phase], pinned: int | None, ahead: bool = True, max_depth: int = 8) -> list[float]:
    """Tokens per second of each phase."""
    return [result.goodput for result in FleetModel(max_depth, pinned, ahead).run(phases)]
