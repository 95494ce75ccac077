"""The tokens of simulated models: a table that is never written down, looked up by a hash of the whole prefix.

The next token after a prefix is a function of the seed and of every token before it, position included, so that a row
computed for another prefix gives another text. A drafter with agreement A looks up the same table and proposes the
target's own token with probability A, at each position independently of all others: the number of accepted tokens of a
block is geometric.

A prefix is carried as one number, its state, which `after` extends by a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

_BITS = 63
"""A state is kept where keys and values are, in a signed 64-bit number."""
_MASK = (1 << _BITS) - 1
_TOKEN_STEP = 0x1E3779B97F4A7C15
_AGREEMENT_STEP = 0x2545F4914F6CDD1D
_OTHER_STEP = 0x369DEA0F31A53F85
_CANDIDATE_STEP = 0x5851F42D4C957F2D


def _mixed(value: int) -> int:
    """The finaliser of MurmurHash3 on 63 bits: each bit of the result depends on each bit of the value."""
    value = (value ^ (value >> 33)) * 0x7F51AFD7ED558CCD & _MASK
    value = (value ^ (value >> 33)) * 0x44CEB9FE1A85EC53 & _MASK
    return value ^ (value >> 33)


@dataclass(frozen=True, slots=True)
class SimulatedText:
    """What a model writes.

    Attributes:
        choices: the tokens that it writes, at least two.
        seed: of the table; models of the same seed and choices write the same.
        agreement: probability that this model's token is the table's; 1 for a target.
        candidates: where its token is not, probability that the next best candidate is, and so on.
    """

    choices: tuple[int, ...]
    seed: int = 0
    agreement: float = 1.0
    candidates: float = 0.0

    @property
    def start(self) -> int:
        """The state of the empty prefix."""
        return _mixed(self.seed & _MASK)

    def after(self, state: int, tokens: Iterable[int]) -> list[int]:
        """The states after each of the tokens."""
        states: list[int] = []
        for token in tokens:
            state = _mixed((state + (token + 1) * _TOKEN_STEP) & _MASK)
            states.append(state)
        return states

    def next_token(self, state: int) -> int:
        """The token after a prefix."""
        count = len(self.choices)
        index = state % count
        if self.agreement < 1.0 and _mixed(state ^ _AGREEMENT_STEP) >= self.agreement * _MASK:
            index += 1 + _mixed(state ^ _OTHER_STEP) % (count - 1)
        return self.choices[index % count]

    def best_tokens(self, state: int, num: int) -> tuple[int, ...]:
        """Different candidates after a prefix, the best first; fewer where there are fewer tokens."""
        best = [self.next_token(state)]
        count = len(self.choices)
        other = state
        while len(best) < min(num, count):
            other = _mixed(other ^ _CANDIDATE_STEP)
            agrees = other < self.candidates * _MASK
            start = state if agrees else _mixed(other ^ _OTHER_STEP)
            while (token := self.choices[start % count]) in best:
                start += 1
            best.append(token)
        return tuple(best)

    def agreements(self, prompt: Iterable[int]) -> Iterator[bool]:
        """Whether this model's token is the target's, at each position of the target's own text after a prompt."""
        target = replace(self, agreement=1.0)
        state = [self.start, *self.after(self.start, prompt)][-1]
        while True:
            token = target.next_token(state)
            yield self.next_token(state) == token
            (state,) = self.after(state, (token,))
