"""What the target engine remembers: open sessions, the work that waits in them, and their parts of a pass."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.engine.blocks import CutBlock
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.runner import SequencePass
from paceline.messages import SamplingParams, Verify
from paceline.token_log import TokenLog


@dataclass(slots=True, eq=False)
class Work:
    """One submitted command and what its passes have cost so far."""

    command: Verify
    cut: CutBlock
    submitted_ns: int
    started_ns: int = 0
    forward_ns: int = 0


@dataclass(slots=True, eq=False)
class Session:
    """One open session."""

    epoch: int
    log: TokenLog
    kv: SequenceKV
    sampling: SamplingParams
    generation_start: int
    work: Work | None = None

    @property
    def missing_rows(self) -> int:
        """Rows to be computed before the pending token is fed."""
        return len(self.log) - 1 - self.kv.num_rows


@dataclass(frozen=True, slots=True)
class Part:
    """What one session does in a pass; `judged` when its block is in it."""

    session: Session
    work: Work
    sequence: SequencePass
    judged: bool
