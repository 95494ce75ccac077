"""A replica that is stopped in the moment between two passes: the model is its thread's from the hand-over on."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

from paceline_verifier.verify_actor import VerifyActor

from paceline.engine.target import TargetEngine
from paceline.messages import Opened, Verified, VerifierEvent
from paceline.runtime.replica_actor import ActorLimits
from paceline.speculation.tree import DraftTree
from tests.fakes.toy_runner import cycle_law
from tests.integration.replicas import GatedRunner, Writer
from tests.integration.test_follow_up import follow_up
from tests.integration.test_verifier_service import CYCLE, PROMPT, cycle_from


class Answers:
    """A stream that keeps what is sent, and does something with the next event if it is told to."""

    name = "test"

    def __init__(self) -> None:
        self.events: asyncio.Queue[VerifierEvent] = asyncio.Queue()
        self.then: Any = None

    def finish(self) -> None:
        """Nothing is to be done."""

    def send(self, event: VerifierEvent) -> None:
        """Keeps it."""
        self.events.put_nowait(event)
        if self.then is not None:
            then, self.then = self.then, None
            then()


async def test_a_session_whose_pass_is_handed_over_is_not_closed_beside_it() -> None:
    runner = GatedRunner(cycle_law(CYCLE))
    engine = TargetEngine(runner)
    actor = VerifyActor(engine, ActorLimits())
    task = asyncio.create_task(actor.run())
    stream, writer = Answers(), Writer.start("s", PROMPT)
    actor.submit(stream, writer.open(), 10)
    actor.submit(stream, writer.verify(), 10)
    assert isinstance(await stream.events.get(), Opened)
    verdict = await stream.events.get()
    assert isinstance(verdict, Verified)
    writer.log.extend(verdict.tokens)
    command = writer.verify(DraftTree.chain(cycle_from(4, 2)))
    runner.gate.clear()
    actor.submit(stream, command, 10)
    await runner.pass_entered()
    actor.submit(stream, follow_up(command, cycle_from(4, 3), DraftTree.chain(cycle_from(7, 3))), 10)

    run_pass, may_begin = actor._run_pass, threading.Event()

    def late() -> Any:
        """The model's thread comes late to the next pass."""
        may_begin.wait(5.0)
        return run_pass()

    def end() -> None:
        """What a supervisor does when another task of the process fails, as the verdict is sent."""
        actor._run_pass = late  # type: ignore[method-assign]
        asyncio.get_running_loop().call_soon(task.cancel)

    stream.then = end
    runner.gate.set()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    try:
        await actor.stop()
        assert engine.num_sessions == 1
    finally:
        may_begin.set()
