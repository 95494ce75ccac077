"""`make bench`: speculative against plain decoding through the same services, and against transformers.generate.

    python -m bench.run            # all of it; some minutes; writes bench/results/speculation.json
    python -m bench.run --quick    # one block size, short texts; writes nothing

All ways take turns on the same prompts in one run, so that a busy machine disturbs them alike; still, measure on a
quiet one. Every ratio is the median over the prompts, each of which is the median over the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.report import write_report
from bench.run_tables import prompt_table, ratio_table, time_table
from bench.transformers_baseline import BaselineRun, run_baseline
from paceline.benchmark.compare import (
    PLAIN,
    Configuration,
    PromptFigures,
    WhereTimeGoes,
    where_time_goes,
)
from paceline.benchmark.fleet_runs import FleetRuns, Schedule, run_fleet
from paceline.benchmark.prompts import DEMO_PROMPTS, PROMPTS, Prompt
from paceline.cli.console import out, print_error
from paceline.cli.cores import available_cores, plan_cores
from paceline.cli.fleet_options import DEFAULT_MODEL, FleetOptions
from paceline.errors import PacelineError
from paceline.exit_codes import exit_code
from paceline.model_source import resolve

_BUSY_LOAD = 0.7
_TABLE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        options: the fleet; its method is replaced by each of `methods`.
        methods: drafting methods, each with a fleet of its own.
        block_sizes: draft tokens per block.
        prompts: what is generated from.
        repeats: how often each prompt is generated in each way.
        max_tokens: instead of each prompt's own length.
    """

    options: FleetOptions
    methods: tuple[str, ...]
    block_sizes: tuple[int, ...]
    prompts: tuple[Prompt, ...]
    repeats: int
    max_tokens: int | None

    @property
    def configurations(self) -> list[Configuration]:
        """The speculative ways to generate with one fleet."""
        return [Configuration(f"K={size}", size) for size in self.block_sizes]


@dataclass(frozen=True, slots=True)
class Row:
    """One method with one block size.

    Attributes:
        method: drafting methods.
        num_speculative_tokens: block size.
        ratio: to plain decoding through the same services.
        ratio_to_transformers: to transformers.generate in the same run; None when it was not measured.
        tokens_per_pass: mean over the prompts.
        acceptance: mean over the prompts.
        tokens_per_second: median over the prompts.
        where_time_goes: of the speculative runs.
        prompts: each prompt's own figures.
    """

    method: str
    num_speculative_tokens: int
    ratio: float
    ratio_to_transformers: float | None
    tokens_per_pass: float
    acceptance: float
    tokens_per_second: float
    where_time_goes: WhereTimeGoes
    prompts: tuple[PromptFigures, ...]


@dataclass(frozen=True, slots=True)
class Results:
    """What is written.

    Attributes:
        rows: one per method and block size.
        plain_tokens_per_second: median over the prompts, of all fleets.
        plain_where_time_goes: of the plain runs.
        transformers_tokens_per_second: median over the prompts; None when it was not measured.
        plain_equals_transformers: prompts whose plain tokens equal those of transformers.generate.
        num_prompts: prompts.
        repeats: repeats of each.
    """

    rows: tuple[Row, ...]
    plain_tokens_per_second: float
    plain_where_time_goes: WhereTimeGoes
    transformers_tokens_per_second: float | None
    plain_equals_transformers: int
    num_prompts: int
    repeats: int


async def measure_fleet(console: Console, plan: Plan, method: str) -> FleetRuns:
    """Starts a fleet with the method and lets all ways take turns on it."""
    return await run_fleet(
        replace(plan.options, method=method, num_speculative_tokens=plan.block_sizes[0]),
        plan.configurations,
        Schedule(plan.prompts, plan.repeats, plan.max_tokens),
        say=lambda line: console.print(f"{method}: {line}", style="dim"),
    )


def make_row(plan: Plan, method: str, way: Configuration, found: FleetRuns, baseline: dict[str, float]) -> Row:
    """Figures of one method with one block size."""
    figures = [found.figures(prompt.name, way) for prompt in plan.prompts]
    to_transformers = [
        figure.tokens_per_second / baseline[figure.prompt] for figure in figures if figure.prompt in baseline
    ]
    return Row(
        method=method,
        num_speculative_tokens=way.num_speculative_tokens,
        ratio=statistics.median([figure.ratio for figure in figures]),
        ratio_to_transformers=statistics.median(to_transformers) if to_transformers else None,
        tokens_per_pass=statistics.mean([figure.tokens_per_pass for figure in figures]),
        acceptance=statistics.mean([figure.acceptance for figure in figures]),
        tokens_per_second=statistics.median([figure.tokens_per_second for figure in figures]),
        where_time_goes=where_time_goes([run for prompt in plan.prompts for run in found.runs[prompt.name, way]]),
        prompts=tuple(figures),
    )


async def measure(console: Console, plan: Plan, *, with_transformers: bool) -> Results:
    """Runs everything: the fleets one after the other, and transformers.generate before, between and after."""
    baseline_runs: list[BaselineRun] = []

    async def baseline() -> None:
        if with_transformers:
            console.print("transformers.generate", style="dim")
            model_dir = str(resolve(plan.options.model))
            core = verifier_core()
            baseline_runs.extend(await run_baseline(model_dir, plan.prompts, core=core, max_tokens=plan.max_tokens))

    measured = {}
    for method in plan.methods:
        await baseline()
        measured[method] = await measure_fleet(console, plan, method)
    await baseline()
    speeds = _baseline_speeds(baseline_runs)
    plain = [run for found in measured.values() for prompt in plan.prompts for run in found.runs[prompt.name, PLAIN]]
    first = measured[plan.methods[0]]
    first_plain = {prompt.name: first.runs[prompt.name, PLAIN][0].token_ids for prompt in plan.prompts}
    return Results(
        rows=tuple(
            [
                make_row(plan, method, way, found, speeds)
                for method, found in measured.items()
                for way in plan.configurations
            ]
        ),
        plain_tokens_per_second=statistics.median([run.tokens_per_second for run in plain]),
        plain_where_time_goes=where_time_goes(plain),
        transformers_tokens_per_second=statistics.median(speeds.values()) if speeds else None,
        plain_equals_transformers=len(
            {run.prompt for run in baseline_runs if run.token_ids == first_plain[run.prompt]}
        ),
        num_prompts=len(plan.prompts),
        repeats=plan.repeats,
    )


def _baseline_speeds(runs: Sequence[BaselineRun]) -> dict[str, float]:
    by_prompt: dict[str, list[float]] = {}
    for run in runs:
        by_prompt.setdefault(run.prompt, []).append(run.tokens_per_second)
    return {prompt: statistics.median(speeds) for prompt, speeds in by_prompt.items()}


def verifier_core() -> int | None:
    """The first core that a fleet's verifier would get; None when nobody would be bound."""
    cores = plan_cores(available_cores(), verifiers=1, drafters=1).verifiers[0]
    return cores[0] if cores else None


def make_plan(arguments: argparse.Namespace) -> Plan:
    """The plan that the command line asks for."""
    prompts = DEMO_PROMPTS if arguments.prompts == "demo" else PROMPTS
    options = FleetOptions(model=arguments.model, port=0, http_port=0, log_dir=arguments.log_dir, cold_prompts=True)
    if arguments.quick:
        return Plan(options, ("draft_model",), (4,), DEMO_PROMPTS, 1, 48)
    return Plan(
        options=options,
        methods=tuple(arguments.methods.split(";")),
        block_sizes=tuple(int(size) for size in arguments.block_sizes.split(",")),
        prompts=prompts,
        repeats=arguments.repeats,
        max_tokens=arguments.max_tokens,
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument("--methods", default="draft_model;ngram,draft_model", help="fallback chains, separated by ;")
    parser.add_argument("--block-sizes", default="3,4,6,8", help="draft tokens per block, separated by commas")
    parser.add_argument("--prompts", choices=("demo", "all"), default="demo")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, help="instead of each prompt's own length")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers.generate out")
    parser.add_argument("--log-dir", type=Path, default=Path("paceline-logs"))
    parser.add_argument("--quick", action="store_true", help="one block size, short texts; writes nothing")
    return parser.parse_args(arguments)


def main() -> int:
    """Entry point of `python -m bench.run`."""
    arguments = parse_arguments()
    console = out()
    if (load := os.getloadavg()[0]) > _BUSY_LOAD:
        console.print(f"[yellow]warning:[/] the machine is busy (load {load:.1f}): the ratios will be too low")
    try:
        results = asyncio.run(measure(console, make_plan(arguments), with_transformers=not arguments.no_transformers))
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    wide = Console(width=max(console.width, _TABLE_WIDTH))
    for table in (ratio_table(results), prompt_table(results), time_table(results)):
        wide.print(table)
    if not arguments.quick:
        console.print(f"written to {write_report('speculation', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
