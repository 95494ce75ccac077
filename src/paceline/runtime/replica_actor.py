"""The loop that verify actor and draft actor share: one owner, commands between passes, passes in one thread.

Each turn of the loop:

1. take all commands that have gathered (wait for one only if no pass is due);
2. apply each to the sessions; one that raises fails alone;
3. close orphans whose time is over;
4. if a pass is due and need not wait for more commands, run it in the model's thread, and those after it as long as
   nobody waits; apply their results. If these leave every session with work and nothing else is to be done, the next
   pass begins at once, and what was done is counted meanwhile.

Nothing else touches the sessions or the model, and while a pass runs nobody does, but for commands that are only noted
for its end: they are applied when they come, if no other waits. `Close`, the room for sessions and the rule of epochs
are the same for both and decided here; what other commands and results mean the subclass decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.errors import Cancelled, CapacityExceeded, Fenced, PacelineError, Unavailable
from paceline.kv_usage import KvUsage
from paceline.messages import Close, Closed, Draft, Failed, Open, Verify, command_id_of
from paceline.pass_size import PassSize
from paceline.runtime.connect import EventStream
from paceline.runtime.letters import CommandT, EventT, Letter, StreamEnded
from paceline.runtime.logs import log_context
from paceline.runtime.mailbox import Mailbox, MailboxStopped
from paceline.runtime.model_thread import ModelThread
from paceline.runtime.passes import Pass, run_passes
from paceline.runtime.replica_meter import ReplicaMeter
from paceline.runtime.routes import SessionRoutes
from paceline.runtime.side_work import INTERNAL_MESSAGE, SideWork

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
WorkT = TypeVar("WorkT")


@dataclass(frozen=True, slots=True)
class ActorLimits:
    """Bounds of an actor.

    Attributes:
        max_sessions: sessions at once.
        orphan_ttl_s: how long a session outlives its stream.
        mailbox_items: commands that may wait.
        mailbox_bytes: sum of their sizes.
        stall_timeout_s: a pass that takes longer makes the replica unhealthy.
        idle_check_s: pause after which the tables are checked.
    """

    max_sessions: int = 64
    orphan_ttl_s: float = 10.0
    mailbox_items: int = 8192
    mailbox_bytes: int = 64 * 2**20
    stall_timeout_s: float = 120.0
    idle_check_s: float = 1.0


class ReplicaActor(ABC, Generic[CommandT, EventT, ResultT]):
    """Base of the actors that own a model.

    Args:
        name: for logs and refusals.
        limits: bounds.
        clock: monotonic seconds.

    Attributes:
        meter: counts what it does.
    """

    def __init__(self, name: str, limits: ActorLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.limits = limits
        self.clock = clock
        self.meter = ReplicaMeter(clock)
        self.routes: SessionRoutes[EventT] = SessionRoutes(limits.orphan_ttl_s, clock)
        self._mailbox: Mailbox[Letter[CommandT, EventT] | StreamEnded[EventT] | SideWork] = Mailbox(
            f"the {name}'s mailbox",
            max_items=limits.mailbox_items,
            max_bytes=limits.mailbox_bytes,
            # two closes per session, see `submit`; the rest is for the ends of streams, which nothing may refuse
            reserved_items=2 * limits.max_sessions + limits.mailbox_items,
        )
        self._pass_started_s: float | None = None
        self._under_way: asyncio.Future[list[Pass[ResultT]]] | None = None  # passes that nobody awaits yet
        self._uncounted_passes: list[tuple[Pass[ResultT], PassSize | None]] = []
        self._running = False
        self._ended = asyncio.Event()
        self._no_sessions = asyncio.Event()
        self._draining = False
        self._checked = True

    # --- what a subclass decides ------------------------------------------------------------------------------------

    @abstractmethod
    def apply(self, letter: Letter[CommandT, EventT]) -> None:
        """Applies one command other than `Close`; may raise, then the command is answered with `Failed`."""

    def is_note(self, command: CommandT) -> bool:
        """Whether the command touches nothing that a pass uses, so that it need not wait for the end of one."""
        return False

    @abstractmethod
    def epoch_of(self, session: str) -> int | None:
        """Epoch of the session's owner; None when it is not open."""

    @abstractmethod
    def pass_due(self) -> bool:
        """Whether the model has something to do."""

    def pass_delay_s(self) -> float:
        """For how long the pass that is due should wait for more commands, in seconds; 0: it begins now."""
        return 0.0

    @abstractmethod
    def run_pass(self) -> ResultT:
        """One pass. Runs in the model's thread while the loop waits."""

    def pass_goes_on(self, result: ResultT) -> bool:
        """Whether the next pass can begin before this one's result is applied. In the model's thread."""
        return False

    @abstractmethod
    def size_of(self, result: ResultT) -> PassSize:
        """How much the pass did that gave this result."""

    @abstractmethod
    def pass_done(self, result: ResultT) -> None:
        """Applies what a pass produced."""

    def count_answers(self) -> None:
        """Counts what was answered since this was called last; by now the answers are on their way."""

    @abstractmethod
    def pass_failed(self, error: PacelineError) -> None:
        """A pass raised: answers its sessions and leaves the model in a sound state."""

    @abstractmethod
    def drop_session(self, session: str, reason: PacelineError) -> None:
        """Forgets a session and frees what it holds; an open command of it is answered with the reason."""

    @abstractmethod
    def sessions(self) -> list[str]:
        """Names of all sessions."""

    @property
    @abstractmethod
    def num_working(self) -> int:
        """Sessions with work that is not done; may be asked from any thread."""

    @abstractmethod
    def kv_usage(self) -> KvUsage:
        """Room for key/value rows that is taken; may be asked from any thread."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raises when the tables contradict one another."""

    # --- what streams call ------------------------------------------------------------------------------------------

    def submit(self, stream: EventStream[EventT], command: CommandT, size_bytes: int) -> None:
        """Takes a command.

        Raises:
            CapacityExceeded: too many wait.
            Unavailable: the replica is shutting down.
        """
        letter = Letter(stream, command, self.clock())
        try:
            self._mailbox.put(letter, size_bytes)
        except CapacityExceeded:
            room = self.limits.mailbox_items + 2 * self.limits.max_sessions
            if not isinstance(command, Close) or len(self._mailbox) >= room:
                self.meter.failed(CapacityExceeded.code)
                raise
            self._mailbox.put_reserved(letter)
        if len(self._mailbox) == 1 and self.is_note(command):
            self._mailbox.take()
            self._apply_guarded(letter)

    def stream_ended(self, stream: EventStream[EventT]) -> None:
        """A stream will bring no more commands: its sessions become orphans."""
        with contextlib.suppress(Unavailable):
            self._mailbox.put_reserved(StreamEnded(stream))

    async def between_passes(self, work: Callable[[], WorkT], size_bytes: int = 0) -> WorkT:
        """Does something with sessions or model that is no command, while no pass runs: for rpcs beside the streams.

        Args:
            work: what to do, quickly.
            size_bytes: what it holds while it waits.

        Raises:
            CapacityExceeded: too much waits.
            Unavailable: the replica is shutting down.
            PacelineError: whatever the work raises.
        """
        answer: asyncio.Future[WorkT] = asyncio.get_running_loop().create_future()
        self._mailbox.put(SideWork(work, answer), size_bytes)
        return await answer

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def healthy(self) -> bool:
        """The loop is alive and no pass hangs."""
        started_s = self._pass_started_s
        return self._running and (started_s is None or self.clock() - started_s < self.limits.stall_timeout_s)

    @property
    def num_waiting(self) -> int:
        """Commands that wait for the loop; may be asked from any thread."""
        return len(self._mailbox)

    @property
    def draining(self) -> bool:
        """New sessions are refused."""
        return self._draining

    @property
    def num_sessions(self) -> int:
        """Sessions that are open; may be asked from any thread."""
        return len(self.sessions())

    async def run(self) -> None:
        """The loop; a supervised task. Returns after `stop`."""
        self._running = True
        try:
            with ModelThread(self.name) as model:
                while True:
                    await self._turn(model)
        except MailboxStopped:
            pass
        finally:
            self._running = False
            self._ended.set()

    async def drain(self) -> None:
        """Refuses new sessions and returns when no session is left."""
        self._draining = True
        while self.num_sessions and self._running:
            self._no_sessions.clear()
            await self._no_sessions.wait()

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Ends the loop after the running pass, answers every waiter and frees everything."""
        self._draining = True
        waiting = self._mailbox.stop()
        if self._running:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ended.wait()
        reason = Unavailable("the replica has shut down; use another one")
        for letter in waiting:
            if isinstance(letter, Letter):
                self._fail(letter.stream, letter.command, reason)
            elif isinstance(letter, SideWork):
                letter.refuse(reason)
        if self._pass_started_s is None:
            for session in self.sessions():
                self.drop_session(session, reason)
                self.routes.detach(session)

    # --- the loop ---------------------------------------------------------------------------------------------------

    async def _turn(self, model: ModelThread) -> None:
        for letter in await self._next_letters():
            if isinstance(letter, StreamEnded):
                self.routes.stream_ended(letter.stream)
            elif isinstance(letter, SideWork):
                letter.do()
            else:
                self._apply_guarded(letter)
        for session in self.routes.expired():
            logger.info("orphan closed", extra={"session": session})
            self.close_session(session, Unavailable("no stream spoke for the session in time"))
        if self.pass_due() and self.pass_delay_s() <= 0:
            self._checked = False
            await self._passes(model)
        self.count_answers()
        if not self.num_sessions:
            self.meter.no_sessions()
            self._no_sessions.set()

    async def _next_letters(self) -> list[Letter[CommandT, EventT] | StreamEnded[EventT] | SideWork]:
        waits: list[float] = []  # for a command, in seconds
        is_due = self.pass_due()
        if is_due:
            if self._mailbox.draining:
                raise MailboxStopped(self.name)
            waits.append(self.pass_delay_s())
            if waits[0] <= 0:
                return self._mailbox.take()
        if len(self._mailbox):
            return self._mailbox.take()
        deadline_s = self.routes.next_deadline_s()
        if deadline_s is not None:
            waits.append(max(0.0, deadline_s - self.clock()))
        if not is_due and not self._checked:
            waits.append(self.limits.idle_check_s)
        try:
            async with asyncio.timeout(min(waits, default=None)):
                return await self._mailbox.get_batch()
        except TimeoutError:
            if not is_due and not self._checked:
                self._checked = True
                self.check_integrity()
            return []

    def _apply_guarded(self, letter: Letter[CommandT, EventT]) -> None:
        self.guarded(letter.stream, letter.command, lambda: self._apply(letter))

    def guarded(self, stream: EventStream[EventT], command: CommandT, do: Callable[[], None]) -> None:
        """Does what a command asks for. Whatever that raises is its answer, and hurts no other."""
        with log_context(session=command.session):
            try:
                do()
            except PacelineError as error:
                self._fail(stream, command, error)
            except Exception:
                logger.exception(
                    "a command failed unexpectedly",
                    extra={"session": command.session, "epoch": command.epoch, "command": type(command).__name__},
                )
                self._fail(stream, command, PacelineError(INTERNAL_MESSAGE))

    def _apply(self, letter: Letter[CommandT, EventT]) -> None:
        command = letter.command
        if isinstance(command, Close):
            self._close(letter, command)
            logger.debug("session closed", extra={"epoch": command.epoch})
        else:
            self.apply(letter)
            if isinstance(command, Open):
                logger.debug("session opened", extra={"epoch": command.epoch, "tokens": len(command.tokens)})

    def _fail(self, stream: EventStream[EventT], command: CommandT, error: PacelineError) -> None:
        self.count_failure(command.session, command.epoch, error.code)
        stream.send(self.failed_event(command, error))

    def count_failure(self, session: str, epoch: int, code: str) -> None:
        """Counts and logs that a command is answered with a failure; what it says in words goes to the gateway."""
        self.meter.failed(code)
        level = logging.DEBUG if code in (Cancelled.code, CapacityExceeded.code) else logging.INFO
        logger.log(level, "command failed", extra={"session": session, "epoch": epoch, "code": code})

    def failed_event(self, command: CommandT, error: PacelineError) -> EventT:
        """The answer to a command that failed."""
        # Failed is part of every service's events, which the type variable cannot say.
        return Failed(command.session, command.epoch, command_id_of(command), error.to_failure())  # type: ignore[return-value]

    def _close(self, letter: Letter[CommandT, EventT], command: Close) -> None:
        # The session's open command is answered over its own stream: the one that closes may have asked nothing yet.
        if self.epoch_of(command.session) is not None:
            self.check_epoch(command)
            self.drop_session(command.session, Cancelled("the session was closed"))
        # Like Failed, Closed is part of every service's events. It goes before the route, with which a stream may end.
        letter.stream.send(Closed(command.session, command.epoch))  # type: ignore[arg-type]
        self.routes.detach(command.session)

    def check_epoch(self, command: Open | Close | Verify | Draft) -> None:
        """Refuses a command of an epoch that is over; newer ones pass.

        Raises:
            Fenced: a newer epoch owns the session.
        """
        epoch = self.epoch_of(command.session)
        if epoch is not None and command.epoch < epoch:
            raise Fenced(f"epoch {command.epoch} is over: epoch {epoch} owns the session", field="epoch")

    def check_room(self) -> None:
        """Refuses a new session when none may be opened.

        Raises:
            Unavailable: the replica is shutting down.
            CapacityExceeded: all sessions are taken.
        """
        if self._draining:
            raise Unavailable("the replica is shutting down; use another one")
        if self.num_sessions >= self.limits.max_sessions:
            raise CapacityExceeded(f"all {self.limits.max_sessions} sessions are taken; retry later")

    def close_session(self, session: str, reason: PacelineError) -> None:
        """Drops a session and its route."""
        self.drop_session(session, reason)
        self.routes.detach(session)

    async def _passes(self, model: ModelThread) -> None:
        self.meter.began()
        self._begin(model)
        while self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            await under_way
            for one, size in self._uncounted_passes:
                self.meter.passed(one, size)
            self._uncounted_passes.clear()
            self.count_answers()
        self.meter.ended()

    def _begin(self, model: ModelThread) -> None:
        self._pass_started_s = self.clock()  # from here on the model is the thread's, whenever that comes to it
        self._under_way = model.run(
            lambda: run_passes(self._run_pass, self._goes_on, self.clock),
            lambda passes: self._passes_done(passes, model),
        )

    def _passes_done(self, passes: list[Pass[ResultT]], model: ModelThread) -> None:
        self._pass_started_s = None
        for one in passes:
            outcome = one.outcome
            size = None if isinstance(outcome, Exception) else self.size_of(outcome)
            self._uncounted_passes.append((one, size))
            if isinstance(outcome, PacelineError):
                logger.warning("a pass failed: %s", outcome.message, extra={"code": outcome.code})
                self.pass_failed(outcome)
            elif isinstance(outcome, Exception):
                logger.error("a pass failed unexpectedly", exc_info=outcome)
                self.pass_failed(PacelineError(INTERNAL_MESSAGE))
            else:
                self.pass_done(outcome)
            if isinstance(outcome, Exception):
                traceback.clear_frames(outcome.__traceback__)  # the error would keep the tensors of its pass
        if self._all_go_on():
            self._begin(model)

    def _all_go_on(self) -> bool:
        """Whether every session is in the next pass, and a turn of the loop would do nothing before that."""
        if len(self._mailbox) or self._mailbox.draining or not self._running or self.routes.expired():
            return False
        return self.pass_due() and self.num_working == self.num_sessions and self.pass_delay_s() <= 0

    def _run_pass(self) -> ResultT:
        self._pass_started_s = self.clock()
        return self.run_pass()

    def _goes_on(self, result: ResultT) -> bool:
        """Whether neither a command nor a result waits for the loop."""
        return not len(self._mailbox) and not self._mailbox.draining and self.pass_goes_on(result)
