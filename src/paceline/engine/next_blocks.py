"""The blocks that a target engine proposes with its verdicts, and the fence around whoever makes them.

A self-drafter only ever affects speed. Whatever it raises or returns, verdicts go out: a block that cannot be judged is
cut or dropped, and after an error the sessions that it concerns are forgotten, so that they begin anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.blocks import cut_block
from paceline.engine.runner import ModelRunner
from paceline.engine.self_draft import SelfDraft, SelfDrafter, SelfDraftJob
from paceline.engine.target_session import NextBlock, Session, Work
from paceline.messages import AcceptanceRule

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SelfDraftStats:
    """What happened since the engine was made.

    Attributes:
        num_drafts: blocks that were not empty.
        num_tokens: drafts in them.
        seconds: spent making blocks.
        num_failures: calls of the drafter that failed.
    """

    num_drafts: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    num_failures: int = 0


class NextBlocks:
    """Makes the next blocks of sessions that have just been judged.

    Args:
        drafter: who drafts; None for nobody.
        runner: the target.
        vocab_size: number of real token ids.
        max_draft_tokens: most drafts of a block.
    """

    def __init__(
        self, drafter: SelfDrafter | None, runner: ModelRunner, *, vocab_size: int, max_draft_tokens: int
    ) -> None:
        self._drafter = drafter
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_draft_tokens = max_draft_tokens
        self._num_drafts = self._num_tokens = self._num_failures = 0
        self._seconds = 0.0

    @property
    def stats(self) -> SelfDraftStats:
        """Counts so far; may be asked from any thread."""
        return SelfDraftStats(self._num_drafts, self._num_tokens, self._seconds, self._num_failures)

    def forget(self, session: str) -> None:
        """Frees what the drafter holds for a session."""
        if self._drafter is None:
            return
        try:
            self._drafter.forget(session)
        except Exception:
            self._failed()

    def draft(self, judged: Sequence[tuple[Session, Work]]) -> dict[str, NextBlock]:
        """Blocks of those sessions whose command asked for one, made in one call.

        Args:
            judged: sessions with the command that has just been answered; rows and tokens are those after it.
        """
        jobs = [job for session, work in judged if (job := self._job(session, work)) is not None]
        if not jobs or self._drafter is None:
            return {}
        started_s = time.monotonic()
        drafts = self._ask(self._drafter, jobs)
        seconds = time.monotonic() - started_s
        self._seconds += seconds
        draft_us = int(seconds * 1_000_000)
        return {
            job.session: self._judgeable(job, draft, self._drafter.method, draft_us)
            for job, draft in zip(jobs, drafts, strict=True)
        }

    def _job(self, session: Session, work: Work) -> SelfDraftJob | None:
        depth = min(
            work.command.next_depth, self._max_draft_tokens, self._runner.info.max_model_len - len(session.log) - 1
        )
        if self._drafter is None or depth < 1:
            return None
        return SelfDraftJob(
            session=work.command.session,
            tokens=session.log.tokens,
            max_depth=depth,
            sampling=session.sampling,
            generation_start=session.generation_start,
            rule=session.rule,
            kv=session.kv,
            features=None if self._drafter.taps is None else self._runner.features(session.kv),
        )

    def _ask(self, drafter: SelfDrafter, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        try:
            drafts = drafter.draft(jobs)
            if len(drafts) == len(jobs):
                return drafts
            raise ValueError(f"{len(drafts)} blocks for {len(jobs)} sessions")
        except Exception:
            self._failed()
        for job in jobs:
            self.forget(job.session)
        return [SelfDraft()] * len(jobs)

    def _judgeable(self, job: SelfDraftJob, draft: SelfDraft, method: str, draft_us: int) -> NextBlock:
        """`_block`, or an empty one where the drafter has returned something else than a draft."""
        try:
            return self._block(job, draft, method, draft_us)
        except Exception:
            self._failed()
        self.forget(job.session)
        return NextBlock(draft_us=draft_us)

    def _block(self, job: SelfDraftJob, draft: SelfDraft, method: str, draft_us: int) -> NextBlock:
        """What can be judged of a draft."""
        if job.rule is AcceptanceRule.RATIO and not draft.tree.is_chain:
            return NextBlock(draft_us=draft_us)
        cut = cut_block(
            draft.tree, vocab_size=self._vocab_size, max_nodes=self._max_draft_tokens, max_depth=job.max_depth
        )
        if not cut.tree.num_draft_tokens:
            return NextBlock(draft_us=draft_us)
        confidences: tuple[float, ...] = ()
        if len(draft.confidences) == draft.tree.num_draft_tokens:
            confidences = tuple(draft.confidences[node - 1] for node in cut.sent_nodes[1:])
        self._num_drafts += 1
        self._num_tokens += cut.tree.num_draft_tokens
        return NextBlock(cut.tree, confidences, draft.method or method, draft_us)

    def _failed(self) -> None:
        """To be called where an error has been caught."""
        self._num_failures += 1
        if self._num_failures == 1:
            logger.exception("the self-drafter failed; verdicts go on without blocks, later failures are only counted")
