"""What the target engine remembers: open sessions and the work that waits in them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from paceline.engine.blocks import CutBlock
from paceline.engine.judging import JudgeRequest, Verdict
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.wants import Holder, Want
from paceline.errors import PacelineError
from paceline.messages import AcceptanceRule, Failed, Features, SamplingParams, Timing, Verified, Verify
from paceline.pass_size import PassSize
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import TokenLog


@dataclass(frozen=True, slots=True)
class NextBlock:
    """What rides on a verdict.

    Attributes:
        tree: the drafts.
        confidences: the drafter's own probability of each; empty where it told none.
        method: that made it; empty for an empty block.
        draft_us: what making it took, together with those of the other sessions of the pass.
    """

    tree: DraftTree = EMPTY_BLOCK
    confidences: tuple[float, ...] = ()
    method: str = ""
    draft_us: int = 0


NO_NEXT_BLOCK = NextBlock()


@dataclass(slots=True, eq=False)
class Work:
    """One submitted command and what its passes have cost so far."""

    command: Verify
    cut: CutBlock
    submitted_ns: int
    started_ns: int = 0
    forward_ns: int = 0

    def verified(
        self,
        verdict: Verdict,
        kv_len: int,
        last_pass: PassSize,
        next_block: NextBlock,
        features: Features | None = None,
    ) -> Verified:
        """The answer to the command.

        Args:
            verdict: on what was judged of its block.
            kv_len: rows that the session has now.
            last_pass: size of the pass that judged it.
            next_block: what rides on it.
            features: those of its newest rows, if they are wanted.
        """
        command = self.command
        timing = Timing(
            queue_us=(self.started_ns - self.submitted_ns) // 1000,
            forward_us=self.forward_ns // 1000,
            total_us=(time.monotonic_ns() - self.submitted_ns) // 1000,
            batch_sessions=last_pass.num_sessions,
            batch_tokens=last_pass.num_tokens,
            draft_us=next_block.draft_us,
        )
        return Verified(
            session=command.session,
            epoch=command.epoch,
            round=command.round,
            base_len=command.base_len,
            accepted_path=self.cut.path_as_sent(verdict.accepted_path),
            tokens=verdict.tokens,
            kv_len=kv_len,
            logprobs=verdict.logprobs,
            timing=timing,
            next_block=next_block.tree,
            next_confidences=next_block.confidences,
            next_method=next_block.method,
            features=features,
        )


def failed(command: Verify, error: PacelineError) -> Failed:
    """The answer to a command that an error ends."""
    return Failed(command.session, command.epoch, command.round, error.to_failure())


@dataclass(slots=True, eq=False)
class Session:
    """One open session."""

    epoch: int
    log: TokenLog
    holder: Holder
    sampling: SamplingParams
    generation_start: int
    rule: AcceptanceRule
    work: Work | None = None

    @property
    def kv(self) -> SequenceKV:
        """Its rows."""
        return self.holder.kv

    @property
    def missing_rows(self) -> int:
        """Rows to be computed before the pending token is fed."""
        return len(self.log) - 1 - self.kv.num_rows


@dataclass(frozen=True, slots=True)
class Entry:
    """A session with its work, and what the scheduler is asked for it."""

    session: Session
    work: Work
    want: Want

    def judge_request(
        self, tree: DraftTree, logits: torch.Tensor, vocab_size: int, eos_token_ids: tuple[int, ...]
    ) -> JudgeRequest:
        """What is to be judged after a pass.

        Args:
            tree: the part of the block that was fed.
            logits: of the pending token and the tree # [1 + tree.num_draft_tokens, >= vocab_size]
            vocab_size: number of real token ids.
            eos_token_ids: ids that min_tokens masks.
        """
        session = self.session
        return JudgeRequest(
            logits=logits,
            tree=tree,
            committed=session.log.tokens,
            generation_start=session.generation_start,
            sampling=session.sampling,
            vocab_size=vocab_size,
            eos_token_ids=eos_token_ids,
            rule=session.rule,
            # The block may have been cut, under `ratio` only at its end.
            draft_probs=self.work.command.draft_probs[: tree.num_draft_tokens],
        )
