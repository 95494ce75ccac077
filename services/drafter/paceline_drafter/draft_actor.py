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
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

from paceline.drafting.method import DraftJob, DraftMethod, DraftsAtOnce, SelfChecking
from paceline.errors import Fenced, InvalidArgument, NotFound, PacelineError
from paceline.kv_usage import HoldsRows, KvUsage
from paceline.messages import (
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    Evicted,
    Failed,
    Features,
    NeedTokens,
    Open,
    Opened,
    Timing,
)
from paceline.pass_size import PassSize
from paceline.runtime.letters import Letter
from paceline.runtime.replica_actor import ActorLimits, ReplicaActor
from paceline.runtime.tallies import CounterTallies
from paceline.text.validation import validate_sampling
from paceline.token_log import TokenLog, common_prefix_len
from paceline_drafter.draft_limits import DraftLimits
from paceline_drafter.draft_session import DraftSession, DraftStep, RunningDraft
from paceline_drafter.foresight import Foresight
from paceline_drafter.proposal import proposal_of

if TYPE_CHECKING:
    from paceline_drafter.feature_store import FeatureStore

_US_PER_S = 1_000_000
_ANY_ID = 2**31
NOBODY = "none"
"""In place of the method where a draft proposes nothing."""


class DraftActor(ReplicaActor[DrafterCommand, DrafterEvent, DraftStep]):
    """The owner of the draft sessions.

    Args:
        method: the drafting method; used from the actor's thread and, between steps, from its loop.
        draft_limits: what a draft may ask for.
        limits: bounds of the actor.
        clock: monotonic seconds.
        features: where features of the target are kept, for a method that builds on them; None for any other.
        num_outcomes: outcomes of a block that a session's next draft is prepared for, while it is judged.
    """

    def __init__(
        self,
        method: DraftMethod,
        draft_limits: DraftLimits,
        limits: ActorLimits,
        clock: Callable[[], float] = time.monotonic,
        features: FeatureStore | None = None,
        num_outcomes: int = 0,
    ) -> None:
        super().__init__("draft actor", limits, clock)
        self._method = method
        self._draft_limits = draft_limits
        self._features = features
        self._foresight = Foresight(method, num_outcomes)
        self._sessions: dict[str, DraftSession] = {}
        self._due: dict[str, RunningDraft] = {}
        self._uncounted: list[Drafted] = []
        registry = self.meter.registry
        self._num_drafts = CounterTallies(registry, "paceline_drafts", "Drafts that were answered.", ["method"])
        self._num_draft_tokens = CounterTallies(
            registry, "paceline_draft_tokens", "Tokens that were proposed.", ["method"]
        )
        self._num_foreseen_tokens = Counter(
            "paceline_foreseen_draft_tokens",
            "Tokens of drafts that were there when they were asked for, prepared for that outcome.",
            registry=registry,
        )
        short_starts = Counter(
            "paceline_feature_short_starts",
            "How often a session went on without the target's features of its earlier tokens.",
            registry=registry,
        )
        held = Gauge("paceline_feature_bytes", "Memory of the target's features that are held.", registry=registry)
        if features is not None:
            features.on_short_start = short_starts.inc
            held.set_function(lambda: features.num_bytes)
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
        self._draft_limits.check_len(len(command.tokens), "tokens")
        self._draft_limits.check_ids(command.tokens, "tokens")
        self._check_method(command.method)
        validate_sampling(command.sampling, vocab_size=self._draft_limits.vocab_size or _ANY_ID)
        session = self._sessions.get(command.session)
        if session is not None:
            self.check_epoch(command)
            self._supersede(session)
            self._foresight.forget(command.session)  # what is prepared is the request's before
            if command.epoch > session.epoch:
                session.last_id, session.answer = 0, None
            if self._features is not None:
                agreed = common_prefix_len(session.log.tokens, command.tokens)
                self._features.of(command.session).crop(agreed)
            session.epoch, session.opened, session.log = command.epoch, command, TokenLog(command.tokens)
        else:
            self.check_room()
            self._method.open(command.session)
            self._sessions[command.session] = DraftSession(command.epoch, command, TokenLog(command.tokens))
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
        self._draft_limits.check_len(command.base_len, "catch_up" if command.catch_up else "base_len")
        self._draft_limits.check_len(command.base_len + len(command.assumed), "assumed")
        self._draft_limits.check_ids(command.assumed, "assumed")
        self._draft_limits.check_ids(command.catch_up, "catch_up")
        have_len = self._follow(session, command)
        if have_len is not None:
            letter.stream.send(NeedTokens(command.session, command.epoch, command.draft_id, have_len))
            return
        session.last_id, session.answer = command.draft_id, None
        self._start(session, command, letter.arrived_s)

    def _follow(self, session: DraftSession, command: Draft) -> int | None:
        """Brings the session's tokens to the command's base; features of tokens that turn out to be others go.

        Returns:
            None, or the length up to which the session agrees although the command brings too few tokens.
        """
        start = command.base_len - len(command.catch_up)
        known = session.log.slice(start, command.base_len)
        num_agreed = common_prefix_len(known, command.catch_up)
        have_len = session.log.reconcile(command.base_len, command.prefix_hash, command.catch_up)
        if have_len is None and self._features is not None:
            true_len = start + num_agreed if num_agreed < len(known) else command.base_len - 1
            self._features.of(command.session).crop(true_len)
            if command.features is not None:
                self._features.add(command.session, command.features, starts_short=command.starts_short, busy=self._due)
        return have_len

    async def write_features(self, session: str, epoch: int, features: Features) -> int:
        """Takes in features that came beside the stream.

        Args:
            session: whose.
            epoch: of its owner.
            features: rows that follow those that the session has.

        Returns:
            The session has rows up to here.

        Raises:
            NotFound: the session is not open.
            Fenced: another epoch owns it.
            PacelineError: they cannot be taken; says why.
        """

        def write() -> int:
            held = self._sessions.get(session)
            if held is None:
                raise NotFound(f"session {session} is not open on this drafter; open it first", field="session")
            if held.epoch != epoch:
                raise Fenced(f"epoch {held.epoch} owns session {session}, not {epoch}", field="epoch")
            if self._features is None:
                raise InvalidArgument("this drafter builds on no features; send it none", field="features")
            return self._features.add(session, features, busy=self._due).num_rows

        return await self.between_passes(write, len(features.data))

    def _start(self, session: DraftSession, command: Draft, arrived_s: float) -> None:
        depth = min(command.max_depth, self._draft_limits.max_draft_tokens)
        if self._draft_limits.max_model_len is not None:
            depth = min(depth, self._draft_limits.max_model_len - len(session.log) - len(command.assumed))
        # A job that the method never sees needs no context, which may be far longer than the method's.
        context = [*session.log.tokens, *command.assumed] if depth > 0 else ()
        opened = session.opened
        job = DraftJob(
            command.session,
            context,
            depth,
            opened.sampling,
            opened.generation_start,
            opened.method,
            opened.rule,
            features=None if self._features is None else self._features.rows(command.session, command.base_len - 1),
        )
        session.running = RunningDraft(command, job, arrived_s)
        if num_foreseen := self._foresight.begin(job, command.base_len):
            self._num_foreseen_tokens.inc(num_foreseen)
        if len(job.tokens) >= depth:
            self._answer(session)
        else:
            self._due[command.session] = session.running

    def _check_method(self, method: str) -> None:
        offered = self._method.info.methods
        if method and method not in offered:
            raise InvalidArgument(
                f"this drafter does not draft by method {method!r}; it offers {', '.join(offered)}", field="method"
            )

    # --- answers ----------------------------------------------------------------------------------------------------

    def _supersede(self, session: DraftSession) -> None:
        if session.running is not None:
            self._answer(session)

    def _answer(self, session: DraftSession) -> None:
        running = session.running
        if running is None:
            return
        session.running = None
        self._due.pop(running.command.session, None)
        session.answer = answer = self._drafted(running)
        self._uncounted.append(answer)
        stream = self.routes.stream_of(running.command.session)
        if stream is not None:
            stream.send(answer)

    def count_answers(self) -> None:
        """Counts drafts by method."""
        for answer in self._uncounted:
            method = answer.method if answer.block.tokens else NOBODY
            self._num_drafts.labels(method).inc()
            self._num_draft_tokens.labels(method).inc(answer.block.num_draft_tokens)
            self.meter.answered(answer.timing.queue_us)
        self._uncounted.clear()

    def _drafted(self, running: RunningDraft) -> Drafted:
        command, job = running.command, running.job
        now_s = self.clock()
        block, confidences, draft_probs = proposal_of(job)
        started_s = now_s if running.started_s is None else running.started_s
        return Drafted(
            session=command.session,
            epoch=command.epoch,
            draft_id=command.draft_id,
            block=block,
            kv_len=self._method.kv_len(command.session),
            confidences=confidences,
            method=job.method,
            timing=Timing(
                queue_us=int((started_s - running.arrived_s) * _US_PER_S),
                forward_us=int(running.forward_s * _US_PER_S),
                total_us=int((now_s - running.arrived_s) * _US_PER_S),
                batch_sessions=running.batch_sessions,
                batch_tokens=running.batch_sessions,
            ),
            draft_probs=draft_probs,
            features_len=0 if self._features is None else self._features.of(command.session).num_rows,
        )

    # --- passes -----------------------------------------------------------------------------------------------------

    def pass_due(self) -> bool:
        """Whether a job is on its way."""
        return bool(self._due)

    def run_pass(self) -> DraftStep:
        """One step of every job, or all steps of one that is alone; in the model's thread."""
        running = tuple(self._due.values())
        started_s = self.clock()
        had = sum(len(entry.job.tokens) for entry in running)
        jobs = [entry.job for entry in running]
        if not self._drafts_at_once(running[0]):
            self._method.advance([*jobs, *self._foresight.beside(jobs)])
        num_tokens = sum(len(entry.job.tokens) for entry in running) - had
        over = tuple([entry for entry in running if entry.is_over])
        return DraftStep(running, over, num_tokens, started_s, self.clock())

    def _drafts_at_once(self, entry: RunningDraft) -> bool:
        """Drafts what the only session waits for. Who comes meanwhile, or gives it up as late, waits for its end."""
        if len(self._sessions) > 1 or entry.command.assumed or not isinstance(self._method, DraftsAtOnce):
            return False
        return self._method.draft_at_once(entry.job)

    def pass_goes_on(self, result: DraftStep) -> bool:
        """Whether every job of the step goes on."""
        return not result.over

    def size_of(self, result: DraftStep) -> PassSize:
        """What the step proposed."""
        return PassSize(len(result.running), result.num_tokens)

    def pass_done(self, result: DraftStep) -> None:
        """Answers the jobs that are done."""
        for entry in result.running:
            if entry.started_s is None:
                entry.started_s = result.started_s
            entry.forward_s += result.ended_s - result.started_s
            entry.num_steps += 1
            entry.num_shared += len(result.running)
        for entry in result.over:
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
            self._foresight.forget(name)
            self._method.close(name)
            try:
                self._method.open(name)
            except PacelineError:
                del self._sessions[name]
                self._forget_features(name)
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
        self._forget_features(session)
        self._foresight.forget(session)
        self._method.close(session)

    def _forget_features(self, session: str) -> None:
        if self._features is not None:
            self._features.forget(session)

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
