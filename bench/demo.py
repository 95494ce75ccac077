"""`make demo`: a real model behind a real fleet on this machine, with and without speculation.

Fetches and converts the model, starts Redis, verifier, drafter and gateway, streams four prompts of different kinds
both ways through the same services, shows that the texts are equal, prints what was measured and stops everything. Exit
code 0 says that all texts were equal.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from paceline.benchmark.compare import (
    PLAIN,
    Configuration,
    Equality,
    PromptFigures,
    equality,
    prompt_figures,
    request_for,
)
from paceline.benchmark.prompts import DEMO_PROMPTS, Prompt
from paceline.cli.console import out, print_error
from paceline.cli.display import Display
from paceline.cli.fleet import Fleet
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.generate import stream
from paceline.cli.render import legend
from paceline.client import AsyncClient
from paceline.errors import PacelineError
from paceline.exit_codes import exit_code

_MARKS = {
    Equality.EQUAL: ("equal", "green"),
    Equality.NEAR_TIE: ("equal up to a near-tie", "yellow"),
    Equality.DIFFERENT: ("DIFFERENT", "bold red"),
}


async def run_demo(options: FleetOptions, prompts: Sequence[Prompt], max_tokens: int | None) -> bool:
    """Runs the demo; whether all texts were equal."""
    console = out()
    console.print(Rule("starting a fleet on this machine"))
    with Display() as display:
        fleet = Fleet(options, display)
        await _start(fleet)
    try:
        addresses = fleet.addresses
        console.print(
            f"gateway {addresses.gateway}, verifier {addresses.verifiers[0]}, drafter {addresses.drafters[0]}, "
            f"{addresses.redis}",
            style="dim",
        )
        async with AsyncClient(addresses.gateway) as client:
            figures = await _compare_all(console, client, options, prompts, max_tokens)
    finally:
        await fleet.stop()
        console.print("Everything is stopped.", style="dim")
    console.print(figures_table(figures))
    console.print(verdict(figures))
    return all(figure.equality is not Equality.DIFFERENT for figure in figures)


async def _start(fleet: Fleet) -> None:
    try:
        await fleet.start()
    except BaseException:
        await fleet.stop()
        raise


async def _compare_all(
    console: Console, client: AsyncClient, options: FleetOptions, prompts: Sequence[Prompt], max_tokens: int | None
) -> list[PromptFigures]:
    speculation = Configuration("speculative", options.num_speculative_tokens)
    for configuration in (PLAIN, speculation):
        await _warm_up(client, prompts[0], configuration)
    figures = []
    for prompt in prompts:
        console.print(Rule(f"{prompt.kind}: {_first_line(prompt.text)}"))
        console.print("plain decoding", style="bold")
        plain = await stream(client, request_for(prompt, PLAIN, max_tokens), colour=False)
        console.print("with speculation", style="bold", end="")
        console.print(Text(": ").append(legend()) if console.is_terminal else "")
        fast = await stream(client, request_for(prompt, speculation, max_tokens), colour=True, explain=False)
        verdict_here = await equality(client, prompt, plain, fast, max_tokens)
        console.print(Text(f"the two texts are {_MARKS[verdict_here][0]}", _MARKS[verdict_here][1]))
        figures.append(prompt_figures(prompt.kind.replace("_", " "), [plain], [fast], [verdict_here]))
    return figures


async def _warm_up(client: AsyncClient, prompt: Prompt, configuration: Configuration) -> None:
    """The first passes of a process allocate memory; that is no property of either way to decode."""
    async for _event in client.generate(request_for(prompt, configuration, 16)):
        pass


def _first_line(text: str) -> str:
    line = text.splitlines()[0]
    return line if len(line) <= 70 else line[:69] + "…"


def figures_table(figures: Sequence[PromptFigures]) -> Table:
    """The demo's table."""
    table = Table(title="greedy, the same services both ways", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    table.add_column("prompt", no_wrap=True)
    for heading in ("tokens", "tokens/pass", "acceptance", "tok/s\nplain", "tok/s\nspeculative", "ratio"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("texts")
    for figure in figures:
        table.add_row(
            figure.prompt,
            str(figure.tokens),
            f"{figure.tokens_per_pass:.2f}",
            f"{figure.acceptance:.0%}",
            f"{figure.plain_tokens_per_second:.1f}",
            f"{figure.tokens_per_second:.1f}",
            f"{figure.ratio:.2f}x",
            Text(figure.equality.value, _MARKS[figure.equality][1]),
        )
    return table


def verdict(figures: Sequence[PromptFigures]) -> str:
    """The demo's last line."""
    ratio = statistics.median([figure.ratio for figure in figures])
    different = [figure.prompt for figure in figures if figure.equality is Equality.DIFFERENT]
    if different:
        return f"The texts differ for {', '.join(different)}: that is a bug, please report it."
    return f"All {len(figures)} texts are equal; speculation was {ratio:.2f} times as fast (median)."


def main() -> int:
    """Entry point of `python -m bench.demo`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="draft tokens per block")
    parser.add_argument("--max-tokens", type=int, help="instead of each prompt's own length")
    parser.add_argument("--log-dir", type=Path, default=Path("paceline-logs"), help="folder of the services' logs")
    arguments = parser.parse_args()
    options = FleetOptions(
        num_speculative_tokens=arguments.num_speculative_tokens,
        port=0,
        http_port=0,
        log_dir=arguments.log_dir,
        cold_prompts=True,  # the second of the two ways must not find the rows of the first
    )
    try:
        return 0 if asyncio.run(run_demo(options, DEMO_PROMPTS, arguments.max_tokens)) else 1
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
