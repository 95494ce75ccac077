"""`make bench-fleet`, third part: fleets of simulated devices, all that docs/benchmarks.md tells of them.

    python -m bench.fleet_scale                      # all cases, each of some minutes; writes bench/results/scale*.json
    python -m bench.fleet_scale --case many_8        # one of them
    python -m bench.fleet_scale --quick              # two seconds of each; writes nothing

Each case is a run of `paceline bench scale`, which measures any other.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from bench.pair import warn_if_busy
from bench.report import RESULTS, write_report
from paceline.benchmark.scale import ScalePlan, measure_scale
from paceline.benchmark.scale_fleet import ScaleOptions
from paceline.benchmark.scale_table import check_plotting, notes, plot_distances, scale_table
from paceline.cli.console import out, print_error
from paceline.engine.simulated.pass_time import PassTime
from paceline.errors import PacelineError
from paceline.exit_codes import exit_code

DISTANCE = "distance"
_TABLE_WIDTH = 160
_MANY = ScaleOptions(verifiers=4, drafters=2, max_sessions=64)
_MANY_WAYS = ("plain", "sequential", "ahead", "governed")
_SLOW = replace(_MANY, verify_pass=PassTime(120.0, 0.2), draft_pass=PassTime(12.0, 0.2))
_CROWD = replace(_MANY, max_sessions=256)

CASES: Mapping[str, ScalePlan] = {
    DISTANCE: ScalePlan(
        ScaleOptions(),
        sessions=(1,),
        rtts_ms=(0.0, 0.2, 1.0, 5.0, 20.0),
        ways=("plain", "one process", "sequential", "ahead"),
        seconds=8.0,
    ),
    "many": ScalePlan(_MANY, sessions=(64,), ways=_MANY_WAYS, seconds=6.0),
    "many_8": ScalePlan(replace(_MANY, num_speculative_tokens=8), sessions=(64,), ways=_MANY_WAYS, seconds=6.0),
    "many_slow": ScalePlan(_SLOW, sessions=(64,), ways=_MANY_WAYS, seconds=10.0, repeats=2),
    "crowd": ScalePlan(_CROWD, sessions=(256,), ways=_MANY_WAYS, seconds=10.0, repeats=1),
}
"""What is measured, by name: one session by distance, 64 with blocks of 4 and of 8 and on slower devices, and 256."""


def report_name(case: str) -> str:
    """Name of a case's file in bench/results, without its ending."""
    return "scale" if case == DISTANCE else f"scale_{case}"


def measure(case: str, plan: ScalePlan, console: Console, log_dir: Path, *, write: bool) -> None:
    """Measures a case and shows it.

    Args:
        case: its name.
        plan: what is measured.
        console: where to.
        log_dir: for the logs of the processes.
        write: the result, too.

    Raises:
        PacelineError: the fleet does not start, or a generation fails.
    """
    console.print(f"case {case}", style="bold")
    result = asyncio.run(measure_scale(plan, log_dir, lambda line: console.print(line, style="dim", markup=False)))
    wide = Console(width=max(console.width, _TABLE_WIDTH))
    wide.print(scale_table(result))
    for line in notes(result):
        wide.print(line, markup=False)
    if write:
        console.print(f"written to {write_report(report_name(case), result)}", markup=False)
        if case == DISTANCE:
            plot_distances(RESULTS / "scale.png", result.rows)


def main() -> int:
    """Entry point of `python -m bench.fleet_scale`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=tuple(CASES), action="append", help="only this one; may be given again")
    parser.add_argument("--log-dir", type=Path, default=Path("paceline-logs"))
    parser.add_argument("--quick", action="store_true", help="two seconds of each; writes nothing")
    arguments = parser.parse_args()
    console = out()
    warn_if_busy(console)
    try:
        check_plotting()
        for case in arguments.case or CASES:
            plan = replace(CASES[case], seconds=2.0, repeats=1) if arguments.quick else CASES[case]
            measure(case, plan, console, arguments.log_dir, write=not arguments.quick)
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
