"""Comparing two decodings in float32, where the two best logits may lie closer than rounding.

Kernels for one row and for several differ in the last bits. A difference counts as a near-tie, not as a fault, only if
the two best (noise-perturbed) logits at the first differing token are closer than `NEAR_TIE_GAP` in the independent
reference; then the expected token is forced and the comparison goes on behind it. More than one near-tie in
`TOKENS_PER_NEAR_TIE` tokens is a fault all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bench.reference import CacheFreeReference, Mode

NEAR_TIE_GAP = 1e-4
TOKENS_PER_NEAR_TIE = 5000


@dataclass(slots=True)
class Tally:
    """What a series of comparisons has found.

    Attributes:
        num_tokens: tokens compared.
        near_ties: one line for each.
        faults: one line for each real difference.
    """

    num_tokens: int = 0
    near_ties: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def allowed_near_ties(self) -> int:
        """How many near-ties the tokens compared so far excuse; one in any case."""
        return max(1, self.num_tokens // TOKENS_PER_NEAR_TIE)

    @property
    def passed(self) -> bool:
        """Whether everything was equal, rare near-ties excepted."""
        return not self.faults and len(self.near_ties) <= self.allowed_near_ties

    def add(self, other: Tally) -> None:
        """Takes over what another series has found."""
        self.num_tokens += other.num_tokens
        self.near_ties += other.near_ties
        self.faults += other.faults


Continue = Callable[[Sequence[int]], Sequence[int]]
"""Decodes again behind forced tokens: from the tokens forced so far to those that follow."""


def compare(
    what: str,
    expected: Sequence[int],
    actual: Sequence[int],
    *,
    prompt: Sequence[int],
    mode: Mode,
    seed: int,
    reference: CacheFreeReference,
    decode_behind: Continue,
    tally: Tally,
) -> None:
    """Compares one decoding with the expected one and adds the outcome to the tally.

    Args:
        what: names the comparison in messages.
        expected: the whole expected continuation of `prompt`.
        actual: the continuation to be checked.
        prompt: the tokens before both.
        mode: how tokens are chosen.
        seed: of the noise.
        reference: judges whether the first difference is a near-tie.
        decode_behind: repeats the checked decoding behind forced tokens.
        tally: receives the outcome.
    """
    forced = 0
    while True:
        rest = expected[forced:]
        tally.num_tokens += len(rest)
        common = next((i for i, (left, right) in enumerate(zip(rest, actual, strict=False)) if left != right), None)
        if common is None:
            if len(rest) != len(actual):
                tally.faults.append(f"{what}: {len(actual)} tokens instead of {len(rest)} behind token {forced}")
            return
        tally.num_tokens -= len(rest) - common
        forced += common
        gap = reference.choice_after([*prompt, *expected[:forced]], mode, seed, len(prompt)).gap
        line = (
            f"{what}: token {forced} is {actual[common]}, expected {expected[forced]}; the best two are {gap:.1e} apart"
        )
        if gap >= NEAR_TIE_GAP:
            tally.faults.append(line)
            return
        tally.near_ties.append(line)
        forced += 1
        if forced == len(expected):
            return
        actual = decode_behind(expected[:forced])
