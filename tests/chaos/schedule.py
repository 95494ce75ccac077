"""Which fault comes when: drawn from a seed, so that a run can be repeated. Pure.

Kinds are dealt from a deck that is shuffled anew whenever it is empty: the more often one is in it, the more often it
comes, and every kind comes in every run that is long enough for one deck.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """What is done to the fleet."""

    KILL_VERIFIER = "verifier killed"
    KILL_DRAFTER = "drafter killed"
    KILL_GATEWAY = "gateway killed"
    KILL_REDIS = "Redis killed, back with its data"
    LOSE_REDIS = "Redis killed, back empty"
    FREEZE_VERIFIER = "verifier frozen"
    FREEZE_DRAFTER = "drafter frozen"
    FREEZE_GATEWAY = "gateway frozen"
    FREEZE_REDIS = "Redis frozen"
    CUT_VERIFIER = "verifier cut off from a gateway"
    CUT_DRAFTER = "drafter cut off from a gateway"
    DELAY = "gateways and pools far apart"


DECK = (
    *(FaultKind.KILL_VERIFIER,) * 4,
    *(FaultKind.KILL_DRAFTER,) * 3,
    *(FaultKind.KILL_GATEWAY,) * 4,
    *(FaultKind.KILL_REDIS,) * 2,
    *(FaultKind.LOSE_REDIS,) * 2,
    FaultKind.FREEZE_VERIFIER,
    FaultKind.FREEZE_DRAFTER,
    FaultKind.FREEZE_GATEWAY,
    FaultKind.FREEZE_REDIS,
    *(FaultKind.CUT_VERIFIER,) * 2,
    FaultKind.CUT_DRAFTER,
    FaultKind.DELAY,
)
SHORT_DECK = tuple(FaultKind)
"""Every kind once."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is done to the fleet.

    Attributes:
        at_s: since the beginning.
        kind: what.
        victim: number of its victim, to be taken modulo how many there are.
        partner: the same for the gateway at the other end of a cut.
        lasts_s: how long: the pause before the next life, the freeze, the cut, the delay.
    """

    at_s: float
    kind: FaultKind
    victim: int
    partner: int
    lasts_s: float

    def __str__(self) -> str:
        return f"{self.at_s:6.1f} s  {self.kind.value} ({self.victim % 2}, {self.lasts_s:.1f} s)"


def draw_faults(
    seed: int, seconds: float, *, mean_gap_s: float, longest_s: float, deck: tuple[FaultKind, ...] = DECK
) -> Iterator[Fault]:
    """Faults within the first `seconds`, by time.

    Args:
        seed: of the run.
        seconds: length of the run.
        mean_gap_s: between two faults; half of it at least, one and a half at most.
        longest_s: most time that a fault lasts.
        deck: kinds.
    """
    dice = random.Random(f"faults {seed}")
    hand: list[FaultKind] = []
    at_s = 0.0
    while True:
        at_s += mean_gap_s * dice.uniform(0.5, 1.5)
        if at_s >= seconds:
            return
        if not hand:
            hand = dice.sample(deck, len(deck))
        kind = hand.pop()
        # Most processes are back at once; faults of the network and freezes last for a while.
        kills = kind.value.partition(",")[0].endswith("killed")
        lasts_s = (
            dice.choice([0.0, 0.0, 0.3 * longest_s * dice.random()]) if kills else dice.uniform(0.2, 1) * longest_s
        )
        yield Fault(at_s, kind, dice.randrange(2**16), dice.randrange(2**16), lasts_s)
