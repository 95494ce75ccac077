"""What a run tells whoever watches it. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.training.history import EvalPoint


@dataclass(frozen=True, slots=True)
class Status:
    """What a run tells while it runs.

    Attributes:
        step: steps taken.
        share: of the whole run, 0 to 1.
        seconds: time spent, earlier runs included.
        tokens: answer tokens learnt from, earlier runs included.
        loss: mean of the last few steps; None before the first.
        epoch: how often the data has been seen.
        evaluation: the newest one; None before the first.
        evaluated: this status comes right after it.
    """

    step: int
    share: float
    seconds: float
    tokens: int
    loss: float | None
    epoch: float
    evaluation: EvalPoint | None
    evaluated: bool = False


OnStatus = Callable[[Status], None]
