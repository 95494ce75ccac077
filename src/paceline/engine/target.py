"""The target: sessions, their key/value rows, and ragged passes that judge blocks.

Ranges of a session with committed length L (pending token included) at rest:

| range | what |
|---|---|
| tokens [0, L) | committed, in `TokenLog` |
| rows [0, L - 1) | computed; fewer before the first pass and after a command that cropped |
| rows [rows, L - 1) | missing: fed in chunks before the block |
| row L - 1 and below it the tree | what a verify pass writes; the accepted path stays |

`submit` brings tokens and rows to the command's base; `step` runs one pass over all submitted work: blocks whose rows
are complete first, then chunks of missing rows, each first come first served. The engine knows no epochs' order, no
rounds and no streams: the verify actor does. Used from one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.blocks import EMPTY_CUT, cut_block
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.engine.runner_options import Quantization
from paceline.engine.sampling import JudgeRequest, Verdict, judge
from paceline.engine.target_session import Part, Session, Work
from paceline.errors import CapacityExceeded, ConfigurationError, InvalidArgument, ModelError, PacelineError
from paceline.kv_usage import KvUsage
from paceline.messages import (
    AcceptanceRule,
    Evicted,
    Failed,
    NeedTokens,
    Open,
    Opened,
    Timing,
    Verified,
    Verify,
)
from paceline.pass_size import PassSize
from paceline.token_log import TokenLog, common_prefix_len


@dataclass(frozen=True, slots=True)
class TargetOptions:
    """Limits of a target engine.

    Attributes:
        max_sessions: open sessions.
        max_batch_tokens: tokens fed in one pass.
        max_draft_tokens: draft tokens of one block; what is beyond is cut.
        prefill_share: part of a pass that verify blocks leave to chunks of missing rows when there are any.
    """

    max_sessions: int = 64
    max_batch_tokens: int = 512
    max_draft_tokens: int = 32
    prefill_share: float = 0.25


class TargetEngine:
    """Serves sessions of one target model.

    Args:
        runner: the model with its pool.
        eos_token_ids: ids that min_tokens masks.
        vocab_size: number of real token ids; None for all columns of the model's head.
        options: limits.

    Raises:
        ConfigurationError: a block would not fit in a pass.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        eos_token_ids: tuple[int, ...] = (),
        vocab_size: int | None = None,
        options: TargetOptions = TargetOptions(),
    ) -> None:
        if runner.info.quantization != Quantization.NONE.value:
            raise ConfigurationError(
                f"a target with weights quantised to {runner.info.quantization} would write other tokens than its own: "
                "quantise draft models only",
                field="quantization",
            )
        if options.max_batch_tokens <= options.max_draft_tokens:
            raise ConfigurationError(
                f"max_batch_tokens ({options.max_batch_tokens}) must exceed max_draft_tokens "
                f"({options.max_draft_tokens}), so that a block fits in a pass",
                field="max_batch_tokens",
            )
        self.options = options
        self._runner = runner
        self._eos_token_ids = eos_token_ids
        self._vocab_size = min(vocab_size or runner.info.vocab_size, runner.info.vocab_size)
        self._max_model_len = runner.info.max_model_len
        self._sessions: dict[str, Session] = {}
        self._queue: dict[str, None] = {}  # sessions with work, in order of submission
        self._last_pass = PassSize()

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
    def last_pass(self) -> PassSize:
        """Size of the newest pass."""
        return self._last_pass

    @property
    def kv_usage(self) -> KvUsage:
        """Room of the pool that is taken; may be asked from any thread."""
        return self._runner.pool.usage

    @property
    def kv_pages_in_use(self) -> int:
        """Pages of the pool that are taken."""
        return self._runner.pool.pages_in_use

    def kv_len(self, session: str) -> int | None:
        """Rows of one session; None when it is not open."""
        held = self._sessions.get(session)
        return None if held is None else held.kv.num_rows

    # --- commands -------------------------------------------------------------------------------------------------

    def open(self, command: Open) -> Opened:
        """Registers a session; costs no pass. One of that name is replaced, and keeps the rows of the common prefix.

        Raises:
            CapacityExceeded: all session slots are taken.
            InvalidArgument: the prompt or the rule cannot be served.
        """
        self._check_open(command)
        held = self._sessions.get(command.session)
        if held is None and len(self._sessions) >= self.options.max_sessions:
            raise CapacityExceeded(
                f"all {self.options.max_sessions} session slots of this verifier are taken; try again later"
            )
        log = TokenLog(command.tokens)
        kv = self._runner.new_sequence() if held is None else held.kv
        if held is not None:
            kv.rollback(min(common_prefix_len(held.log.tokens, log.tokens), len(log) - 1))
            self._queue.pop(command.session, None)
        self._sessions[command.session] = Session(command.epoch, log, kv, command.sampling, command.generation_start)
        return Opened(command.session, command.epoch, kv_len=kv.num_rows, cached_len=kv.num_rows)

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
            self._check_verify(command)
        except InvalidArgument as error:
            return _failed(command, error)
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
        self._queue.pop(command.session, None)
        self._queue[command.session] = None
        return None

    def close(self, session: str) -> bool:
        """Forgets a session and frees its rows; False when it was not open."""
        held = self._sessions.pop(session, None)
        self._queue.pop(session, None)
        if held is None:
            return False
        held.kv.free()
        return True

    # --- passes ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Verified | Failed]:
        """Runs one pass over queued work; the answers of the blocks that it judged or could not serve."""
        answers: list[Verified | Failed] = []
        parts = self._schedule(answers)
        self._last_pass = PassSize(len(parts), sum(part.sequence.num_tokens for part in parts))
        if not parts:
            return answers
        started_ns = time.monotonic_ns()
        for part in parts:
            part.work.started_ns = part.work.started_ns or started_ns
        results = self._forward(parts)
        forward_ns = time.monotonic_ns() - started_ns
        judged: list[tuple[Part, torch.Tensor]] = []
        for part, result in zip(parts, results, strict=True):
            part.work.forward_ns += forward_ns
            if isinstance(result, ModelError):
                answers.append(self._fail(part.session, part.work, result))
            elif part.judged:
                judged.append((part, result))
            else:
                part.session.kv.commit(len(part.sequence.tokens))
        verdicts = judge([self._judge_request(part, logits) for part, logits in judged])
        for (part, _), verdict in zip(judged, verdicts, strict=True):
            answers.append(self._finish(part, verdict, self._last_pass))
        return answers

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

    def _check_open(self, command: Open) -> None:
        if command.rule is not AcceptanceRule.MATCH:
            raise InvalidArgument(
                f"acceptance rule {command.rule.value!r} is not supported: use 'match'", field="acceptance_rule"
            )
        if not command.tokens:
            raise InvalidArgument("the prompt is empty: give at least one token", field="prompt")
        if len(command.tokens) >= self._max_model_len:
            raise InvalidArgument(
                f"the prompt has {len(command.tokens)} tokens; the context of {self._max_model_len} leaves room for at "
                f"most {self._max_model_len - 1}",
                field="prompt",
            )
        self._check_ids(command.tokens, "prompt")

    def _check_ids(self, tokens: Sequence[int], field: str) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < self._vocab_size)
            raise InvalidArgument(f"token id {wrong} is outside [0, {self._vocab_size})", field=field)

    def _check_verify(self, command: Verify) -> None:
        if not max(1, len(command.catch_up)) <= command.base_len < self._max_model_len:
            raise InvalidArgument(
                f"base_len {command.base_len} must be at least the length of catch_up ({len(command.catch_up)}) and "
                f"below the context of {self._max_model_len} tokens",
                field="base_len",
            )
        self._check_ids(command.catch_up, "catch_up")

    def _schedule(self, answers: list[Verified | Failed]) -> list[Part]:
        """Chooses the parts of the next pass and reserves their rows; work that does not fit the pool is failed."""
        ready: list[Session] = []
        behind: list[Session] = []
        for name in self._queue:
            session = self._sessions[name]
            (behind if session.missing_rows else ready).append(session)
        budget = self.options.max_batch_tokens
        kept_back = int(budget * self.options.prefill_share) if behind else 0
        parts: list[Part] = []
        for session in [*ready, *behind]:
            left = budget - (0 if session.missing_rows else kept_back)
            part = self._part(session, left, first=not parts, answers=answers)
            if part is not None:
                parts.append(part)
                budget -= part.sequence.num_tokens
        return parts

    def _part(self, session: Session, budget: int, *, first: bool, answers: list[Verified | Failed]) -> Part | None:
        """The session's part of a pass of `budget` more tokens; None when there is no room for it."""
        work = session.work
        if work is None:
            return None
        missing, length = session.missing_rows, len(session.log)
        num_block = 1 + work.cut.tree.num_draft_tokens
        judged = missing + num_block <= budget or (first and not missing)
        num_chain = missing + 1 if judged else min(missing, budget)
        if num_chain < 1:
            return None
        rows = session.kv.num_rows
        try:
            if judged:
                self._reserve_block(session, work, missing)
            else:
                session.kv.reserve(num_chain)
        except CapacityExceeded as error:
            answers.append(self._fail(session, work, error))
            return None
        tree = work.cut.tree if judged else EMPTY_CUT.tree
        tokens = session.log.slice(rows, length if judged else rows + num_chain)
        num_logits = 1 + tree.num_draft_tokens if judged else 0
        return Part(session, work, SequencePass(session.kv, tokens, tree, num_logits), judged)

    def _reserve_block(self, session: Session, work: Work, missing: int) -> None:
        """Makes room for missing rows, root and block; without the block if the pool is too full for it."""
        try:
            session.kv.reserve(missing + 1 + work.cut.tree.num_draft_tokens)
        except CapacityExceeded:
            if not work.cut.tree.num_draft_tokens:
                raise
            work.cut = EMPTY_CUT
            session.kv.reserve(missing + 1)

    def _forward(self, parts: Sequence[Part]) -> list[torch.Tensor | ModelError]:
        """Runs the pass; if it breaks, each part alone, so that one session's poison hurts no other."""
        try:
            return list(self._runner.forward([part.sequence for part in parts]))
        except Exception as error:
            if len(parts) == 1:
                return [ModelError(f"the forward pass failed: {type(error).__name__}: {error}")]
        return [result for part in parts for result in self._forward([part])]

    def _judge_request(self, part: Part, logits: torch.Tensor) -> JudgeRequest:
        session = part.session
        return JudgeRequest(
            logits=logits,
            tree=part.sequence.tree,
            committed=session.log.tokens,
            generation_start=session.generation_start,
            sampling=session.sampling,
            vocab_size=self._vocab_size,
            eos_token_ids=self._eos_token_ids,
        )

    def _finish(self, part: Part, verdict: Verdict | PacelineError, size: PassSize) -> Verified | Failed:
        """Keeps what was accepted and answers the command."""
        session, work = part.session, part.work
        if isinstance(verdict, PacelineError):
            return self._fail(session, work, verdict)
        session.kv.commit(len(part.sequence.tokens), verdict.accepted_path)
        session.log.extend(verdict.tokens)
        self._done(session, work)
        command = work.command
        timing = Timing(
            queue_us=(work.started_ns - work.submitted_ns) // 1000,
            forward_us=work.forward_ns // 1000,
            total_us=(time.monotonic_ns() - work.submitted_ns) // 1000,
            batch_sessions=size.num_sessions,
            batch_tokens=size.num_tokens,
        )
        return Verified(
            session=command.session,
            epoch=command.epoch,
            round=command.round,
            base_len=command.base_len,
            accepted_path=work.cut.path_as_sent(verdict.accepted_path),
            tokens=verdict.tokens,
            kv_len=session.kv.num_rows,
            logprobs=verdict.logprobs,
            timing=timing,
        )

    def _fail(self, session: Session, work: Work, error: PacelineError) -> Failed:
        """Ends one command with an error; its session gives its rows back, so that others can go on."""
        session.kv.rollback(0)
        self._done(session, work)
        return _failed(work.command, error)

    def _done(self, session: Session, work: Work) -> None:
        session.work = None
        self._queue.pop(work.command.session, None)


def _failed(command: Verify, error: PacelineError) -> Failed:
    return Failed(command.session, command.epoch, command.round, error.to_failure())
