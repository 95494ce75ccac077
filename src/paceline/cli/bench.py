"""`paceline bench ...`: measures on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import option_types as opt
from paceline.cli.fleet_options import DEFAULT_MODEL, FleetOptions
from paceline.exit_codes import EXIT_FAILED

bench_app = typer.Typer(name="bench", no_args_is_help=True, help="Measures on this machine; wants a quiet one.")


@bench_app.callback()
def bench() -> None:
    """Measures on this machine; wants a quiet one."""


@bench_app.command()
def methods(
    model: opt.Model = DEFAULT_MODEL,
    method: Annotated[
        list[str] | None, typer.Option(help="Measure this method only, such as eagle3; may be given again.")
    ] = None,
    head: Annotated[
        list[str] | None,
        typer.Option(help="Checkpoint of a method, such as eagle3=FOLDER; may be given again. Default: the examples."),
    ] = None,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, help="Block size; the depth of a tree.")] = 4,
    eagle_topk: Annotated[int | None, typer.Option(min=1, help="Candidates per node of an EAGLE tree.")] = None,
    num_draft_tokens: Annotated[int | None, typer.Option(min=1, help="Most nodes of a tree.")] = None,
    exit_layer: Annotated[int | None, typer.Option(min=1, help="Layers of untrained layerskip.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each prompt in each way.")] = 3,
    prompts_per_kind: Annotated[int, typer.Option(min=1, help="Prompts of each kind.")] = 2,
    max_tokens: Annotated[int, typer.Option(min=8, help="Most tokens to generate.")] = 96,
    quick: Annotated[bool, typer.Option("--quick", help="One short run of each kind; writes nothing.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for methods.json.")] = Path("paceline-bench"),
    log_dir: opt.LogDir = Path("paceline-logs"),
) -> None:
    """Every way to draft against plain decoding, in one table: memory, time per round, acceptance, speed.

    Starts a fleet for each method and placement, one after the other, and lets it take turns with plain decoding on
    prompts of four kinds. Prints the table and writes it as JSON with machine and commit. About half an hour with all
    methods; some minutes with --quick.
    """
    from paceline.benchmark.contestants import METHODS, Field
    from paceline.benchmark.methods import QUICK, Effort, measure_methods
    from paceline.benchmark.methods_table import methods_table, notes
    from paceline.benchmark.report import write_report
    from paceline.cli.console import err
    from paceline.cli.console import out as console_out

    options = FleetOptions(
        model=model,
        num_speculative_tokens=num_speculative_tokens,
        eagle_topk=eagle_topk,
        num_draft_tokens=num_draft_tokens,
        exit_layer=exit_layer,
        port=0,
        http_port=0,
        log_dir=log_dir,
        cold_prompts=True,
    )
    field = Field(options, tuple(method or METHODS), _heads(head or []))
    effort = QUICK if quick else Effort(prompts_per_kind, repeats, max_tokens)
    console = err()
    result = asyncio.run(measure_methods(field, effort, lambda line: console.print(line, style="dim", markup=False)))
    shown = console_out()
    shown.width = max(shown.width, 140)
    shown.print(methods_table(result))
    for line in notes(result):
        shown.print(line, markup=False)
    if not result.rows:
        raise typer.Exit(EXIT_FAILED)
    if not quick:
        shown.print(f"written to {write_report('methods', result, out)}", markup=False)


@bench_app.command()
def scale(
    sessions: Annotated[
        list[int] | None, typer.Option(min=1, help="Generations at once; may be given again. Default: 1.")
    ] = None,
    verifiers: Annotated[int, typer.Option(min=1, help="Verifier processes.")] = 1,
    drafters: Annotated[int, typer.Option(min=1, help="Drafter processes.")] = 1,
    rtt_ms: Annotated[
        list[float] | None,
        typer.Option(
            min=0, help="Round trip between gateway and replicas, in milliseconds; may be given again. Default: 0.2."
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this way only; may be given again: plain, 'one process' (no service between; for one "
            "session), sequential, ahead, governed. Default: all."
        ),
    ] = None,
    acceptance: Annotated[float, typer.Option(min=0, max=1, help="How often a draft token is right.")] = 0.8,
    prepared_outcomes: Annotated[
        int,
        typer.Option(
            min=0,
            max=64,
            help="Other outcomes of a block that drafters draft after while it is judged, as they draft ahead.",
        ),
    ] = 0,
    candidates: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            help="With these, how often the drafter's next candidate is right where those before it are not.",
        ),
    ] = 0.6,
    num_speculative_tokens: Annotated[int, typer.Option(min=1, max=16, help="Block size.")] = 4,
    verify_ms: Annotated[float, typer.Option(min=0, help="A verifier's pass, in milliseconds.")] = 30.0,
    draft_ms: Annotated[float, typer.Option(min=0, help="A drafter's pass, in milliseconds.")] = 3.0,
    token_ms: Annotated[float, typer.Option(min=0, help="Each token of a pass beyond that, in milliseconds.")] = 0.05,
    seconds: Annotated[float, typer.Option(min=1, help="How long each way of each case is counted.")] = 10.0,
    repeats: Annotated[int, typer.Option(min=1, help="Of each case; ways take turns.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for scale.json.")] = Path("paceline-bench"),
    plot: Annotated[
        Path | None, typer.Option(help="PNG file: goodput over the round trip, of the first number of sessions.")
    ] = None,
    log_dir: opt.LogDir = Path("paceline-logs"),
) -> None:
    """A fleet of simulated devices against its ideal: what gateway, wire and Redis cost, without a GPU.

    Services, wire and Redis are real processes; a pass only takes a stated time, and drafts are right at a stated rate.
    Prints goodput, its share of what the same devices could reach without any software, and the processor time of each
    part per round, and writes them as JSON. The machine should be quiet and have a core for the gateway.
    """
    from paceline.benchmark.report import write_report
    from paceline.benchmark.scale import WAYS, ScalePlan, measure_scale
    from paceline.benchmark.scale_fleet import ScaleOptions
    from paceline.benchmark.scale_table import check_plotting, notes, plot_distances, scale_table
    from paceline.cli.console import err
    from paceline.cli.console import out as console_out
    from paceline.engine.simulated.pass_time import PassTime

    numbers = tuple(sessions or [1])
    options = ScaleOptions(
        verifiers=verifiers,
        drafters=drafters,
        max_sessions=max(numbers),
        num_speculative_tokens=num_speculative_tokens,
        acceptance=acceptance,
        candidates=candidates if prepared_outcomes else 0.0,
        prepared_outcomes=prepared_outcomes,
        verify_pass=PassTime(verify_ms, token_ms),
        draft_pass=PassTime(draft_ms, token_ms),
    )
    plan = ScalePlan(options, numbers, tuple(rtt_ms or [0.2]), tuple(way or WAYS), seconds, repeats)
    plan.check()
    if plot is not None:
        check_plotting()
    console = err()
    result = asyncio.run(measure_scale(plan, log_dir, lambda line: console.print(line, style="dim", markup=False)))
    shown = console_out()
    shown.width = max(shown.width, 160)
    shown.print(scale_table(result))
    for line in notes(result):
        shown.print(line, markup=False)
    shown.print(f"written to {write_report('scale', result, out)}", markup=False)
    if plot is not None:
        plot_distances(plot, [row for row in result.rows if row.sessions == numbers[0]])
        shown.print(f"plotted in {plot}", markup=False)


def _heads(given: list[str]) -> dict[str, str]:
    """Folders by method.

    Raises:
        InvalidArgument: one is not METHOD=FOLDER.
    """
    from paceline.errors import InvalidArgument

    heads = {}
    for pair in given:
        name, equals, folder = pair.partition("=")
        if not (name and equals and folder):
            raise InvalidArgument(f"--head {pair}: say METHOD=FOLDER, such as eagle3=my-head", field="head")
        heads[name] = folder
    return heads
