"""The `DraftRunner` on the engine: all sessions of a step share one pass, and one pool of pages.

Rows are only ever a saving of time: a session that lost them is fed its context again. So a full pool fails no draft;
the engine's scheduler takes pages from sessions that draft nothing at the moment, and else lets the one that came later
wait. Rows of equal beginnings are computed once and shared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from paceline.drafting.draft_runner import ChainResult, DraftRunnerInfo, Feed, FeedResult
from paceline.engine.best_token import BestToken, best_token, read, side_by_side
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.engine.scheduler import READY_TOKENS, Scheduler, SchedulerOptions, SchedulerStats
from paceline.engine.wants import Holder, Part, Want
from paceline.errors import CapacityExceeded, ModelError, PacelineError
from paceline.kv_usage import KvUsage

_log = logging.getLogger(__name__)


_UNREAD = (0,)
"""Stands for a token that only the device knows."""


class TorchDraftRunner:
    """Runs a draft model through the engine.

    Args:
        runner: the model with its key/value pool.
        max_sessions: sessions at once; 0 for any number: they share the pool.
        max_batch_tokens: most tokens of a pass; a longer context is fed in several.

    Raises:
        ConfigurationError: a pass is too short.
    """

    def __init__(self, runner: ModelRunner, max_sessions: int = 0, max_batch_tokens: int = 256) -> None:
        self._runner = runner
        # A session without a draft under way has no claim to its rows: they are a saving of time.
        self._scheduler = Scheduler(
            runner.pool, SchedulerOptions(max_batch_tokens=max_batch_tokens, idle_preempt_s=0.0)
        )
        self._holders: dict[str, Holder] = {}
        facts = runner.info
        self._info = DraftRunnerInfo(
            vocab_size=facts.vocab_size,
            max_model_len=min(facts.max_model_len, runner.pool.capacity_tokens),
            weights_bytes=facts.weights_bytes,
            kv_bytes=facts.kv_bytes,
            max_sessions=max_sessions,
        )

    @property
    def info(self) -> DraftRunnerInfo:
        """Facts about the model."""
        return self._info

    @property
    def stats(self) -> SchedulerStats:
        """How often sessions lost their rows to others, and how many rows they shared."""
        return self._scheduler.stats

    def open(self, session: str) -> None:
        """Begins a session without rows."""
        limit = self._info.max_sessions
        if limit and session not in self._holders and len(self._holders) >= limit:
            raise CapacityExceeded(f"all {limit} draft sessions are taken; try again when one has ended")
        self.close(session)
        self._holders[session] = self._scheduler.register(self._runner.new_sequence())

    def rows(self, session: str) -> int:
        """Key/value rows that the session holds; 0 for an unknown one."""
        holder = self._holders.get(session)
        return 0 if holder is None else holder.kv.num_rows

    def kv_usage(self) -> KvUsage:
        """Pages of the pool that are taken."""
        return self._runner.pool.usage

    def forward(self, batch: Sequence[Feed]) -> list[FeedResult]:
        """Runs one pass; see `DraftRunner.forward`."""
        if not batch:
            return []
        wants: list[Want] = []
        for feed in batch:
            holder = self._holders[feed.session]
            holder.kv.rollback(feed.keep_rows)
            wants.append(Want(holder, feed.tokens, wants_logits=feed.wants_logits))
        parts = self._scheduler.plan(wants).parts
        if not parts:
            error = CapacityExceeded(f"the KV pool of {self._runner.pool.capacity_tokens} tokens is too small")
            return [FeedResult(error=error)] * len(batch)
        results = [FeedResult()] * len(batch)
        for part, result in zip(parts, self._run(parts, batch), strict=True):
            results[part.index] = result
        return results

    def forward_chain(self, feed: Feed, num_steps: int, vocab_size: int) -> ChainResult | None:
        """Takes several steps of one session; see `DraftsChains.forward_chain`."""
        holder = self._holders[feed.session]
        kv = holder.kv
        kv.rollback(feed.keep_rows)
        num_new = len(feed.tokens) - kv.num_rows
        num_steps = min(num_steps, self._info.max_model_len - len(feed.tokens) + 1)
        if num_new > READY_TOKENS or kv.pages_to_reserve(num_new + num_steps - 1) > self._runner.pool.pages_available:
            return None
        parts = self._scheduler.plan([Want(holder, feed.tokens)]).parts
        if not parts:
            return None
        sequence = parts[0].sequence
        chosen: list[BestToken] = []
        try:
            for left in reversed(range(num_steps)):
                (logits,) = self._runner.forward([sequence], wait=False)
                kv.commit(len(sequence.tokens))
                if not chosen and feed.is_context:
                    kv.publish(feed.tokens)
                chosen.append(best_token(logits, vocab_size))
                if left:
                    kv.reserve(1)
                    sequence = SequencePass(kv, _UNREAD, num_logits=1, last_on_device=chosen[-1].token)
            made = side_by_side(chosen)
            self._runner.synchronize()
            choices = read(made)
        except Exception as error:
            kv.rollback(len(feed.tokens) - 1)  # whatever was not committed, and drafts that nobody will hear of
            return ChainResult(error=_failure(feed, error))
        num_usable = choices.index(None) + 1 if None in choices else len(choices)
        return ChainResult(tuple(choices[:num_usable]))

    def _run(self, parts: Sequence[Part], batch: Sequence[Feed]) -> list[FeedResult]:
        try:
            outputs = self._runner.forward([part.sequence for part in parts])
        except Exception as error:
            # Whatever a model raises: the sessions that are not at fault must go on, so each is tried alone.
            if len(parts) > 1:
                return [result for part in parts for result in self._run([part], batch)]
            parts[0].sequence.kv.commit(0)
            return [FeedResult(error=_failure(batch[parts[0].index], error))]
        return [self._keep(part, batch[part.index], logits) for part, logits in zip(parts, outputs, strict=True)]

    @staticmethod
    def _keep(part: Part, feed: Feed, logits: torch.Tensor) -> FeedResult:
        kv = part.sequence.kv
        kv.commit(len(part.sequence.tokens))
        if feed.is_context:
            kv.publish(feed.tokens)
        return FeedResult(logits=logits if part.sequence.num_logits else None)

    def discard(self, session: str) -> None:
        """Forgets the session's rows and takes them out of the others' reach."""
        self._holders[session].kv.discard()

    def close(self, session: str) -> None:
        """Frees the session's rows."""
        holder = self._holders.pop(session, None)
        if holder is not None:
            self._scheduler.forget(holder)


def _failure(feed: Feed, error: Exception) -> PacelineError:
    """What a model raised, as the session's error."""
    _log.warning("draft session %s cannot be fed: %s", feed.session, error)
    return error if isinstance(error, PacelineError) else ModelError(f"the draft model failed: {error}")
