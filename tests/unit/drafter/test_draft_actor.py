"""What a drafter answers where several steps run without the event loop, and where drafts were prepared."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import pytest
from paceline_drafter.draft_actor import DraftActor
from paceline_drafter.draft_limits import DraftLimits

from paceline.drafting.method import DraftJob, MethodInfo
from paceline.messages import Draft, Drafted, DrafterEvent, Open, SamplingParams
from paceline.runtime.replica_actor import ActorLimits
from paceline.token_log import TokenLog

GREEDY = SamplingParams(temperature=0.0)
PROMPT = (1, 2, 3)
STEP_S = 0.005


@dataclass
class Fives:
    """A method of two parts that drafts fives, one token a step of a stated time."""

    step_s: float = 0.0
    info: MethodInfo = field(default_factory=lambda: MethodInfo("a,b", parts=("a", "b")))

    def open(self, session: str) -> None:
        """Keeps nothing."""

    def close(self, session: str) -> None:
        """Keeps nothing."""

    def kv_len(self, session: str) -> int:
        """Keeps nothing."""
        return 0

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """One more token for each."""
        until = time.perf_counter() + self.step_s
        while time.perf_counter() < until:
            pass
        for job in jobs:
            job.method = job.only or "a"
            job.tokens.append(5)
            job.confidences.append(1.0)
            job.candidates.append((5, 6, 7))
            job.done = len(job.tokens) >= job.max_depth


@dataclass
class Whole(Fives):
    """Who takes the steps of a draft at once where it is asked to."""

    at_once: int = 0

    def draft_at_once(self, job: DraftJob) -> bool:
        """All tokens."""
        self.at_once += 1
        while not job.done:
            self.advance([job])
        return True


class Answers:
    """A stream that keeps what is sent."""

    name = "test"

    def __init__(self) -> None:
        self._events: asyncio.Queue[DrafterEvent] = asyncio.Queue()

    def finish(self) -> None:
        """Nothing is to be done."""

    def send(self, event: DrafterEvent) -> None:
        """Keeps it."""
        self._events.put_nowait(event)

    async def drafted(self) -> Drafted:
        """The next draft."""
        async with asyncio.timeout(5.0):
            while not isinstance(event := await self._events.get(), Drafted):
                pass
        return event


@dataclass
class Asking(Fives):
    """Whose steps take a second each of a clock of its own, and ask something at their ends, in the model's thread."""

    now_s: float = 100.0
    ask: Callable[[], float] = field(default=lambda: 0.0)
    answers: list[float] = field(default_factory=list)

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """One more token for each."""
        super().advance(jobs)
        self.now_s += 1.0
        self.answers.append(self.ask())


@contextlib.asynccontextmanager
async def running(
    method: Fives, num_outcomes: int = 0, clock: Callable[[], float] = time.monotonic
) -> AsyncIterator[DraftActor]:
    """An actor around the method."""
    limits = DraftLimits(max_draft_tokens=16, max_model_len=None, vocab_size=None)
    actor = DraftActor(method, limits, ActorLimits(), clock, num_outcomes=num_outcomes)
    task = asyncio.create_task(actor.run())
    try:
        yield actor
    finally:
        await actor.stop()
        await task


def opened(session: str, epoch: int, tokens: tuple[int, ...], method: str = "") -> Open:
    return Open(session, epoch, tokens, len(PROMPT), GREEDY, method=method)


def draft(
    session: str, epoch: int, draft_id: int, tokens: tuple[int, ...], depth: int, assumed: tuple[int, ...] = ()
) -> Draft:
    prefix_hash = TokenLog(tokens).hash_at(len(tokens))
    return Draft(session, epoch, draft_id, len(tokens), prefix_hash, depth, assumed=assumed)


async def test_a_draft_of_several_steps_tells_the_time_of_all_of_them() -> None:
    stream = Answers()
    async with running(Fives(STEP_S)) as actor:
        actor.submit(stream, opened("s", 1, PROMPT), 0)
        actor.submit(stream, draft("s", 1, 1, PROMPT, 4), 0)
        answer = await stream.drafted()
    assert answer.block.tokens == (5, 5, 5, 5)
    assert answer.timing.forward_us >= 4 * STEP_S * 1e6
    assert answer.timing.total_us >= answer.timing.forward_us


async def test_steps_that_the_loop_has_not_heard_of_yet_are_load() -> None:
    stream, method = Answers(), Asking()
    async with running(method, clock=lambda: method.now_s) as actor:
        method.ask = actor.meter.utilization
        actor.submit(stream, opened("s", 1, PROMPT), 0)
        actor.submit(stream, draft("s", 1, 1, PROMPT, 4), 0)
        await stream.drafted()
    assert method.answers == [pytest.approx(seconds / 15) for seconds in (1, 2, 3, 4)]
    assert actor.meter.utilization() == pytest.approx(4 / 15)


async def test_steps_are_shared_by_as_many_drafts_as_on_average() -> None:
    stream = Answers()
    async with running(Fives()) as actor:
        for name, depth in (("long", 4), ("short", 2), ("also", 2)):
            actor.submit(stream, opened(name, 1, PROMPT), 0)
            actor.submit(stream, draft(name, 1, 1, PROMPT, depth), 0)
        answers = {each.session: each for each in [await stream.drafted() for _ in range(3)]}
    assert [answers[name].timing.batch_sessions for name in ("short", "also", "long")] == [3, 3, 2]


async def test_what_was_prepared_for_one_request_is_not_given_to_the_next() -> None:
    stream = Answers()
    async with running(Fives(), num_outcomes=8) as actor:
        actor.submit(stream, opened("s", 1, PROMPT, "a"), 0)
        actor.submit(stream, draft("s", 1, 1, PROMPT, 2), 0)
        assert (await stream.drafted()).method == "a"
        actor.submit(stream, draft("s", 1, 2, PROMPT, 4, assumed=(5, 5)), 0)  # prepares what follows 6, too
        assert (await stream.drafted()).method == "a"
        actor.submit(stream, opened("s", 2, (*PROMPT, 6), "b"), 0)
        actor.submit(stream, draft("s", 2, 1, (*PROMPT, 6), 2), 0)
        assert (await stream.drafted()).method == "b"


async def test_what_the_only_session_waits_for_is_drafted_at_once() -> None:
    stream, method = Answers(), Whole()
    async with running(method) as actor:
        actor.submit(stream, opened("s", 1, PROMPT), 100)
        actor.submit(stream, draft("s", 1, 1, PROMPT, 4), 100)
        assert (await stream.drafted()).block.tokens == (5, 5, 5, 5)
        assert method.at_once == 1


async def test_drafts_ahead_and_those_of_several_sessions_go_step_by_step() -> None:
    stream, method = Answers(), Whole()
    async with running(method) as actor:
        actor.submit(stream, opened("s", 1, PROMPT), 100)
        actor.submit(stream, draft("s", 1, 1, PROMPT, 4, assumed=(5, 5)), 100)
        assert (await stream.drafted()).block.tokens == (5, 5, 5, 5)
        actor.submit(stream, opened("other", 1, PROMPT), 100)
        actor.submit(stream, draft("s", 1, 2, PROMPT, 4), 100)
        assert (await stream.drafted()).block.tokens == (5, 5, 5, 5)
        assert method.at_once == 0
