"""The target: sessions, their key/value rows, and ragged passes that judge blocks.

Ranges of a session with committed length L (pending token included) at rest:

| range | what |
|---|---|
| tokens [0, L) | committed, in `TokenLog` |
| rows [0, L - 1) | computed; fewer before the first pass and after a command that cropped |
| rows [rows, L - 1) | missing: fed in chunks before the block |
| row L - 1 and below it the tree | what a verify pass writes; the accepted path stays |

`submit` brings tokens and rows to the command's base; `step` runs one pass over submitted work, as much of it as the
scheduler (`scheduler.py`) puts into it. A session may lose its rows to others between two passes; its tokens stay, so
its next work computes them again. The engine knows no epochs' order, no rounds and no streams: the verify actor does.
Used from one thread at a time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from paceline.engine.admission import Admission
from paceline.engine.blocks import cut_block
from paceline.engine.judging import Judging, Verdict
from paceline.engine.next_blocks import NextBlocks, SelfDraftStats
from paceline.engine.runner import ModelRunner
from paceline.engine.scheduler import Scheduler, SchedulerOptions, SchedulerStats
from paceline.engine.self_draft import SelfDrafter
from paceline.engine.served_features import ServedFeatures
from paceline.engine.target_checks import CommandChecks, check_target
from paceline.engine.target_session import NO_NEXT_BLOCK, Entry, Session, Work, failed
from paceline.engine.wants import Part, Plan, Want
from paceline.errors import InvalidArgument, ModelError, NotFound, PacelineError
from paceline.kv_usage import KvUsage
from paceline.messages import Evicted, Failed, Features, NeedTokens, Open, Opened, Verified, Verify
from paceline.pass_size import PassSize
from paceline.token_log import TokenLog, common_prefix_len


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Limits of a target engine.

    Attributes:
        max_sessions: open sessions.
        max_batch_tokens: tokens fed in one pass.
        max_draft_tokens: draft tokens of one block; what is beyond is cut.
        prefill_share: part of a pass that chunks of missing rows get at least while there are any.
        idle_preempt_s: a session without work for so long may lose its rows to any other.
    """

    max_sessions: int = 64
    max_batch_tokens: int = 512
    max_draft_tokens: int = 32
    prefill_share: float = 0.25
    idle_preempt_s: float = 1.0


class TargetEngine:
    """Serves sessions of one target model.

    Args:
        runner: the model with its pool.
        eos_token_ids: ids that min_tokens masks.
        vocab_size: number of real token ids; None for all columns of the model's head.
        options: limits.
        clock: monotonic seconds.
        self_drafter: makes the next block of every session that was judged and asks for one; None for nobody.
        served: features that go to drafters elsewhere; None for none.

    Raises:
        ConfigurationError: the weights are quantised, a block would not fit in a pass, or a pass has no room for blocks
            and chunks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,
        options: TargetOptions = TargetOptions(),
        clock: Callable[[], float] = time.monotonic,
        self_drafter: SelfDrafter | None = None,
        served: ServedFeatures | None = None,
    ) -> None:
        check_target(runner.info, options.max_batch_tokens, options.max_draft_tokens)
        self.options = options
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._vocab_size = min(vocab_size or runner.info.vocab_size, runner.info.vocab_size)
        self._max_model_len = runner.info.max_model_len
        self._checks = CommandChecks(self._vocab_size, self._max_model_len, runner.pool.capacity_tokens)
        self._clock = clock
        self._scheduler = Scheduler(
            runner.pool,
            SchedulerOptions(options.max_batch_tokens, options.prefill_share, options.idle_preempt_s),
            clock,
        )
        self._admission = Admission(self._scheduler, runner, options.max_sessions)
        self._next_blocks = NextBlocks(
            self_drafter, runner, vocab_size=self._vocab_size, max_draft_tokens=options.max_draft_tokens
        )
        self._served = served
        self._sessions: dict[str, Session] = {}
        self._queue: dict[str, None] = {}  # sessions with work, in order of submission
        self._last_pass = PassSize()
        self._num_blocked = 0
        self._stuck_until_s = -math.inf

    # --- facts ----------------------------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """Number of real token ids."""
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        """Most tokens of a session."""
        return self._max_model_len

    @property
    def num_sessions(self) -> int:
        """Open sessions."""
        return len(self._sessions)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do."""
        return bool(self._queue)

    @property
    def num_working(self) -> int:
        """Sessions with work that is not done."""
        return len(self._queue)

    @property
    def num_blocked(self) -> int:
        """Of those, sessions for which the newest pass had no pages."""
        return self._num_blocked

    @property
    def stuck_s(self) -> float:
        """For how long `step` can do nothing unless a command comes: all work waits for pages of idle sessions."""
        return max(0.0, self._stuck_until_s - self._clock())

    @property
    def scheduling(self) -> SchedulerStats:
        """Preemptions and prefix hits so far; may be asked from any thread."""
        return self._scheduler.stats

    @property
    def self_drafting(self) -> SelfDraftStats:
        """Blocks proposed with verdicts so far; may be asked from any thread."""
        return self._next_blocks.stats

    @property
    def last_pass(self) -> PassSize:
        """Size of the newest pass."""
        return self._last_pass

    @property
    def kv_usage(self) -> KvUsage:
        """Room of the pool that is taken; may be asked from any thread."""
        return self._runner.pool.usage

    @property
    def kv_pages_in_use(self) -> int:
        """Pages that sessions hold."""
        return self._runner.pool.pages_in_use

    def kv_len(self, session: str) -> int | None:
        """Rows of one session; None when it is not open."""
        held = self._sessions.get(session)
        return None if held is None else held.kv.num_rows

    def features(self, session: str, first_row: int, num_rows: int) -> Features:
        """Features of a session's rows [first_row, first_row + num_rows), from the first on as many as a message holds.

        Raises:
            NotFound: it is not open.
            InvalidArgument: it has no such rows now, or this engine serves no features.
        """
        held = self._sessions.get(session)
        if held is None:
            raise NotFound(f"session {session} is not open on this verifier; open it first", field="session")
        if self._served is None:
            raise InvalidArgument("this verifier serves no features", field="first_row")
        return self._served.read(held.kv, first_row, num_rows)

    # --- commands -------------------------------------------------------------------------------------------------

    def open(self, command: Open) -> Opened:
        """Registers a session; costs no pass. One of that name is replaced, and keeps the rows of the common prefix.

        A prefix that other sessions have computed is attached at once.

        Raises:
            CapacityExceeded: all session slots are taken, or the tokens of all sessions need more pages than there are.
            InvalidArgument: the prompt cannot be served.
        """
        self._checks.check_open(command)
        held = self._sessions.get(command.session)
        log = TokenLog(command.tokens)
        if held is None:
            holder = self._admission.admit(command.tokens, list(self._sessions.values()))
        else:
            holder = held.holder
            holder.kv.rollback(min(common_prefix_len(held.log.tokens, log.tokens), len(log) - 1))
            self._scheduler.adopt(holder, log.tokens)
            self._queue.pop(command.session, None)
            self._next_blocks.forget(command.session)
        self._sessions[command.session] = Session(
            command.epoch, log, holder, command.sampling, command.generation_start, command.rule
        )
        self._changed()
        num_rows = holder.kv.num_rows
        return Opened(command.session, command.epoch, kv_len=num_rows, cached_len=num_rows)

    def submit(self, command: Verify) -> NeedTokens | Evicted | Failed | None:
        """Queues one block for the next passes, after bringing the session's tokens and rows to its base.

        A command that is still queued for the session is replaced.

        Returns:
            None when it is queued; otherwise the answer that ends the command now.
        """
        session = self._sessions.get(command.session)
        if session is None:
            return Evicted(command.session, command.epoch, command.round)
        try:
            self._checks.check_verify(command, session.rule)
        except PacelineError as error:
            return failed(command, error)
        start = command.base_len - len(command.catch_up)
        # Rows stay true up to where catch_up says something else than the log did.
        true_len = start + common_prefix_len(session.log.slice(start, command.base_len), command.catch_up)
        have_len = session.log.reconcile(command.base_len, command.prefix_hash, command.catch_up)
        if have_len is not None:
            return NeedTokens(command.session, command.epoch, command.round, have_len)
        if command.catch_up:
            session.kv.rollback(true_len)
        session.kv.rollback(command.base_len - 1)
        cut = cut_block(
            command.block,
            vocab_size=self._vocab_size,
            max_nodes=self.options.max_draft_tokens,
            max_depth=self._max_model_len - command.base_len - 1,
        )
        session.work = Work(command, cut, time.monotonic_ns())
        if command.session in self._queue:
            del self._queue[command.session]
        else:
            self._num_blocked += session.holder.blocked
        self._queue[command.session] = None
        self._stuck_until_s = -math.inf
        return None

    def close(self, session: str) -> bool:
        """Forgets a session and frees its rows; False when it was not open."""
        held = self._sessions.pop(session, None)
        self._queue.pop(session, None)
        if held is None:
            return False
        self._scheduler.forget(held.holder)
        self._next_blocks.forget(session)
        self._changed()
        return True

    # --- passes ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Verified | Failed]:
        """Runs one pass over queued work; the answers of the blocks that it judged or could not serve."""
        entries = self._entries()
        plan = self._plan([entry.want for entry in entries])
        parts = plan.parts
        self._last_pass = PassSize(len(parts), sum(part.sequence.num_tokens for part in parts))
        self._changed()
        if not parts:
            self._stuck_until_s = self._clock() + plan.retry_in_s
            return []
        started_ns = time.monotonic_ns()
        for part in parts:
            work = entries[part.index].work
            work.started_ns = work.started_ns or started_ns
        results = self._forward(parts)
        asked = [
            (entries[part.index], part, result)
            for part, result in zip(parts, results, strict=True)
            if part.complete and not isinstance(result, ModelError)
        ]
        judging = self._judging(asked)  # while the device works
        self._runner.synchronize()
        forward_ns = time.monotonic_ns() - started_ns
        answers: list[Verified | Failed] = []
        for part, result in zip(parts, results, strict=True):
            entry = entries[part.index]
            entry.work.forward_ns += forward_ns
            if isinstance(result, ModelError):
                answers.append(self._fail(entry, result))
            elif not part.complete:
                self._keep(entry.session, part)
        return answers + self._answers([(entry, part) for entry, part, _ in asked], judging.verdicts())

    def check_integrity(self) -> None:
        """Checks the pool and the session table.

        Raises:
            AssertionError: says what is wrong.
        """
        self._runner.pool.check_integrity()
        for name, session in self._sessions.items():
            if session.missing_rows < 0:
                raise AssertionError(f"{name}: {session.kv.num_rows} rows for {len(session.log)} tokens")
            if (session.work is not None) != (name in self._queue):
                raise AssertionError(f"{name}: work and queue disagree")
        if not self._queue.keys() <= self._sessions.keys():
            raise AssertionError("the queue names a session that is not open")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _changed(self) -> None:
        """Commands or passes have changed what waits."""
        self._stuck_until_s = -math.inf
        self._num_blocked = sum(self._sessions[name].holder.blocked for name in self._queue)

    def _entries(self) -> list[Entry]:
        entries: list[Entry] = []
        for name in self._queue:
            session = self._sessions[name]
            if session.work is not None:
                want = Want(session.holder, session.log.tokens, session.work.cut.tree)
                entries.append(Entry(session, session.work, want))
        return entries

    def _forward(self, parts: Sequence[Part]) -> list[torch.Tensor | ModelError]:
        """Hands the pass over; if it breaks, each part alone, so that one session's poison hurts no other."""
        try:
            return list(self._runner.forward([part.sequence for part in parts], wait=False))
        except Exception as error:
            if len(parts) == 1:
                return [ModelError(f"the forward pass failed: {type(error).__name__}: {error}")]
        return [result for part in parts for result in self._forward([part])]

    def _plan(self, wants: Sequence[Want]) -> Plan:
        """The next pass; the self-drafter forgets whoever loses rows for it."""
        preemptions = self._scheduler.stats.preemptions
        plan = self._scheduler.plan(wants)
        if self._scheduler.stats.preemptions > preemptions:
            for name, session in self._sessions.items():
                if not session.kv.num_rows:
                    self._next_blocks.forget(name)
        return plan

    def _judging(self, asked: Sequence[tuple[Entry, Part, torch.Tensor]]) -> Judging:
        """The blocks that a pass sees, ready to be judged."""
        return Judging(
            [
                entry.judge_request(part.sequence.tree, logits, self._vocab_size, self._eos_token_ids)
                for entry, part, logits in asked
            ]
        )

    def _answers(
        self, judged: Sequence[tuple[Entry, Part]], verdicts: Sequence[Verdict | PacelineError]
    ) -> list[Verified | Failed]:
        """Answers commands whose blocks a pass has seen, with the next blocks of those that want one."""
        outcomes = [(entry, part, verdict) for (entry, part), verdict in zip(judged, verdicts, strict=True)]
        for entry, part, verdict in outcomes:
            if isinstance(verdict, Verdict):
                self._keep(entry.session, part, verdict)
                self._done(entry.session, entry.work)
        blocks = self._next_blocks.draft(
            [(entry.session, entry.work) for entry, _, verdict in outcomes if isinstance(verdict, Verdict)]
        )
        return [
            entry.work.verified(
                verdict,
                entry.session.kv.num_rows,
                self._last_pass,
                blocks.get(entry.work.command.session, NO_NEXT_BLOCK),
                self._served.along(entry.work.command, entry.session.kv, len(outcomes)) if self._served else None,
            )
            if isinstance(verdict, Verdict)
            else self._fail(entry, verdict)
            for entry, _, verdict in outcomes
        ]

    def _keep(self, session: Session, part: Part, verdict: Verdict | None = None) -> None:
        """Makes rows and tokens of a pass part of the session, and lets others find the rows."""
        session.kv.commit(len(part.sequence.tokens), () if verdict is None else verdict.accepted_path)
        session.log.extend(() if verdict is None else verdict.tokens)
        session.kv.publish(session.log.tokens)

    def _fail(self, entry: Entry, error: PacelineError) -> Failed:
        """Ends one command with an error. After a fault of the model nobody can vouch for the session's rows."""
        if isinstance(error, ModelError):
            entry.session.kv.discard()
            self._next_blocks.forget(entry.work.command.session)
        else:
            entry.session.kv.commit(0)
        self._done(entry.session, entry.work)
        return failed(entry.work.command, error)

    def _done(self, session: Session, work: Work) -> None:
        session.work = None
        self._queue.pop(work.command.session, None)
