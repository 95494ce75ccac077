"""`paceline bench ...`: measures on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli import option_types as opt
from paceline.cli.fleet_options import DEFAULT_MODEL, FleetOptions

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
    if not quick:
        shown.print(f"written to {write_report('methods', result, out)}", markup=False)


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
