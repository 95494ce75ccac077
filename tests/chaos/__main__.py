"""`python -m tests.chaos`: the long form of the chaos suite. Exit status 1 where anything is wrong."""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import sys
import tempfile
from pathlib import Path

from bench.report import write_report
from tests.chaos.run import ChaosOptions, run


def main() -> int:
    """Runs with the command line's options; keeps the logs where something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=180.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=None, help="of faults and conversations; drawn if not given")
    parser.add_argument("--streams", type=int, default=40, help="streams that are open at any time")
    parser.add_argument(
        "--no-blackout", action="store_true", help="never kill all verifiers for longer than clients wait"
    )
    parser.add_argument("--no-result", action="store_true", help="do not write bench/results/chaos.json")
    given = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if given.seed is None else given.seed
    options = ChaosOptions(seed, given.seconds, given.streams, blackout=not given.no_blackout, verbose=True)
    print(f"seed {seed}: repeat with --seed {seed}", flush=True)
    folder = Path(tempfile.mkdtemp(prefix="paceline-chaos-"))
    report = asyncio.run(run(options, folder))
    for line in report.lines():
        print(line)
    if report.passed:
        shutil.rmtree(folder)
    else:
        print(f"logs: {folder}")
    if not given.no_result:
        print(write_report("chaos", report))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
