"""The verify actor: owns the target engine and decides which command counts.

| told | decides |
|---|---|
| `Open` | a new session, the same one again (nothing changes), or a take-over by a newer epoch |
| `Verify` | by epoch: fenced, or a take-over; by round: replay, drop, run, or keep until the round it follows is over |
| `Close` | (decided by the base) the session is gone; its open verify is answered with a failure |
| a pass is done | verdicts are kept for replay and sent |

Within an epoch, with `last` the newest answered round: the same round again gets the same answer, an older one is
dropped, a newer one runs. `NeedTokens`, `Evicted` and `Failed` do not consume the round. A verdict goes to the newest
stream that spoke for the session.

A follow-up waits for the verdict that it counts on, and runs if that comes. It is noted while the pass of that verdict
runs, and with the end of the pass it is at the engine or refused. Its gateway may not have that verdict yet, if a link
broke: so that is kept for replay too. It may even have forgotten the follow-up: a newer round takes its place.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

from paceline.engine.gather import GatherWindow
from paceline.engine.target import TargetEngine
from paceline.errors import Cancelled, Fenced, InvalidArgument, PacelineError
from paceline.kv_usage import KvUsage
from paceline.messages import (
    Evicted,
    Failed,
    Features,
    NeedTokens,
    Open,
    Opened,
    Timing,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.pass_size import PassSize
from paceline.runtime.letters import Letter
from paceline.runtime.replica_actor import ActorLimits, ReplicaActor
from paceline.runtime.tallies import CounterTallies
from paceline.text.validation import validate_sampling
from paceline_verifier.scheduling_counters import SchedulingCounters
from paceline_verifier.self_draft_counters import SelfDraftCounters

_US_PER_S = 1_000_000
_MAX_MESSAGES_AT_ONCE = 8
"""Of features that are read between two passes; as many wait for a slow reader at most."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A verify that the engine has."""

    command: Verify
    arrived_s: float
    submitted_s: float


@dataclass(slots=True)
class _Session:
    """What the actor knows of a session; tokens and rows are the engine's.

    Attributes:
        opened: the command that opened it.
        epoch: of its owner; newer than `opened.epoch` after a take-over by `Verify`.
        last_round: newest answered round of the epoch; 0 before the first.
        answered_s: when it was answered.
        answer: the verdict on `last_round`, for replay.
        followed: the verdict before it, if `last_round` followed that one up.
        running: the verify on its way.
        follow_up: counts on its verdict.
    """

    opened: Open
    epoch: int
    last_round: int = 0
    answered_s: float = 0.0
    answer: Verified | None = None
    followed: Verified | None = None
    running: _Running | None = None
    follow_up: Verify | None = None


class VerifyActor(ReplicaActor[VerifierCommand, VerifierEvent, list[Verified | Failed]]):
    """The owner of the target engine.

    Args:
        engine: used from the actor's thread and, between passes, from its loop.
        limits: bounds of the actor.
        clock: monotonic seconds.
        gather_window_s: how long a pass may wait for sessions that were answered a moment ago; 0: not at all.
    """

    def __init__(
        self,
        engine: TargetEngine,
        limits: ActorLimits,
        clock: Callable[[], float] = time.monotonic,
        gather_window_s: float = 0.0,
    ) -> None:
        super().__init__("verify actor", limits, clock)
        self._engine = engine
        self._sessions: dict[str, _Session] = {}
        self._uncounted: list[Verified] = []
        self._gather = GatherWindow(gather_window_s, clock)
        self._scheduling = SchedulingCounters(self.meter.registry)
        self._self_drafting = SelfDraftCounters(self.meter.registry)
        self._num_tokens = CounterTallies(
            self.meter.registry,
            "paceline_verified_tokens",
            "Tokens that verdicts gave: the accepted drafts and one more each.",
        ).labels()

    # --- commands ---------------------------------------------------------------------------------------------------

    def apply(self, letter: Letter[VerifierCommand, VerifierEvent]) -> None:
        """Applies one command.

        Raises:
            PacelineError: it is refused.
        """
        match letter.command:
            case Verify():
                self._verify(letter, letter.command)
            case Open():
                self._open(letter, letter.command)

    def is_note(self, command: VerifierCommand) -> bool:
        """Whether it is a follow-up of the round that runs, in its epoch: it becomes part of the session's state."""
        session = self._sessions.get(command.session)
        return (
            isinstance(command, Verify)
            and session is not None
            and session.running is not None
            and command.epoch == session.epoch
            and command.follows == session.running.command.round
        )

    def _open(self, letter: Letter[VerifierCommand, VerifierEvent], command: Open) -> None:
        session = self._sessions.get(command.session)
        if session is None:
            self.check_room()
        else:
            self.check_epoch(command)
            if command == session.opened and command.epoch == session.epoch:
                # Sent again because a link broke: what has been computed since stays.
                self.routes.attach(command.session, letter.stream)
                kv_len = self._engine.kv_len(command.session) or 0
                letter.stream.send(Opened(command.session, command.epoch, kv_len, kv_len))
                return
        validate_sampling(command.sampling, vocab_size=self._engine.vocab_size)
        opened = self._engine.open(command)
        if session is not None:
            self._end_running(session, Fenced(f"epoch {command.epoch} has taken the session over", field="epoch"))
        self._sessions[command.session] = _Session(command, command.epoch)
        self.routes.attach(command.session, letter.stream)
        letter.stream.send(opened)

    def _verify(self, letter: Letter[VerifierCommand, VerifierEvent], command: Verify) -> None:
        session = self._sessions.get(command.session)
        if session is None:
            letter.stream.send(Evicted(command.session, command.epoch, command.round))
            return
        self.check_epoch(command)
        if command.epoch > session.epoch:
            self._end_running(session, Fenced(f"epoch {command.epoch} has taken the session over", field="epoch"))
            session.epoch, session.last_round, session.answer, session.followed = command.epoch, 0, None, None
        self.routes.attach(command.session, letter.stream)
        if session.running is not None:
            running = session.running.command
            if command.round <= running.round:
                self._replay(session, command)  # of the running round again the answer is on its way
                return
            if command.follows == running.round:
                if session.follow_up is not None and session.follow_up.round != command.round:
                    self._refuse_follow_up(session)
                session.follow_up = command
                return
            if not running.follows:
                raise InvalidArgument(
                    f"round {command.round} came while round {running.round} runs; wait for its answer", field="round"
                )
            self._end_running(session, Cancelled(f"round {command.round} has come instead"))
        if command.round <= session.last_round:
            self._replay(session, command)
            return
        self._judge(session, command, letter.arrived_s)

    def _replay(self, session: _Session, command: Verify) -> None:
        for verdict in (session.answer, session.followed):
            if verdict is not None and verdict.round == command.round:
                self._send(verdict)

    def _judge(self, session: _Session, command: Verify, arrived_s: float) -> None:
        """Hands a block to the engine, unless it counts on another answer than the newest."""
        if command.follows and not _comes_true(command, session.answer):
            self._send(_need_tokens(command))
            return
        answer = self._engine.submit(command)
        if answer is None:
            if command.follows:
                self._gather.stays(command.session)
                # If it came during the pass of the round before it waited for that, not for a pass of its own.
                arrived_s = max(arrived_s, session.answered_s)
            else:
                self._gather.returned(command.session, arrived_s)
            session.running = _Running(command, arrived_s, self.clock())
        else:
            self._send(answer)

    def _refuse_follow_up(self, session: _Session) -> None:
        if session.follow_up is not None:
            command, session.follow_up = session.follow_up, None
            self._send(_need_tokens(command))

    async def read_features(self, session: str, epoch: int, first_row: int, num_rows: int) -> list[Features]:
        """Features of rows [first_row, first_row + num_rows), from the first on as many as a few messages hold.

        A message at a time would wait for a pass each, and the session's rounds go on plainly until it has all.

        Raises:
            NotFound: the session is not open.
            Fenced: another epoch owns it.
            PacelineError: the rows cannot be read; says why.
        """

        def read() -> list[Features]:
            held = self._sessions.get(session)
            if held is not None and held.epoch != epoch:
                raise Fenced(f"epoch {held.epoch} owns session {session}, not {epoch}", field="epoch")
            messages = [self._engine.features(session, first_row, num_rows)]
            stop = first_row + num_rows
            while messages[-1].end < stop and len(messages) < _MAX_MESSAGES_AT_ONCE:
                next_row = messages[-1].end
                messages.append(self._engine.features(session, next_row, stop - next_row))
            return messages

        return await self.between_passes(read)

    def _end_running(self, session: _Session, reason: PacelineError) -> None:
        """Answers the open verify with a failure; should the engine still judge it, the verdict is dropped."""
        if session.running is None:
            return
        command, session.running = session.running.command, None
        failed = Failed(command.session, command.epoch, command.round, reason.to_failure())
        if command.follows:
            self._tell(failed)  # no failure to be counted: it is usual that nobody waits for it any more
        else:
            self._send(failed)
        self._refuse_follow_up(session)

    def _send(self, event: Verified | Failed | NeedTokens | Evicted) -> None:
        if isinstance(event, Failed):
            self.count_failure(event.session, event.epoch, event.failure.code)
        self._tell(event)

    def _tell(self, event: Verified | Failed | NeedTokens | Evicted) -> None:
        stream = self.routes.stream_of(event.session)
        if stream is not None:
            stream.send(event)

    # --- passes -----------------------------------------------------------------------------------------------------

    def pass_due(self) -> bool:
        """Whether a verify waits or is in the middle of its prompt."""
        return self._engine.has_work

    def pass_delay_s(self) -> float:
        """Until sessions are back that will be soon, or until one may lose its rows to those that wait for pages."""
        return max(self._gather.delay_s(self.num_working), self._engine.stuck_s)

    def run_pass(self) -> list[Verified | Failed]:
        """One pass of the engine, in the model's thread."""
        started_s = self.clock()
        answers = self._engine.step()
        size = self._engine.last_pass
        self._gather.pass_took(self.clock() - started_s, size.num_sessions, size.num_tokens)
        return answers

    def size_of(self, result: list[Verified | Failed]) -> PassSize:
        """What the pass fed."""
        return self._engine.last_pass

    def pass_done(self, result: list[Verified | Failed]) -> None:
        """Keeps and sends the verdicts; one whose command was taken back or taken over is dropped."""
        now_s = self.clock()
        for answer in result:
            session = self._sessions.get(answer.session)
            running = None if session is None else session.running
            command_id = answer.round if isinstance(answer, Verified) else answer.command_id
            if session is None or running is None:
                continue
            if (running.command.epoch, running.command.round) != (answer.epoch, command_id):
                continue
            session.running = None
            if isinstance(answer, Verified):
                answer = _with_arrival(answer, running, now_s)
                session.followed = session.answer if running.command.follows else None
                session.last_round, session.answered_s, session.answer = answer.round, now_s, answer
                self._uncounted.append(answer)
            self._send(answer)
            self._go_on(session, answer.session, now_s)

    def _go_on(self, session: _Session, name: str, now_s: float) -> None:
        """Runs the block that waited for this answer, if this is what it counts on; else the session is away."""
        follow_up, session.follow_up = session.follow_up, None
        stream = self.routes.stream_of(name)
        if follow_up is not None and stream is not None:
            self.guarded(stream, follow_up, lambda: self._judge(session, follow_up, now_s))
        if session.running is None:
            self._gather.answered(name)

    def count_answers(self) -> None:
        """Counts verdicts, and what the engine did for them."""
        self._scheduling.count(self._engine.scheduling)
        self._self_drafting.count(self._engine.self_drafting)
        for answer in self._uncounted:
            self.meter.answered(answer.timing.queue_us)
            self._num_tokens.inc(len(answer.tokens))
        self._uncounted.clear()

    def pass_failed(self, error: PacelineError) -> None:
        """Fails every open verify and gives up its session, whose rows nobody can vouch for; the others go on."""
        for name, session in list(self._sessions.items()):
            if session.running is not None:
                self._end_running(session, error)
                self.close_session(name, error)
        if self._engine.has_work:
            # Work of an owner that was fenced meanwhile: nobody waits for it, but it must not break every pass.
            for name in list(self._sessions):
                self.close_session(name, error)

    # --- sessions ---------------------------------------------------------------------------------------------------

    def epoch_of(self, session: str) -> int | None:
        """Epoch of the session's owner; None when it is not open."""
        held = self._sessions.get(session)
        return None if held is None else held.epoch

    def sessions(self) -> list[str]:
        """Names of all sessions."""
        return list(self._sessions)

    def drop_session(self, session: str, reason: PacelineError) -> None:
        """Answers the session's open verify with the reason and frees its rows."""
        self._end_running(self._sessions[session], reason)
        del self._sessions[session]
        self._gather.forget(session)
        self._engine.close(session)

    @property
    def num_working(self) -> int:
        """Sessions with work in the engine that have pages for it."""
        return self._engine.num_working - self._engine.num_blocked

    @property
    def num_waiting(self) -> int:
        """Commands that wait for the loop, and sessions that wait for pages."""
        return super().num_waiting + self._engine.num_blocked

    def kv_usage(self) -> KvUsage:
        """Pages of the engine's pool that are taken."""
        return self._engine.kv_usage

    def check_integrity(self) -> None:
        """Checks the engine's tables and the actor's own.

        Raises:
            AssertionError: the engine's pool or table is damaged.
            RuntimeError: the actor's table and the engine's or the routes disagree.
        """
        self._engine.check_integrity()
        if not len(self._sessions) == self._engine.num_sessions == len(self.routes):
            raise RuntimeError(
                f"{len(self._sessions)} sessions, {self._engine.num_sessions} in the engine, {len(self.routes)} routes"
            )


def _comes_true(follow_up: Verify, verdict: Verified | None) -> bool:
    """Whether a verdict is the one that a follow-up counts on."""
    return (
        verdict is not None
        and follow_up.follows == verdict.round
        and follow_up.base_len == verdict.base_len + len(verdict.tokens)
        and follow_up.expected == verdict.tokens
    )


def _need_tokens(follow_up: Verify) -> NeedTokens:
    have_len = follow_up.base_len - len(follow_up.expected)
    return NeedTokens(follow_up.session, follow_up.epoch, follow_up.round, have_len)


def _with_arrival(verdict: Verified, running: _Running, now_s: float) -> Verified:
    """The verdict with times that count from the command's arrival."""
    engine = verdict.timing
    timing = Timing(
        queue_us=engine.queue_us + int((running.submitted_s - running.arrived_s) * _US_PER_S),
        forward_us=engine.forward_us,
        total_us=int((now_s - running.arrived_s) * _US_PER_S),
        batch_sessions=engine.batch_sessions,
        batch_tokens=engine.batch_tokens,
        draft_us=engine.draft_us,
    )
    return dataclasses.replace(verdict, timing=timing)
