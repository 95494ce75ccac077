"""Where a session's tokens leave it: into its record first, then to its client, and at the end one terminal message.

A part of the session actor: used by its task only, and it never waits. The store's answers come back through the
actor's mailbox.
"""

from __future__ import annotations

from collections.abc import Callable

from paceline.errors import Cancelled, Fenced, NotFound, PacelineError, SessionBusy
from paceline.generation import Evidence, Finished, Started
from paceline.session.store import AppendOutcome, Positions, SessionRecord, SessionState
from paceline.token_log import TokenLog
from paceline_gateway.commands import ClientRead, SessionPort
from paceline_gateway.deadlines import earliest
from paceline_gateway.effects import Commit, Finish
from paceline_gateway.emission import ClientStream, chunk_of
from paceline_gateway.generation_log import GenerationLog
from paceline_gateway.journal import Journal
from paceline_gateway.plan import GenerationPlan
from paceline_gateway.services import SessionServices
from paceline_gateway.store_writer import StoreWriter

_NOT_STORED = "the session store does not answer: this session cannot be resumed until it does"


class Outlet:
    """Record and client of one session.

    Args:
        plan: the generation.
        services: what the session works with.
        log: committed tokens; only read here.
        positions: where the session stands.
        port: the actor's mailbox.
        warnings: things that the client should know from the start.

    Attributes:
        client: the client's buffer.
        writer: talks to the store; the actor runs it.
        lines: tells the log of the generation.
        started: the client has got its first message, and the generation may begin.
    """

    def __init__(
        self,
        plan: GenerationPlan,
        services: SessionServices,
        log: TokenLog,
        positions: Callable[[], Positions],
        port: SessionPort,
        warnings: tuple[str, ...],
    ) -> None:
        limits = services.limits
        self._plan = plan
        self._metrics = services.metrics
        self._repair_s = limits.repair_s
        self._warnings = warnings
        self._journal = Journal(
            _first_record(plan, services.owner),
            log,
            positions,
            ack_timeout_s=limits.ack_timeout_s,
            touch_every_s=limits.record_expiry_s / 3,
            stored=plan.resumption is not None,
        )
        self._outcome: Finish | PacelineError | None = None
        self._terminal_at: float | None = None
        self._num_tokens = 0
        self.client = ClientStream(
            limits.max_buffered_chunks, limits.max_buffered_bytes, lambda: port.tell(ClientRead())
        )
        self.writer = StoreWriter(services.store, port)
        self.lines = GenerationLog(plan)
        self.started = False

    @property
    def ended(self) -> bool:
        """The generation has ended; its last tokens may still be on their way."""
        return self._outcome is not None

    @property
    def terminal_sent(self) -> bool:
        """The client has got its terminal message."""
        return self._terminal_at is not None

    @property
    def undurable(self) -> bool:
        """The record lags behind because the store does not answer."""
        return self._journal.silent and not self._journal.settled

    @property
    def deadline(self) -> float | None:
        """When `settle` has something to do although nothing happened."""
        gives_up = None if self._terminal_at is None else self._terminal_at + self._repair_s
        return earliest(self._journal.deadline, gives_up)

    def over(self, now: float) -> bool:
        """The client has its terminal message and the record is complete, or given up."""
        if self._terminal_at is None:
            return False
        return self._journal.settled or now >= self._terminal_at + self._repair_s

    def commit(self, commit: Commit) -> None:
        """Tokens became final; those that the client has from before are recorded only."""
        self._num_tokens += len(commit.tokens)
        resumption = self._plan.resumption
        wanted = commit if resumption is None else commit.since(resumption.next_token)
        if wanted is not None:
            self._journal.add(wanted)

    def finish(self, finish: Finish) -> None:
        """The generation has ended by itself."""
        self._outcome = finish
        self._journal.end(SessionState.FINISHED, finish.reason.value)

    def fail(self, error: PacelineError) -> None:
        """The generation has failed or was cancelled."""
        self._outcome = error
        if isinstance(error, Fenced | SessionBusy):
            self._journal.abandon()
        elif isinstance(error, Cancelled):
            self._journal.end(SessionState.CANCELLED, error.code)
        else:
            self._journal.end(SessionState.FAILED, error.code)

    def store_answered(self, result: AppendOutcome | PacelineError, now: float) -> None:
        """The store has answered the write that was on its way.

        Raises:
            PacelineError: the session cannot go on.
        """
        if isinstance(result, AppendOutcome):
            try:
                self._journal.answered(result, now)
            except Fenced:
                self._journal.abandon()
                raise
            return
        if not self.started and (isinstance(result, SessionBusy | NotFound) or not self._plan.session_drawn):
            # Without an answer nobody knows whether a name that the client chose is free.
            self._journal.abandon()
            raise result
        self._journal.failed(now)

    def settle(self, now: float, report: Callable[[], Evidence]) -> None:
        """Sends what may be sent and writes what is to be written."""
        self._journal.tick(now)
        if not self.started and not self.ended:
            self._start()
        for released in self._journal.release():
            chunk = chunk_of(released)
            self.lines.add(chunk.text)
            self.client.put(chunk)
        write = self._journal.next_write(now)
        if write is not None:
            self.writer.submit(write)
        if self._outcome is not None and self._terminal_at is None and self._may_end(self._outcome):
            self._terminal_at = now
            self._send_terminal(self._outcome, report)

    def _start(self) -> None:
        unsure = self._journal.silent and self._plan.session_drawn
        if not unsure and not self._journal.exists:
            return
        self.started = True
        plan = self._plan
        warnings = (*self._warnings, _NOT_STORED) if self._journal.silent else self._warnings
        self.client.put(Started(plan.session, plan.model, len(plan.prompt), plan.sampling.seed, plan.promise, warnings))
        if plan.resumption is not None and plan.resumption.tail is not None:
            self._journal.add(plan.resumption.tail)

    def _may_end(self, outcome: Finish | PacelineError) -> bool:
        """Whether nothing has to come before the terminal message any more."""
        at_once = isinstance(outcome, Cancelled | Fenced) or not self.started
        stored = self._journal.settled or self._journal.silent
        return at_once or (stored and not self._journal.num_waiting)

    def _send_terminal(self, outcome: Finish | PacelineError, report: Callable[[], Evidence]) -> None:
        evidence = report()
        prompt_tokens = len(self._plan.prompt)
        if isinstance(outcome, PacelineError):
            self.client.fail(outcome)
            self._metrics.request_failed(outcome, evidence.total_ms / 1e3)
        else:
            self._metrics.request_answered(outcome.reason, self._num_tokens, evidence)
            num_tokens = len(self._plan.committed) - prompt_tokens + self._num_tokens
            self.client.put(Finished(outcome.reason, prompt_tokens, num_tokens, evidence, outcome.stop_string))
        self.lines.ended(outcome, self._num_tokens, evidence)


def _first_record(plan: GenerationPlan, owner: str) -> SessionRecord:
    return SessionRecord(
        session=plan.session,
        epoch=plan.epoch,
        owner=owner,
        positions=Positions(verifier=plan.last_verifier),
        tenant=plan.tenant,
        state=SessionState.RUNNING,
        model=plan.model,
        sampling=plan.sampling,
        rule=plan.rule,
        generation_start=len(plan.prompt),
        tokens=plan.committed,
        max_tokens=plan.max_tokens,
        stop=plan.stop,
        speculation=plan.speculation,
    )
