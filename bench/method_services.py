"""Methods that build on the target's hidden states, through real services: one generation in either placement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.method_cases import MethodReport
from bench.near_ties import Tally
from paceline.benchmark.compare import Configuration, Equality
from paceline.benchmark.fleet_runs import Schedule, run_fleet
from paceline.benchmark.prompts import Prompt
from paceline.cli.drafting_options import Placement
from paceline.cli.fleet_options import FleetOptions

DEPTH = 4


def check_services(
    target: str,
    heads: Mapping[str, Path],
    prompt: Prompt,
    max_tokens: int,
    log_dir: Path,
    say: Callable[[str], object],
) -> tuple[list[MethodReport], Tally]:
    """Starts a fleet for each head and placement, which generates plainly and with drafts.

    Args:
        target: reference of the target.
        heads: checkpoints by method.
        prompt: what is generated from, greedily.
        max_tokens: new tokens.
        log_dir: for the logs of the services.
        say: told what came of each fleet.

    Raises:
        PacelineError: a fleet does not start, or a generation fails.
    """
    reports, tally = [], Tally()
    for method, head in heads.items():
        for placement in (Placement.VERIFIER, Placement.POOL):
            options = FleetOptions(
                model=target,
                method=method,
                head=str(head),
                placement=placement,
                num_speculative_tokens=DEPTH,
                port=0,
                http_port=0,
                log_dir=log_dir,
                cold_prompts=True,
            )
            report = asyncio.run(_check(options, prompt, max_tokens, tally))
            reports.append(report)
            say(
                f"{method} in the {placement.value} of a fleet: {'equal' if report.ids_equal else 'DIFFERENT'}, "
                f"{report.accepted} of {report.drafted} drafts accepted"
            )
    return reports, tally


async def _check(options: FleetOptions, prompt: Prompt, max_tokens: int, tally: Tally) -> MethodReport:
    way = Configuration(options.method, options.num_speculative_tokens)
    found = await run_fleet(options, [way], Schedule((prompt,), 1, max_tokens))
    run, verdict = found.runs[prompt.name, way][0], found.equalities[prompt.name, way][0]
    where = options.placement.value
    line = f"{options.method} in the {where} of a fleet ({prompt.name}): {verdict.value}"
    own = Tally(len(run.token_ids))
    if verdict is Equality.NEAR_TIE:
        own.near_ties.append(line)
    elif verdict is Equality.DIFFERENT:
        own.faults.append(line)
    tally.add(own)
    return MethodReport(
        method=options.method,
        placement=f"{where} of a fleet",
        shape="services' default",
        mode="greedy",
        batch=1,
        num_sessions=1,
        num_tokens=own.num_tokens,
        ids_equal=not own.faults,
        drafted=run.evidence.draft_tokens,
        accepted=run.evidence.accepted_tokens,
        tokens_per_pass=run.evidence.tokens_per_target_pass,
        near_ties=tuple(own.near_ties),
    )
