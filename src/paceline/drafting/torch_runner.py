"""The `DraftRunner` on the engine's `ModelRunner`: all sessions of a step share one pass."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from paceline.drafting.draft_runner import DraftRunnerInfo, Feed, FeedResult
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.errors import CapacityExceeded, ModelError, PacelineError
from paceline.kv_usage import KvUsage

_log = logging.getLogger(__name__)


class TorchDraftRunner:
    """Runs a draft model through the engine.

    Args:
        runner: the model with its key/value pool.
        max_sessions: sessions at once; 0 when only the pool bounds them.
    """

    def __init__(self, runner: ModelRunner, max_sessions: int = 0) -> None:
        self._runner = runner
        self._sequences: dict[str, SequenceKV] = {}
        facts = runner.info
        self._info = DraftRunnerInfo(
            vocab_size=facts.vocab_size,
            max_model_len=facts.max_model_len,
            weights_bytes=facts.weights_bytes,
            kv_bytes=facts.kv_bytes,
            max_sessions=max_sessions,
        )

    @property
    def info(self) -> DraftRunnerInfo:
        """Facts about the model."""
        return self._info

    def open(self, session: str) -> None:
        """Begins a session without rows."""
        limit = self._info.max_sessions
        if limit and session not in self._sequences and len(self._sequences) >= limit:
            raise CapacityExceeded(f"all {limit} draft sessions are taken; try again when one has ended")
        self.close(session)
        self._sequences[session] = self._runner.new_sequence()

    def rows(self, session: str) -> int:
        """Key/value rows that the session holds; 0 for an unknown one."""
        kv = self._sequences.get(session)
        return 0 if kv is None else kv.num_rows

    def kv_usage(self) -> KvUsage:
        """Pages of the pool that are taken."""
        return self._runner.pool.usage

    def forward(self, batch: Sequence[Feed]) -> list[FeedResult]:
        """Runs one pass; see `DraftRunner.forward`."""
        results: list[FeedResult] = [FeedResult()] * len(batch)
        ready: list[int] = []
        for index, feed in enumerate(batch):
            kv = self._sequences[feed.session]
            kv.rollback(feed.keep_rows)
            try:
                kv.reserve(len(feed.tokens))
            except CapacityExceeded as error:
                results[index] = FeedResult(error=error)
            else:
                ready.append(index)
        outcomes = self._run([batch[index] for index in ready])
        for index, outcome in zip(ready, outcomes, strict=True):
            results[index] = outcome
        return results

    def _run(self, batch: Sequence[Feed]) -> list[FeedResult]:
        if not batch:
            return []
        parts = [
            SequencePass(
                kv=self._sequences[feed.session], tokens=tuple(feed.tokens), num_logits=1 if feed.wants_logits else 0
            )
            for feed in batch
        ]
        try:
            outputs = self._runner.forward(parts)
        except Exception as error:
            # Whatever a model raises: the sessions that are not at fault must go on, so each is tried alone.
            if len(batch) > 1:
                return [result for feed in batch for result in self._run([feed])]
            _log.warning("draft session %s cannot be fed: %s", batch[0].session, error)
            parts[0].kv.commit(0)
            failure = error if isinstance(error, PacelineError) else ModelError(f"the draft model failed: {error}")
            return [FeedResult(error=failure)]
        return [self._keep(feed, part, logits) for feed, part, logits in zip(batch, parts, outputs, strict=True)]

    @staticmethod
    def _keep(feed: Feed, part: SequencePass, logits: torch.Tensor) -> FeedResult:
        part.kv.commit(len(feed.tokens))
        return FeedResult(logits=logits[-1] if feed.wants_logits else None)

    def close(self, session: str) -> None:
        """Frees the session's rows."""
        kv = self._sequences.pop(session, None)
        if kv is not None:
            kv.free()
