"""The session actor: owns one generation from admission to its one terminal message.

It is the shell around two parts. `RoundLoop` decides what to verify and draft and when the generation ends; `Outlet`
takes the tokens to the record and to the client. The actor hands them what it is told, carries out what they ask for,
and keeps the one timer that they need. It never waits for a replica, the store or the client: each of them answers
into its mailbox.
"""

from __future__ import annotations

import asyncio
import logging
import time

from paceline.errors import (
    Cancelled,
    CapacityExceeded,
    DeadlineExceeded,
    NotFound,
    PacelineError,
    SessionBusy,
    Unavailable,
)
from paceline.messages import Drafted, Failed, Verified, command_id_of
from paceline.runtime.logs import bind_log_context
from paceline.runtime.mailbox import Mailbox, MailboxStopped
from paceline.session.store import Positions
from paceline.text.commit import Committer
from paceline_gateway.commands import (
    Cancel,
    ClientRead,
    Fetched,
    FindReplica,
    Found,
    LinkBack,
    LinkLost,
    ReplicaCommand,
    ReplicaEvent,
    ReplicaLink,
    Said,
    SessionCommand,
    StoreAnswered,
    Tick,
    WithdrawFind,
)
from paceline_gateway.deadlines import SessionTimer, earliest
from paceline_gateway.effects import Commit, Effect, Fail, Fetch, Find, Finish, Lane, Leave, Measured, Send
from paceline_gateway.emission import ClientStream
from paceline_gateway.feature_relay import FeatureRelay
from paceline_gateway.outlet import Outlet
from paceline_gateway.plan import GenerationPlan
from paceline_gateway.round_loop import RoundLoop
from paceline_gateway.routing import is_of_use, prefixes_of
from paceline_gateway.services import SessionServices

logger = logging.getLogger(__name__)

_MAILBOX_SLOTS = 1024
"""Far more than one session's replicas, store and client can have to say at once."""


class SessionActor:
    """One generation.

    Args:
        plan: what to generate.
        committer: decides when it ends.
        services: what it works with.
        warnings: things that the client should know from the start.
        arrived_at: when the request came, in monotonic seconds; None for now.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        committer: Committer,
        services: SessionServices,
        warnings: tuple[str, ...] = (),
        arrived_at: float | None = None,
    ) -> None:
        self._plan = plan
        self._services = services
        self._clock = time.monotonic
        self._mailbox: Mailbox[SessionCommand] = Mailbox(
            f"the mailbox of session {plan.session}", max_items=0, max_bytes=0, reserved_items=_MAILBOX_SLOTS
        )
        self._started_at = started_at = self._clock() if arrived_at is None else arrived_at
        self._ends_at = started_at + services.limits.max_generation_s
        self._loop = RoundLoop(plan, committer, services.patience, started_at, services.times)
        self._outlet = Outlet(plan, services, self._loop.log, self._positions, self, warnings)
        self._links: dict[Lane, ReplicaLink] = {}
        self._find_ids: dict[Lane, int] = {}
        self._last_find_id = 0
        self._tasks: asyncio.TaskGroup | None = None
        self._relay = FeatureRelay(plan.session, plan.epoch, self)
        self._rounds_begun = False
        self._sent = False
        self._to_note: list[Commit | Measured] = []
        self._full_since: float | None = None
        self._timer = SessionTimer(asyncio.get_running_loop(), lambda: self.tell(Tick()), self._clock)

    @property
    def session(self) -> str:
        """Its name."""
        return self._plan.session

    @property
    def epoch(self) -> int:
        """Its fencing number."""
        return self._plan.epoch

    @property
    def tenant(self) -> str:
        """Whose it is; empty without API keys."""
        return self._plan.tenant

    @property
    def served(self) -> bool:
        """Its client has got the terminal message; its record may still be completed."""
        return self._outlet.terminal_sent

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of its prompt."""
        return self._plan.prompt

    @property
    def client(self) -> ClientStream:
        """What its client gets."""
        return self._outlet.client

    # --- what a scrape asks, from a thread of its own -----------------------------------------------------------------

    @property
    def waiting(self) -> bool:
        """Its first round has not been sent."""
        return not self._loop.over and self._loop.evidence.first_round_at is None

    @property
    def running(self) -> bool:
        """Its rounds run."""
        return not self._loop.over and self._loop.evidence.first_round_at is not None

    @property
    def undurable(self) -> bool:
        """Its record lags behind because the store does not answer."""
        return self._outlet.undurable

    def attached(self, lane: Lane) -> bool:
        """Whether a replica of this kind holds it."""
        return lane in self._links

    # --- what others tell it ------------------------------------------------------------------------------------------

    def tell(self, command: SessionCommand) -> bool:
        """Hands it a command; says whether it is still there. Never waits and never raises."""
        try:
            self._mailbox.put_reserved(command)
        except Unavailable:
            return False
        except CapacityExceeded:
            self._end_mailbox()
            return False
        return True

    def _end_mailbox(self) -> None:
        """Refuses commands from now on. A replica that was found in vain does not keep the session."""
        for command in self._mailbox.stop():
            if isinstance(command, Found):
                command.link.detach(self.session, self._plan.epoch)

    def cancel(self, error: PacelineError) -> None:
        """Ends the generation with an error, unless it has ended."""
        self.tell(Cancel(error))

    # --- the owner task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Runs the generation to its end; a supervised task."""
        bind_log_context(request_id=self._plan.request_id, session=self.session)
        self._outlet.lines.started()
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                writing = tasks.create_task(self._outlet.writer.run(), name=f"store writer {self.session}")
                await self._run()
                self._relay.stop()
                writing.cancel()
        except asyncio.CancelledError:
            self._cut_off(Cancelled("the gateway is shutting down"))
            raise
        except Exception:
            logger.exception("a session failed unexpectedly", extra={"session": self.session})
            self._cut_off(PacelineError("internal error; the gateway's log has the details"))
        finally:
            self._end_mailbox()
            self._timer.stop()
            for lane in Lane:
                self._leave(lane)
            self._outlet.lines.close()

    def _cut_off(self, error: PacelineError) -> None:
        """Ends the client's stream where no decision could do it."""
        if not self._outlet.terminal_sent:
            self._services.metrics.request_failed(error, self._clock() - self._started_at)
        self.client.fail(error)

    async def _run(self) -> None:
        self._settle()
        while not self._outlet.over(self._clock()):
            try:
                commands = await self._mailbox.get_batch()
            except MailboxStopped:
                raise RuntimeError(f"more than {_MAILBOX_SLOTS} commands wait: a peer floods the session") from None
            for command in commands:
                self._handle(command, self._clock())
                self._carry_out_all()
            if self._sent:
                self._sent = False
                # Links write first: a replica need not wait for the rest, which is a third of the work.
                await asyncio.sleep(0)
            self._settle()

    def _handle(self, command: SessionCommand, now: float) -> None:
        match command:
            case Said(lane, link, event):
                if self._links.get(lane) is link:  # not from a replica that was left
                    self._said(lane, event, now)
            case StoreAnswered(result):
                if isinstance(result, PacelineError) and not isinstance(result, SessionBusy | NotFound):
                    self._services.metrics.store_failed(result)
                try:
                    self._outlet.store_answered(result, now)
                except PacelineError as error:
                    self._loop.fail(error, now)
                    if self._outlet.ended and not self._outlet.terminal_sent:
                        self._outlet.fail(error)  # the last tokens cannot be recorded: this is not a clean end
            case Found():
                self._found(command, now)
            case LinkLost(lane, link, gone):
                if self._links.get(lane) is link:
                    self._loop.lost(lane, now, gone)
            case LinkBack(lane, link):
                if self._links.get(lane) is link:
                    self._back(command, now)
            case Fetched() if self._relay.is_newest(command):
                self._loop.fetched(command.error is None, now)
            case Fetched():
                pass
            case ClientRead():
                self._full_since = None
                self._loop.hold(False, now)
            case Cancel(error):
                self._loop.fail(error, now)
            case Tick():
                self._check_limits(now)
                self._loop.tick(now)

    def _said(self, lane: Lane, event: ReplicaEvent, now: float) -> None:
        if lane is Lane.VERIFIER:
            if not isinstance(event, Drafted):
                self._loop.on_verifier(event, now)
        elif not isinstance(event, Verified):
            self._loop.on_drafter(event, now)

    # --- after each batch of commands ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Moves tokens on, and sets the timer anew."""
        now = self._clock()
        self._note()
        self._loop.learn()
        self._outlet.settle(now, lambda: self._loop.report(now))
        if self._outlet.started and not self._rounds_begun:
            self._rounds_begun = True
            self._loop.start(now)
        if self.client.full and self._full_since is None:
            self._full_since = now
            self._loop.hold(True, now)
        self._carry_out_all()
        self._timer.set(self._next_deadline())

    def _check_limits(self, now: float) -> None:
        limits = self._services.limits
        if now >= self._ends_at:
            self._loop.fail(DeadlineExceeded(f"the generation took longer than {limits.max_generation_s:g} s"), now)
        elif self._full_since is not None and now >= self._full_since + limits.client_stall_s:
            self._loop.fail(
                DeadlineExceeded(
                    f"the client has left its full buffer unread for {limits.client_stall_s:g} s; read faster"
                ),
                now,
            )

    def _next_deadline(self) -> float | None:
        if self._loop.over:
            return self._outlet.deadline
        stall_s = self._services.limits.client_stall_s
        stalls_at = None if self._full_since is None else self._full_since + stall_s
        return earliest(self._outlet.deadline, self._loop.deadline, self._ends_at, stalls_at)

    # --- carrying out -------------------------------------------------------------------------------------------------

    def _carry_out_all(self) -> None:
        while effects := self._loop.take_effects():
            for effect in effects:
                if isinstance(effect, Commit | Measured):
                    self._to_note.append(effect)  # a replica waits for what else there is
                else:
                    self._carry_out(effect)

    def _note(self) -> None:
        """Takes tokens to the record and figures to the metrics."""
        for effect in self._to_note:
            self._carry_out(effect)
        self._to_note.clear()

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Send(lane, command):
                self._send(lane, command)
            case Commit():
                self._outlet.commit(effect)
            case Measured(record):
                self._services.metrics.round_ended(record)
            case Find(lane, avoid):
                self._find(lane, avoid)
            case Leave(lane, silent):
                self._leave(lane, silent)
            case Fetch(rows):
                self._fetch(rows)
            case Finish():
                self._note()
                self._outlet.finish(effect)
            case Fail(error):
                self._note()
                self._outlet.fail(error)

    def _send(self, lane: Lane, command: ReplicaCommand) -> None:
        link = self._links.get(lane)
        if link is None:
            return
        try:
            link.send(command)
            self._sent = True
        except PacelineError as error:
            failed = Failed(self.session, self._plan.epoch, command_id_of(command), error.to_failure())
            self._said(lane, failed, self._clock())

    def _find(self, lane: Lane, avoid: str) -> None:
        self._last_find_id += 1
        self._find_ids[lane] = self._last_find_id
        self._services.pool(lane).tell(self._wanted(lane, avoid))

    def _wanted(self, lane: Lane, avoid: str = "") -> FindReplica:
        plan = self._plan
        is_verifier = lane is Lane.VERIFIER
        return FindReplica(
            session=plan.session,
            find_id=self._last_find_id,
            port=self,
            avoid=avoid,
            method=plan.method,
            context_len=len(plan.prompt) + plan.max_tokens if is_verifier else 0,
            features=None if is_verifier else self._loop.verifier.features,
            prefer=plan.last(lane),
            weights_digest=self._loop.verifier.weights_digest if is_verifier else "",
            prefixes=prefixes_of(self._loop.log) if is_verifier else (),
        )

    def _found(self, found: Found, now: float) -> None:
        if self._find_ids.get(found.lane) != found.find_id:
            found.link.detach(self.session, self._plan.epoch)
            return
        del self._find_ids[found.lane]
        self._links[found.lane] = found.link
        self._loop.found(found.lane, found.replica, now)

    def _back(self, back: LinkBack, now: float) -> None:
        """A replica that was restarted is one that was found anew, or one to be left if the session cannot use it."""
        if not back.restarted:
            self._loop.back(back.lane, now)
        elif is_of_use(back.lane, self._wanted(back.lane), back.replica):
            self._loop.found(back.lane, back.replica, now)
        else:
            self._loop.lost(back.lane, now, gone=True)

    def _fetch(self, rows: range) -> None:
        verifier, drafter = self._links.get(Lane.VERIFIER), self._links.get(Lane.DRAFTER)
        if self._tasks is not None and verifier is not None and drafter is not None:
            self._relay.start(self._tasks, verifier, drafter, rows)

    def _leave(self, lane: Lane, silent: bool = False) -> None:
        self._relay.stop()
        if self._find_ids.pop(lane, None) is not None:
            self._services.pool(lane).tell(WithdrawFind(self.session))
        link = self._links.pop(lane, None)
        if link is not None:
            link.detach(self.session, self._plan.epoch, silent)

    def _positions(self) -> Positions:
        verifier, drafter = self._loop.verifier, self._loop.drafter
        return Positions(
            verifier=verifier.attachment.address or self._plan.last_verifier,
            verifier_kv_len=verifier.kv_len,
            drafter=drafter.attachment.address,
            drafter_kv_len=drafter.book.kv_len,
            acceptance_ewma=self._loop.evidence.acceptance_ewma,
            weights_digest=verifier.weights_digest,
        )
