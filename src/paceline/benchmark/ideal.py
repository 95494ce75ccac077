"""What a fleet could reach if its software cost nothing: a discrete-event model of sessions, verifiers and drafters.

The model knows what passes take, how far away replicas are and how often drafts agree; it batches as the services do
and drafts ahead as the gateway does. Events cost no time, so a real fleet of simulated devices reaches less, and the
quotient of the two is what gateway, wire and store cost.

| happens | then |
|---|---|
| a verdict reaches the gateway | what was drafted ahead and agrees is judged next, else a draft is asked for |
| a block goes out | with `ahead` the drafter is asked for the guess of the extra token and the block behind it |
| that draft is there before the verdict | it goes to the verifier too, which goes on with it if the verdict agrees |
| a command reaches a drafter | it supersedes the session's older one; every pass adds a token to each draft |
| with `outcomes` | passes that draft ahead for nobody else draft after other outcomes too, and one may come true |
| a command reaches a verifier | it is in the next pass, which waits a moment for those that usually come back so soon |

Left out: prompts (every session is in the middle of its text), ends, and a gateway's impatience with late drafts.
Deterministic: equal arguments give equal results.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from paceline.engine.gather import GatherWindow
from paceline.engine.simulated.pass_time import PassTime

VERIFY_PASS = PassTime(30.0, 0.05)
DRAFT_PASS = PassTime(3.0, 0.05)


@dataclass(frozen=True, slots=True)
class IdealFleet:
    """What is modelled.

    Attributes:
        num_sessions: generations at once; each has one verifier and one drafter, dealt out evenly.
        num_verifiers: devices that judge.
        num_drafters: devices that draft; not used by plain decoding.
        num_draft_tokens: block size; 0 decodes plainly.
        acceptance: how often a draft token is the target's own, at each position independently.
        rtt_ms: from the gateway to a replica and back, in milliseconds.
        ahead: whether the next block is drafted while one is judged.
        outcomes: drafting ahead, after how many outcomes besides the likeliest one the drafter drafts in passes that it
            makes for no other session. The drafts stay with it until one is asked for.
        outcome_chances: how often what came is among them, by the number of accepted drafts; where all are accepted,
            of the cases in which the guess was wrong. # [num_draft_tokens + 1]
        verify_pass: what a pass of a verifier takes.
        draft_pass: what a pass of a drafter takes.
        max_batch_tokens: most tokens of a verifier's pass.
        gather_window_ms: longest wait of such a pass for sessions that will soon be back.
    """

    num_sessions: int = 1
    num_verifiers: int = 1
    num_drafters: int = 1
    num_draft_tokens: int = 4
    acceptance: float = 0.8
    rtt_ms: float = 0.2
    ahead: bool = True
    outcomes: int = 0
    outcome_chances: tuple[float, ...] = ()
    verify_pass: PassTime = VERIFY_PASS
    draft_pass: PassTime = DRAFT_PASS
    max_batch_tokens: int = 512
    gather_window_ms: float = 20.0


@dataclass(frozen=True, slots=True)
class IdealResult:
    """What it reaches.

    Attributes:
        tokens_per_second: of all sessions together.
        rounds_per_second: the same.
        verifier_busy: part of the time that verifiers compute, on average.
        drafter_busy: the same of drafters.
    """

    tokens_per_second: float
    rounds_per_second: float
    verifier_busy: float
    drafter_busy: float


def ideal(
    fleet: IdealFleet,
    seconds: float = 60.0,
    *,
    warm_up_s: float = 3.0,
    seed: int = 0,
    agreements: Sequence[Iterator[bool]] = (),
) -> IdealResult:
    """Runs the model.

    Args:
        fleet: what is modelled.
        seconds: how long is counted, in the model's time.
        warm_up_s: how long runs before that.
        seed: of chance.
        agreements: of each session, whether the draft of each position is the target's own token: so the model meets
            the same luck as a run that it is compared with. Empty for chance, by `fleet.acceptance`.
    """
    world = _world(fleet, seed, agreements)
    world.run(warm_up_s)
    before = world.counts()
    world.run(warm_up_s + seconds)
    return _between(before, world.counts(), fleet)


def ideal_of_text(
    fleet: IdealFleet, first: int, last: int, *, seed: int = 0, agreements: Sequence[Iterator[bool]] = ()
) -> IdealResult:
    """Runs the model over a stretch of its text: what a run that wrote the same stretch is to be compared with.

    A run that is slower than the model meets other luck in the same time: over ten seconds of one session that alone
    moves the quotient by two hundredths.

    Args:
        fleet: what is modelled.
        first: counts from where all sessions together have written so many tokens.
        last: counts until they have written so many.
        seed: of chance.
        agreements: see `ideal`.

    Raises:
        ValueError: the stretch is empty, or one step of the model.
    """
    if last <= first:
        raise ValueError(f"tokens [{first}, {last}) are no stretch of text")
    world = _world(fleet, seed, agreements)
    world.write(first)
    before = world.counts()
    world.write(last)
    if world.now_s == before.now_s:
        raise ValueError(f"tokens [{first}, {last}) all come at once: take a longer stretch")
    return _between(before, world.counts(), fleet)


def _world(fleet: IdealFleet, seed: int, agreements: Sequence[Iterator[bool]]) -> _World:
    luck = agreements or [
        _draws(random.Random(f"{seed}/{index}"), fleet.acceptance)  # noqa: S311 - a model, no secret
        for index in range(fleet.num_sessions)
    ]
    return _World(fleet, luck, random.Random(seed))  # noqa: S311 - as above


def _between(before: _Counts, after: _Counts, fleet: IdealFleet) -> IdealResult:
    seconds = after.now_s - before.now_s
    return IdealResult(
        (after.tokens - before.tokens) / seconds,
        (after.rounds - before.rounds) / seconds,
        (after.verifying_s - before.verifying_s) / seconds / fleet.num_verifiers,
        (after.drafting_s - before.drafting_s) / seconds / max(fleet.num_drafters, 1),
    )


@dataclass(frozen=True, slots=True)
class _Counts:
    """Tokens, rounds, and seconds that verifiers and drafters have computed, at a moment."""

    now_s: float
    tokens: int
    rounds: int
    verifying_s: float
    drafting_s: float


@dataclass(slots=True, eq=False)
class _Draft:
    """Positions [start, start + depth) are to be drafted; `made` of them are, and `foreseen` after each of `outcomes`.

    One that `resumes` another begins with what that one has foreseen.
    A draft behind a block is judged when it is `at_verifier` and the verdict on the block has `come_true`.
    """

    session: _Session
    start: int
    depth: int
    made: int = 0
    outcomes: int = 0
    foreseen: int = 0
    resumes: _Draft | None = None
    at_verifier: bool = False
    come_true: bool = False


@dataclass(frozen=True, slots=True)
class _Verdict:
    """How many drafts of a block were right, whether the guess behind was, and whether the next block is begun."""

    num_accepted: int
    guess_was_right: bool
    goes_on: bool


@dataclass(slots=True, eq=False)
class _Session:
    """One generation.

    Attributes:
        name: its own.
        verifier: judges its blocks.
        drafter: makes them.
        agrees: whether the drafts of its next positions are the target's own tokens.
        committed: positions that are decided.
        ahead: continues the block that is being judged; None if nothing does.
        ahead_is_there: it has reached the gateway.
        wanted: nothing is judged before this one is there.
        guess_was_right: the first token of `wanted` is the one that the newest verdict has brought beyond its block.
        fed: positions that the drafter has rows of.
        foreseen: what was drafted ahead beside what has come true; None if the outcome was not among that.
    """

    name: str
    verifier: _Verifier
    drafter: _Drafter
    agrees: Iterator[bool]
    committed: int = 1
    ahead: _Draft | None = None
    ahead_is_there: bool = False
    wanted: _Draft | None = None
    guess_was_right: bool = False
    fed: int = 0
    foreseen: _Draft | None = None


class _World:
    """All of it in the order of time; its methods but `at`, `run`, `write` and `counts` are the gateway's."""

    def __init__(self, fleet: IdealFleet, luck: Sequence[Iterator[bool]], source: random.Random) -> None:
        self.fleet = fleet
        self._source = source
        self.now_s = 0.0
        self.way_s = fleet.rtt_ms / 2e3
        self._tokens = self._rounds = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._verifiers = [_Verifier(self) for _ in range(fleet.num_verifiers)]
        self._drafters = [_Drafter(self) for _ in range(max(fleet.num_drafters, 1))]
        for index, agrees in enumerate(luck):
            verifier = self._verifiers[index % len(self._verifiers)]
            drafter = self._drafters[index % len(self._drafters)]
            self._next_round(_Session(str(index), verifier, drafter, agrees))

    def at(self, delay_s: float, event: Callable[[], None]) -> None:
        """Something happens so much later."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), event))

    def run(self, until_s: float) -> None:
        """Lets time go on."""
        while self._events and self._events[0][0] <= until_s:
            self._happen()
        self.now_s = until_s

    def write(self, num_tokens: int) -> None:
        """Lets time go on until sessions have written so many tokens."""
        while self._tokens < num_tokens:
            self._happen()

    def _happen(self) -> None:
        self.now_s, _, event = heapq.heappop(self._events)
        event()

    def counts(self) -> _Counts:
        """What has happened so far."""
        verifying_s = sum(device.busy_s for device in self._verifiers)
        drafting_s = sum(device.busy_s for device in self._drafters)
        return _Counts(self.now_s, self._tokens, self._rounds, verifying_s, drafting_s)

    def _next_round(self, session: _Session) -> None:
        """There is nothing to judge: asks for a draft, or decodes plainly."""
        if self.fleet.num_draft_tokens:
            session.wanted = self._draft(session, session.committed, self.fleet.num_draft_tokens)
        else:
            self._verify(session)

    def _draft(self, session: _Session, start: int, depth: int) -> _Draft:
        draft = _Draft(session, start, depth)
        self.at(self.way_s, lambda: session.drafter.take(draft))
        return draft

    def _verify(self, session: _Session) -> None:
        self.at(self.way_s, lambda: session.verifier.take(session))
        self._begun(session)

    def _begun(self, session: _Session) -> None:
        num_drafts = self.fleet.num_draft_tokens
        session.wanted = None
        if self.fleet.ahead and num_drafts:
            session.ahead = self._draft(session, session.committed + num_drafts, num_drafts + 1)
            session.ahead.outcomes = self.fleet.outcomes
            session.foreseen = None
            session.ahead_is_there = False

    def drafted(self, draft: _Draft) -> None:
        """A draft reaches the gateway."""
        session = draft.session
        if draft is session.ahead:
            session.ahead_is_there = True
            self.at(self.way_s, partial(self._follow_up, draft))
        elif draft is session.wanted:
            if draft.start == session.committed or session.guess_was_right:
                self._verify(session)
            else:
                self._next_round(session)

    def _follow_up(self, draft: _Draft) -> None:
        """What continues a block reaches the verifier of it."""
        draft.at_verifier = True
        if draft.come_true:
            draft.session.verifier.take(draft.session)

    def verdict(self, session: _Session) -> _Verdict:
        """What a verifier says of a session's block; it goes on with the next one if it has that and may."""
        num_drafts = self.fleet.num_draft_tokens
        num_accepted = 0
        while num_accepted < num_drafts and next(session.agrees):
            num_accepted += 1
        guess_was_right = num_drafts > 0 and num_accepted == num_drafts and next(session.agrees)
        if guess_was_right and session.ahead is not None:
            session.ahead.come_true = True
            return _Verdict(num_accepted, True, session.ahead.at_verifier)
        return _Verdict(num_accepted, guess_was_right, False)

    def judged(self, session: _Session, verdict: _Verdict) -> None:
        """A verdict reaches the gateway."""
        num_drafts, num_accepted = self.fleet.num_draft_tokens, verdict.num_accepted
        self._tokens += num_accepted + 1
        self._rounds += 1
        session.committed += num_accepted + 1
        ahead, session.ahead = session.ahead, None
        if self.fleet.outcomes and self._source.random() < self.fleet.outcome_chances[num_accepted]:
            session.foreseen = ahead
        if num_accepted < num_drafts:
            self._next_round(session)
            return
        session.guess_was_right = verdict.guess_was_right
        if ahead is None:
            self._next_round(session)
        elif not session.ahead_is_there:
            session.wanted = ahead
        elif session.guess_was_right:
            self._begun(session)  # it has gone to the verifier when it came
        else:
            self._next_round(session)


def _draws(source: random.Random, acceptance: float) -> Iterator[bool]:
    while True:
        yield source.random() < acceptance


class _Drafter:
    """Makes drafts: each pass adds a token to every one that is due."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._due: dict[_Session, _Draft] = {}
        self._computes = False
        self.busy_s = 0.0

    def take(self, draft: _Draft) -> None:
        draft.resumes, draft.session.foreseen = draft.session.foreseen, None
        self._due[draft.session] = draft
        self._begin()

    def _resume(self) -> None:
        for draft in list(self._due.values()):
            foreseen, draft.resumes = draft.resumes, None
            if foreseen is None:
                continue
            draft.made = min(foreseen.foreseen, draft.depth)
            draft.session.fed = draft.start + max(draft.made - 1, 0)
            if draft.made == draft.depth:
                self._answer(draft)

    def _answer(self, draft: _Draft) -> None:
        del self._due[draft.session]
        self._world.at(self._world.way_s, partial(self._world.drafted, draft))

    def _begin(self) -> None:
        if self._computes:
            return
        self._resume()
        if not self._due:
            return
        batch = list(self._due.values())
        num_tokens = 0
        for draft in batch:
            context_len = draft.start + draft.made
            num_tokens += context_len - min(draft.session.fed, context_len - 1)
            # What may follow the block is known after the first pass.
            if draft.made and len(batch) == 1:
                num_tokens += draft.outcomes
            draft.session.fed = context_len
        took_s = self._world.fleet.draft_pass.seconds(num_tokens)
        self._computes = True
        self.busy_s += took_s
        self._world.at(took_s, lambda: self._end(batch))

    def _end(self, batch: list[_Draft]) -> None:
        self._computes = False
        for draft in batch:
            draft.foreseen += 1 if draft.made and len(batch) == 1 else 0
            draft.made += 1
            if draft.made == draft.depth and self._due.get(draft.session) is draft:
                self._answer(draft)
        self._begin()


class _Verifier:
    """Judges blocks: a pass takes all that wait, after a moment for others if that is worth it."""

    def __init__(self, world: _World) -> None:
        self._world = world
        self._waiting: list[_Session] = []
        self._computes = False
        self._gather = GatherWindow(world.fleet.gather_window_ms / 1e3, lambda: world.now_s)
        self.busy_s = 0.0

    def take(self, session: _Session) -> None:
        self._gather.returned(session.name, self._world.now_s)
        self._waiting.append(session)
        self._begin()

    def _begin(self) -> None:
        if self._computes or not self._waiting:
            return
        block_tokens = self._world.fleet.num_draft_tokens + 1
        most = max(self._world.fleet.max_batch_tokens // block_tokens, 1)
        # Half a nanosecond, so that rounding makes no wait of nothing.
        if (delay_s := self._gather.delay_s(len(self._waiting))) > 5e-10:
            self._world.at(delay_s, self._begin)
            return
        batch, self._waiting = self._waiting[:most], self._waiting[most:]
        took_s = self._world.fleet.verify_pass.seconds(block_tokens * len(batch))
        self._computes = True
        self.busy_s += took_s
        self._world.at(took_s, lambda: self._end(batch, took_s))

    def _end(self, batch: list[_Session], took_s: float) -> None:
        self._computes = False
        self._gather.pass_took(took_s, len(batch), len(batch) * (self._world.fleet.num_draft_tokens + 1))
        for session in batch:
            verdict = self._world.verdict(session)
            if verdict.goes_on:
                self._waiting.append(session)
            else:
                self._gather.answered(session.name)
            self._world.at(self._world.way_s, partial(self._world.judged, session, verdict))
        self._begin()
