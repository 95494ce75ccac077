"""The draft actor: owns the drafting method and every draft session.

| told | decides |
|---|---|
| `Open` | a new session, the same one again, or a take-over by a newer epoch |
| `Draft` | replay, drop, `NeedTokens`, or a job; a running job is superseded: answered with what it has |
| `Close` | (decided by the base) the session is gone; its running job is answered with what it has |
| a step is done | finished jobs are answered |

A draft is valid for one context: base + assumed. Whether it was of use the gateway finds out. Under the rule `match`
nothing here can change a generation's output; under `ratio` the tokens must have been drawn from the probabilities that
go with them, and be cut by length and time only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Counter

from paceline.drafting.method import DraftJob, DraftMethod
from paceline.errors import InvalidArgument, PacelineError
from paceline.kv_usage import HoldsRows, KvUsage
from paceline.messages import (
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    Evicted,
    Failed,
    NeedTokens,
    Open,
    Opened,
    Timing,
)
from paceline.pass_size import PassSize
from paceline.runtime.replica_actor import ActorLimits, Letter, ReplicaActor, SelfChecking
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.text.validation import validate_sampling
from paceline.token_log import MAX_SESSION_TOKENS, TokenLog

_US_PER_S = 1_000_000
_ANY_ID = 2**31
NOBODY = "none"
"""In place of the method where a draft proposes nothing."""


@dataclass(slots=True)
class _Running:
    """A job on its way, with what its answer needs."""

    command: Draft
    job: DraftJob
    arrived_s: float
    started_s: float | None = None
    forward_s: float = 0.0
    batch_sessions: int = 0


@dataclass(slots=True)
class _Session:
    """One draft session.

    Attributes:
        epoch: of its owner.
        opened: the command that opened it, for its parameters.
        log: committed tokens known here.
        last_id: draft_id of the newest draft that was answered or runs; 0 before the first.
        answer: the answer to `last_id`, for replay; None while it runs or when it had none.
        running: the job on its way.
    """

    epoch: int
    opened: Open
    log: TokenLog
    last_id: int = 0
    answer: Drafted | None = None
    running: _Running | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """What one step of the method took, and how many tokens it proposed."""

    running: tuple[_Running, ...]
    num_tokens: int
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class DraftLimits:
    """What the drafter allows.

    Attributes:
        max_draft_tokens: most tokens of one proposal.
        max_session_tokens: most tokens of a session, assumed ones included; more are refused. Beyond
            `max_model_len` but within this a session is served with empty blocks, so that its request decodes plainly.
        max_model_len: most tokens of context and proposal; None when the method has no limit.
        vocab_size: ids at or above it are refused; None when the method takes any.
    """

    max_draft_tokens: int = 16
    max_session_tokens: int = MAX_SESSION_TOKENS
    max_model_len: int | None = None
    vocab_size: int | None = None


class DraftActor(ReplicaActor[DrafterCommand, DrafterEvent, _Step]):
    """The owner of the draft sessions.

    Args:
        method: the drafting method; used from the actor's thread and, between steps, from its loop.
        draft_limits: what a draft may ask for.
        limits: bounds of the actor.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        method: DraftMethod,
        draft_limits: DraftLimits,
        limits: ActorLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("draft actor", limits, clock)
        self._method = method
        self._draft_limits = draft_limits
        self._sessions: dict[str, _Session] = {}
        self._due: dict[str, _Running] = {}
        registry = self.meter.registry
        self._num_drafts = Counter("paceline_drafts", "Drafts that were answered.", ["method"], registry=registry)
        self._num_draft_tokens = Counter(
            "paceline_draft_tokens", "Tokens that were proposed.", ["method"], registry=registry
        )
        for name in (*method.info.methods, NOBODY):
            self._num_drafts.labels(name)
            self._num_draft_tokens.labels(name)

    # --- commands ---------------------------------------------------------------------------------------------------

    def apply(self, letter: Letter[DrafterCommand, DrafterEvent]) -> None:
        """Applies one command.

        Raises:
            PacelineError: it is refused.
        """
        match letter.command:
            case Draft():
                self._draft(letter, letter.command)
            case Open():
                self._open(letter, letter.command)

    def _open(self, letter: Letter[DrafterCommand, DrafterEvent], command: Open) -> None:
        self._check_len(len(command.tokens), "tokens")
        self._check_ids(command.tokens, "tokens")
        self._check_method(command.method)
        validate_sampling(command.sampling, vocab_size=self._draft_limits.vocab_size or _ANY_ID)
        session = self._sessions.get(command.session)
        if session is not None:
            self.check_epoch(command)
            self._supersede(session)
            if command.epoch > session.epoch:
                session.last_id, session.answer = 0, None
            session.epoch, session.opened, session.log = command.epoch, command, TokenLog(command.tokens)
        else:
            self.check_room()
            self._method.open(command.session)
            self._sessions[command.session] = _Session(command.epoch, command, TokenLog(command.tokens))
        self.routes.attach(command.session, letter.stream)
        letter.stream.send(Opened(command.session, command.epoch, self._method.kv_len(command.session)))

    def _draft(self, letter: Letter[DrafterCommand, DrafterEvent], command: Draft) -> None:
        session = self._sessions.get(command.session)
        if session is None:
            letter.stream.send(Evicted(command.session, command.epoch, command.draft_id))
            return
        self.check_epoch(command)
        if command.epoch > session.epoch:
            self._supersede(session)
            session.epoch, session.last_id, session.answer = command.epoch, 0, None
        self.routes.attach(command.session, letter.stream)
        if command.draft_id <= session.last_id:
            if command.draft_id == session.last_id and session.answer is not None:
                letter.stream.send(session.answer)
            return
        self._supersede(session)
        self._check_len(command.base_len, "catch_up" if command.catch_up else "base_len")
        self._check_len(command.base_len + len(command.assumed), "assumed")
        self._check_ids(command.assumed, "assumed")
        self._check_ids(command.catch_up, "catch_up")
        have_len = session.log.reconcile(command.base_len, command.prefix_hash, command.catch_up)
        if have_len is not None:
            letter.stream.send(NeedTokens(command.session, command.epoch, command.draft_id, have_len))
            return
        session.last_id, session.answer = command.draft_id, None
        self._start(session, command, letter.arrived_s)

    def _start(self, session: _Session, command: Draft, arrived_s: float) -> None:
        depth = min(command.max_depth, self._draft_limits.max_draft_tokens)
        if self._draft_limits.max_model_len is not None:
            depth = min(depth, self._draft_limits.max_model_len - len(session.log) - len(command.assumed))
        # A job that the method never sees needs no context, which may be far longer than the method's.
        context = [*session.log.tokens, *command.assumed] if depth > 0 else ()
        opened = session.opened
        job = DraftJob(
            command.session, context, depth, opened.sampling, opened.generation_start, opened.method, opened.rule
        )
        session.running = _Running(command, job, arrived_s)
        if depth < 1:
            self._answer(session)
        else:
            self._due[command.session] = session.running

    def _check_len(self, length: int, name: str) -> None:
        limit = self._draft_limits.max_session_tokens
        if length > limit:
            raise InvalidArgument(
                f"with {name} the session has {length} tokens; this drafter takes at most {limit}", field=name
            )

    def _check_ids(self, tokens: tuple[int, ...], name: str) -> None:
        limit = self._draft_limits.vocab_size
        if limit is not None and tokens and max(tokens) >= limit:
            raise InvalidArgument(f"{name} holds id {max(tokens)}; the vocabulary has {limit} ids", field=name)

    def _check_method(self, method: str) -> None:
        offered = self._method.info.methods
        if method and method not in offered:
            raise InvalidArgument(
                f"this drafter does not draft by method {method!r}; it offers {', '.join(offered)}", field="method"
            )

    # --- answers ----------------------------------------------------------------------------------------------------

    def _supersede(self, session: _Session) -> None:
        if session.running is not None:
            self._answer(session)

    def _answer(self, session: _Session) -> None:
        running = session.running
        if running is None:
            return
        session.running = None
        self._due.pop(running.command.session, None)
        session.answer = answer = self._drafted(running)
        method = answer.method if answer.block.tokens else NOBODY
        self._num_drafts.labels(method).inc()
        self._num_draft_tokens.labels(method).inc(answer.block.num_draft_tokens)
        self.meter.answered(answer.timing.queue_us)
        stream = self.routes.stream_of(running.command.session)
        if stream is not None:
            stream.send(session.answer)

    def _drafted(self, running: _Running) -> Drafted:
        command, job = running.command, running.job
        now_s = self.clock()
        tokens = tuple(job.tokens[: max(0, job.max_depth)])
        started_s = now_s if running.started_s is None else running.started_s
        return Drafted(
            session=command.session,
            epoch=command.epoch,
            draft_id=command.draft_id,
            block=DraftTree.chain(tokens) if tokens else EMPTY_BLOCK,
            kv_len=self._method.kv_len(command.session),
            confidences=tuple(job.confidences[: len(tokens)]),
            method=job.method,
            timing=Timing(
                queue_us=int((started_s - running.arrived_s) * _US_PER_S),
                forward_us=int(running.forward_s * _US_PER_S),
                total_us=int((now_s - running.arrived_s) * _US_PER_S),
                batch_sessions=running.batch_sessions,
                batch_tokens=running.batch_sessions,
            ),
            draft_probs=tuple(job.draft_probs[: len(tokens)]),
        )

    # --- passes -----------------------------------------------------------------------------------------------------

    def pass_due(self) -> bool:
        """Whether a job is on its way."""
        return bool(self._due)

    def run_pass(self) -> _Step:
        """One step of every job, in the model's thread."""
        running = tuple(self._due.values())
        started_s = self.clock()
        had = sum(len(entry.job.tokens) for entry in running)
        self._method.advance([entry.job for entry in running])
        num_tokens = sum(len(entry.job.tokens) for entry in running) - had
        return _Step(running, num_tokens, started_s, self.clock())

    def size_of(self, result: _Step) -> PassSize:
        """What the step proposed."""
        return PassSize(len(result.running), result.num_tokens)

    def pass_done(self, result: _Step) -> None:
        """Answers the jobs that are done."""
        for entry in result.running:
            if entry.started_s is None:
                entry.started_s = result.started_s
            entry.forward_s += result.ended_s - result.started_s
            entry.batch_sessions = len(result.running)
            if entry.job.done or len(entry.job.tokens) >= entry.job.max_depth:
                self._answer(self._sessions[entry.command.session])

    def pass_failed(self, error: PacelineError) -> None:
        """Fails the jobs of the step and gives their sessions fresh rows."""
        for name, entry in list(self._due.items()):
            session = self._sessions[name]
            session.running = None
            # A failure does not consume the id: the same draft may be asked for again.
            session.last_id = entry.command.draft_id - 1
            self.count_failure(name, entry.command.epoch, error.code)
            stream = self.routes.stream_of(name)
            if stream is not None:
                stream.send(Failed(name, entry.command.epoch, entry.command.draft_id, error.to_failure()))
            self._method.close(name)
            try:
                self._method.open(name)
            except PacelineError:
                del self._sessions[name]
                self.routes.detach(name)
        self._due.clear()

    # --- sessions ---------------------------------------------------------------------------------------------------

    def epoch_of(self, session: str) -> int | None:
        """Epoch of the session's owner; None when it is not open."""
        held = self._sessions.get(session)
        return None if held is None else held.epoch

    def sessions(self) -> list[str]:
        """Names of all sessions."""
        return list(self._sessions)

    def drop_session(self, session: str, reason: PacelineError) -> None:
        """Answers the session's job with what it has and frees its rows."""
        self._supersede(self._sessions[session])
        del self._sessions[session]
        self._method.close(session)

    @property
    def num_working(self) -> int:
        """Sessions with a draft on its way."""
        return len(self._due)

    def kv_usage(self) -> KvUsage:
        """Room that the method's sessions take; none where it keeps no rows."""
        return self._method.kv_usage() if isinstance(self._method, HoldsRows) else KvUsage()

    def check_integrity(self) -> None:
        """Raises RuntimeError when the tables contradict one another; runs the method's own check if it has one."""
        running = {name for name, session in self._sessions.items() if session.running is not None}
        if running != set(self._due):
            raise RuntimeError(f"running drafts {sorted(running)} but due {sorted(self._due)}")
        if len(self.routes) != len(self._sessions):
            raise RuntimeError(f"{len(self.routes)} routes for {len(self._sessions)} sessions")
        if isinstance(self._method, SelfChecking):
            self._method.check_integrity()
