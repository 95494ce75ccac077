"""What the draft actor knows of a session and of the drafts on their way."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.drafting.method import DraftJob
from paceline.messages import Draft, Drafted, Open
from paceline.token_log import TokenLog


@dataclass(slots=True)
class RunningDraft:
    """A job on its way, with what its answer needs."""

    command: Draft
    job: DraftJob
    arrived_s: float
    started_s: float | None = None
    forward_s: float = 0.0
    num_steps: int = 0
    num_shared: int = 0

    @property
    def batch_sessions(self) -> int:
        """Drafts that shared its steps, on average."""
        return round(self.num_shared / max(self.num_steps, 1))

    @property
    def is_over(self) -> bool:
        """Whether no step will add to it."""
        return self.job.done or len(self.job.tokens) >= self.job.max_depth


@dataclass(slots=True)
class DraftSession:
    """One draft session.

    Attributes:
        epoch: of its owner.
        opened: the command that opened it, for its parameters.
        log: committed tokens known here.
        last_id: draft_id of the newest draft that was answered or runs; 0 before the first.
        answer: the answer to `last_id`, for replay; None while it runs or when it had none.
        running: the job on its way.
    """

    epoch: int
    opened: Open
    log: TokenLog
    last_id: int = 0
    answer: Drafted | None = None
    running: RunningDraft | None = None


@dataclass(frozen=True, slots=True)
class DraftStep:
    """One step of the method.

    Attributes:
        running: the drafts that it added to.
        over: of these, the ones that no further step adds to, as it was then: the actor is told after a run of steps.
        num_tokens: that it proposed.
        started_s: when, in seconds.
        ended_s: until when.
    """

    running: tuple[RunningDraft, ...]
    over: tuple[RunningDraft, ...]
    num_tokens: int
    started_s: float
    ended_s: float
