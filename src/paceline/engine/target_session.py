"""What the target engine remembers: open sessions and the work that waits in them."""

from __future__ import annotations

import time
from dataclasses import dataclass

from paceline.engine.blocks import CutBlock
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.sampling import Verdict
from paceline.engine.scheduler import Holder, Want
from paceline.messages import AcceptanceRule, SamplingParams, Timing, Verified, Verify
from paceline.pass_size import PassSize
from paceline.token_log import TokenLog


@dataclass(slots=True, eq=False)
class Work:
    """One submitted command and what its passes have cost so far."""

    command: Verify
    cut: CutBlock
    submitted_ns: int
    started_ns: int = 0
    forward_ns: int = 0

    def verified(self, verdict: Verdict, kv_len: int, last_pass: PassSize) -> Verified:
        """The answer to the command.

        Args:
            verdict: on what was judged of its block.
            kv_len: rows that the session has now.
            last_pass: size of the pass that judged it.
        """
        command = self.command
        timing = Timing(
            queue_us=(self.started_ns - self.submitted_ns) // 1000,
            forward_us=self.forward_ns // 1000,
            total_us=(time.monotonic_ns() - self.submitted_ns) // 1000,
            batch_sessions=last_pass.num_sessions,
            batch_tokens=last_pass.num_tokens,
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
        )


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
