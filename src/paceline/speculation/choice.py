"""What to do until something is better by a margin: a size, ahead or in turn. Pure Python.

    what is better by 2 %                       after 16 rounds and half a second
    plain decoding that is better by 1 %        the same
    plain decoding that is better by 25 %       at once
    blocks that are 5 % better than plain       after 16 plain rounds and a second
    anything, while nobody knows anything yet   after two rounds, within the first 16

So there are at most 120 changes per minute whatever is observed, and in a steady state almost none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.speculation.round_model import Expectation, RoundModel

_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64)
"""Sizes that are compared; in between the difference is small."""
_START_SIZE = 4
_MIN_ROUNDS = 16
_MIN_SECONDS = 0.5
_MIN_SECONDS_PLAIN = 1.0
_START_ROUNDS = 16
_START_MIN_ROUNDS = 2
_COMPARE_EVERY = 4
_MARGIN = 1.02
_MARGIN_TO_PLAIN = 1.01
_MARGIN_FROM_PLAIN = 1.05
_MARGIN_AT_ONCE = 1.25


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do.

    Attributes:
        size: drafts of a block: depth of a chain, nodes of a tree; 0 for none.
        ahead: the next block is drafted while one is judged.
    """

    size: int
    ahead: bool


@dataclass(frozen=True, slots=True)
class Moment:
    """When a choice is looked at again.

    Attributes:
        now: seconds of the clock that verdicts are told by.
        round_s: what a round takes; 0 if nothing is known.
    """

    now: float
    round_s: float


class Chooser:
    """Keeps a choice and changes it.

    Attributes:
        choice: at present; None before the first.
    """

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self._began_blind = False
        self._began_at = 0.0
        self._changed_at = -math.inf
        self._compare_at = -math.inf

    def begin(self, choice: Choice) -> None:
        """Begins with what others do; it may be left at once."""
        self.choice = choice
        self._began_blind = False
        self._changed_at = self._compare_at = -math.inf

    def look(self, model: RoundModel, limit: int, may_ahead: bool, moment: Moment) -> tuple[Choice, bool]:
        """What to do from now on.

        Args:
            model: what rounds are expected to bring.
            limit: largest size.
            may_ahead: drafting ahead is possible.
            moment: the time.

        Returns:
            That, and whether it was compared with the rest just now.
        """
        if self.choice is None:
            self._began_blind = not model.known
            self._began_at = self._changed_at = moment.now
            start = Choice(min(_START_SIZE, limit), may_ahead)
            self.choice = start if self._began_blind else best(model, limit, may_ahead)
        elif model.known and moment.now >= self._compare_at:
            self._compare(self.choice, model, limit, may_ahead, moment)
            return self.choice, True
        return self.choice, False

    def _compare(self, choice: Choice, model: RoundModel, limit: int, may_ahead: bool, moment: Moment) -> None:
        finding_out = self._began_blind and moment.now < self._began_at + _START_ROUNDS * moment.round_s
        if not finding_out:
            self._compare_at = moment.now + _COMPARE_EVERY * moment.round_s
        current = expect(model, Choice(min(choice.size, limit), choice.ahead and may_ahead)).rate
        if moment.now < self._changed_at + _least_s(choice, finding_out, moment.round_s):
            if choice.size and model.plain().rate > _MARGIN_AT_ONCE * current:
                self._change(Choice(0, False), moment)
            return
        other = best(model, limit, may_ahead)
        margin = _MARGIN_TO_PLAIN if not other.size else _MARGIN if choice.size else _MARGIN_FROM_PLAIN
        if expect(model, other).rate > margin * current:
            self._change(other, moment)

    def _change(self, choice: Choice, moment: Moment) -> None:
        self.choice = choice
        self._changed_at = moment.now


def _least_s(choice: Choice, finding_out: bool, round_s: float) -> float:
    """How long a choice is kept."""
    if finding_out:
        return _START_MIN_ROUNDS * round_s
    return max(_MIN_SECONDS if choice.size else _MIN_SECONDS_PLAIN, _MIN_ROUNDS * round_s)


def expect(model: RoundModel, choice: Choice) -> Expectation:
    """What a choice brings."""
    return model.block(choice.size, choice.ahead) if choice.size else model.plain()


def best(model: RoundModel, limit: int, may_ahead: bool, with_plain: bool = True) -> Choice:
    """What brings the most tokens per second."""
    sizes = [size for size in _SIZES if size < limit] + [limit]
    choices = [Choice(size, ahead) for size in sizes for ahead in ((False, True) if may_ahead else (False,))]
    if with_plain:
        choices.insert(0, Choice(0, False))
    return max(choices, key=lambda choice: expect(model, choice).rate)
