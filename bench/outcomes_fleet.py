"""Simulated devices with drafts prepared for likely outcomes, against the same fleet without.

Two fleets of real services, wire and Redis are there at the same time and take turns; the one that waits costs nothing.
The drafter's candidates agree with the target about as often as measured ones do (`bench/outcomes.py`).

    python -m bench.outcomes_fleet --seconds 10 --repeats 3
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench.report import write_report
from paceline.benchmark.scale import Run, ScalePlan, Way, run_way
from paceline.benchmark.scale_fleet import ScaleFleet, ScaleOptions
from paceline.benchmark.scale_meter import PHASES

CANDIDATES = 0.6
"""Where a candidate is not the target's token the next one is, in this share of cases."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of prepared outcomes.

    Attributes:
        prepared_outcomes: of a block.
        sessions: generations at once.
        tokens_per_second: median of the repeats.
        over_none: median of the quotients with the same repeat without prepared outcomes.
        middle: the repeat of median goodput.
    """

    prepared_outcomes: int
    sessions: int
    tokens_per_second: float
    over_none: float
    middle: Run


async def measure(outcomes: Sequence[int], plan: ScalePlan) -> list[Row]:
    """Starts a fleet for each number of outcomes, and lets them take turns.

    Args:
        outcomes: numbers of prepared outcomes, 0 first.
        plan: how many sessions, how long and how often.
    """
    way = Way("ahead", plan.options.num_speculative_tokens, ahead=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        fleets = {num: ScaleFleet(replace(plan.options, prepared_outcomes=num), Path(folder)) for num in outcomes}
        try:
            for fleet in fleets.values():
                await fleet.__aenter__()
                await fleet.delay(plan.rtts_ms[0])
            for sessions in plan.sessions:
                runs: dict[int, list[Run]] = {num: [] for num in outcomes}
                for repeat in range(plan.repeats):
                    for num in [*outcomes[repeat % len(outcomes) :], *outcomes[: repeat % len(outcomes)]]:
                        own = replace(plan, options=fleets[num].options)
                        runs[num].append(await run_way(fleets[num], own, sessions, plan.rtts_ms[0], way))
                rows += [_row(num, sessions, found, runs[outcomes[0]]) for num, found in runs.items()]
        finally:
            for fleet in fleets.values():
                await fleet.stop()
    return rows


def _row(num: int, sessions: int, found: Sequence[Run], none: Sequence[Run]) -> Row:
    ordered = sorted(found, key=lambda run: run.tokens_per_second)
    over = [run.tokens_per_second / base.tokens_per_second for run, base in zip(found, none, strict=True)]
    middle = ordered[len(ordered) // 2]
    return Row(num, sessions, middle.tokens_per_second, statistics.median(over), middle)


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="drafts prepared for likely outcomes, simulated devices")
    for heading in (
        "sessions",
        "outcomes",
        "tokens/s",
        "over none",
        "of ideal",
        "waits for drafts, ms",
        "drafter busy",
        "drafter CPU ms",
    ):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            str(row.sessions),
            str(row.prepared_outcomes),
            f"{row.tokens_per_second:.1f}",
            f"{row.over_none:.3f}",
            f"{row.middle.achieved:.2f}",
            f"{row.middle.phases_ms[PHASES.index('draft_wait')]:.1f}",
            f"{row.middle.drafter_busy:.2f}",
            f"{row.middle.cpu_ms_per_round.drafters:.2f}",
        )
    Console(width=140).print(table)


def main() -> None:
    """Measures, prints and writes bench/results/outcomes_fleet.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sessions", default="1,8")
    parser.add_argument("--outcomes", default="0,8")
    parser.add_argument("--dry", action="store_true", help="write nothing")
    args = parser.parse_args()
    sessions = tuple([int(num) for num in args.sessions.split(",")])
    options = ScaleOptions(max_sessions=max(sessions), candidates=CANDIDATES)
    plan = ScalePlan(options, sessions=sessions, seconds=args.seconds, repeats=args.repeats)
    outcomes = [int(num) for num in args.outcomes.split(",")]
    rows = asyncio.run(measure(outcomes, plan))
    show(rows)
    if not args.dry:
        print(write_report("outcomes_fleet", rows))


if __name__ == "__main__":
    main()
