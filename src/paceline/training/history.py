"""What a run measured, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paceline.training.acceptance import Acceptance


@dataclass(frozen=True, slots=True)
class LossPoint:
    """Mean loss since the point before.

    Attributes:
        step: steps taken.
        tokens: answer tokens learnt from.
        loss: mean of the total.
        parts: means of what it is made of, by name.
        learning_rate: at this step.
    """

    step: int
    tokens: int
    loss: float
    parts: Mapping[str, float]
    learning_rate: float


@dataclass(frozen=True, slots=True)
class EvalPoint:
    """Acceptance on held-out answers.

    Attributes:
        step: steps taken.
        seconds: time spent.
        tokens: answer tokens learnt from.
        positions: anchors measured.
        at_least: see `Acceptance`.
        tokens_per_pass: see `Acceptance`.
    """

    step: int
    seconds: float
    tokens: int
    positions: int
    at_least: tuple[float, ...]
    tokens_per_pass: float

    @property
    def acceptance(self) -> Acceptance:
        """The measurement itself."""
        return Acceptance(self.positions, self.at_least)


@dataclass(frozen=True, slots=True)
class History:
    """All points of a run, oldest first."""

    losses: tuple[LossPoint, ...] = ()
    evaluations: tuple[EvalPoint, ...] = ()

    def with_loss(self, point: LossPoint) -> History:
        """With one more point."""
        return replace(self, losses=(*self.losses, point))

    def with_evaluation(self, point: EvalPoint) -> History:
        """With one more evaluation."""
        return replace(self, evaluations=(*self.evaluations, point))

    @property
    def best(self) -> EvalPoint | None:
        """The first of the best evaluations; None before the first."""
        return max(self.evaluations, key=lambda point: point.tokens_per_pass, default=None)

    @property
    def evaluations_since_best(self) -> int:
        """How many evaluations have passed since then."""
        best = self.best
        return 0 if best is None else len(self.evaluations) - 1 - self.evaluations.index(best)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> History:
        """From what `dataclasses.asdict` made of one."""
        return cls(
            tuple(LossPoint(**point) for point in content["losses"]),
            tuple(EvalPoint(**{**point, "at_least": tuple(point["at_least"])}) for point in content["evaluations"]),
        )
