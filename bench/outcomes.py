"""What it would bring to draft after the likeliest outcomes of a block while it is judged: measured hits, then a model.

A real pair tells how often the outcome of a round would have been among those prepared (`outcome_ranks.py`); the
discrete-event model of fleets (`paceline.benchmark.ideal`) tells what that is worth with given times of passes. Ratios
are to drafting ahead after one outcome only: that all is accepted and the guess behind it is right.

    python -m bench.outcomes --quick
    python -m bench.outcomes
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.table import Table

from bench.outcome_ranks import MODES, NUM_OUTCOMES, Hits, Pair, hits
from bench.report import write_report
from bench.target import TARGET
from paceline.benchmark.ideal import IdealFleet, ideal
from paceline.benchmark.prompts import PROMPTS
from paceline.engine.simulated.pass_time import PassTime
from paceline.quantize import Bits

_SEED = 7


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet to predict.

    Attributes:
        name: for the table.
        bits: whose outcomes are used.
        fleet: the fleet; its acceptance is replaced by the measured one unless `own_acceptance`.
        own_acceptance: it stays.
    """

    name: str
    bits: Bits
    fleet: IdealFleet
    own_acceptance: bool = True


_SIMULATED = IdealFleet()
SETTINGS = (
    Setting("30 + 0.05 ms to judge, 3 + 0.05 to draft, one session", Bits.INT4, _SIMULATED),
    Setting(
        "20 + 0.01 ms to judge, 1 + 0.01 to draft, one session",
        Bits.INT4,
        IdealFleet(verify_pass=PassTime(20.0, 0.01), draft_pass=PassTime(1.0, 0.01)),
    ),
    Setting(
        "40 + 1 ms to judge, 10 ms for each token to draft (the pair on two cores)",
        Bits.INT8,
        IdealFleet(verify_pass=PassTime(40.0, 1.0), draft_pass=PassTime(0.0, 10.0)),
        own_acceptance=False,
    ),
    Setting("30 + 0.05, 3 + 0.05, 4 sessions on one of each", Bits.INT4, IdealFleet(num_sessions=4)),
    Setting("30 + 0.05, 3 + 0.05, 64 sessions on 4 and 2", Bits.INT4, IdealFleet(64, 4, 2)),
)


@dataclass(frozen=True, slots=True)
class Predicted:
    """One fleet with the outcomes of one mode.

    Attributes:
        sequential: tokens per second without drafting ahead.
        ahead: the same with.
        gain: with so many outcomes prepared besides, divided by `ahead`.
    """

    setting: str
    mode: str
    sequential: float
    ahead: float
    gain: dict[int, float]


def predict(setting: Setting, measured: Hits, seconds: float) -> Predicted:
    """Runs the model.

    Args:
        setting: the fleet.
        measured: how often outcomes are foreseen.
        seconds: of the model's time.
    """
    fleet = setting.fleet if setting.own_acceptance else replace(setting.fleet, acceptance=measured.acceptance)
    ahead = ideal(fleet, seconds).tokens_per_second
    return Predicted(
        setting=setting.name,
        mode=measured.mode,
        sequential=ideal(replace(fleet, ahead=False), seconds).tokens_per_second,
        ahead=ahead,
        gain={
            num: ideal(replace(fleet, outcomes=num, outcome_chances=measured.chances[num]), seconds).tokens_per_second
            / ahead
            for num in NUM_OUTCOMES[1:]
        },
    )


def show(measured: Sequence[Hits], predicted: Sequence[Predicted]) -> None:
    """Prints both tables."""
    console = Console(width=160)
    table = Table(title="rounds whose outcome is prepared, by how many are besides the guess")
    for heading in ("drafter", "mode", "block", "acceptance", "order", *map(str, NUM_OUTCOMES)):
        table.add_column(heading)
    for row in measured:
        for order, rates in row.hit_rate.items():
            facts = (row.drafter, row.mode, str(row.num_draft_tokens), f"{row.acceptance:.2f}", order)
            table.add_row(*facts, *(f"{rate:.2f}" for rate in rates.values()))
    console.print(table)
    table = Table(title="tokens per second, and what outcomes add to drafting ahead")
    for heading in ("fleet", "mode", "sequential", "ahead", *map(str, NUM_OUTCOMES[1:])):
        table.add_column(heading)
    for one in predicted:
        gains = [f"{gain:.3f}" for gain in one.gain.values()]
        table.add_row(one.setting, one.mode, f"{one.sequential:.1f}", f"{one.ahead:.1f}", *gains)
    console.print(table)


def main() -> None:
    """Measures, predicts, prints and writes bench/results/outcomes.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--max-tokens", type=int, default=40)
    parser.add_argument("--quick", action="store_true", help="two prompts, and nothing is written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    prompts = PROMPTS[:2] if args.quick else PROMPTS
    depths = {setting.fleet.num_draft_tokens for setting in SETTINGS}
    found: dict[tuple[Bits, str, int], Hits] = {}
    for bits in dict.fromkeys(setting.bits for setting in SETTINGS):
        pair = Pair(args.target, bits, prompts, args.max_tokens)
        for mode, sampling in MODES.items():
            for depth in sorted(depths):
                rounds = pair.rounds(replace(sampling, seed=_SEED), depth)
                found[bits, mode, depth] = hits(bits.value, mode, rounds)
    predicted = [
        predict(setting, found[setting.bits, mode, setting.fleet.num_draft_tokens], 10.0 if args.quick else 120.0)
        for setting in SETTINGS
        for mode in MODES
    ]
    measured = list(found.values())
    show(measured, predicted)
    if not args.quick:
        print(write_report("outcomes", {"measured": measured, "predicted": predicted}))


if __name__ == "__main__":
    main()
