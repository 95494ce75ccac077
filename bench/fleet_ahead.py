"""`make bench-fleet`, second part: what drafting ahead gains with the real pair, one core for each of the two.

    python -m bench.fleet_ahead                     # some minutes; writes bench/results/fleet_ahead.json
    python -m bench.fleet_ahead --quick             # four prompts, short texts; writes nothing
    python -m bench.fleet_ahead --block-sizes 3,4,6

Each prompt is decoded greedily, one session at a time, in all ways in turn: plainly, with blocks that are drafted when
the verdict on the one before has come, with blocks drafted ahead while it is made, and as the governor chooses. Tokens
must be those of plain decoding.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.console import Console
from rich.table import Table

from bench.pair import Door, Pair, pair_options, pair_parser, running_pair, warn_if_busy
from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from paceline.benchmark.compare import Configuration, Equality, equality, request_for
from paceline.benchmark.prompts import DEMO_PROMPTS, PROMPTS, Prompt
from paceline.cli.console import out, print_error
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.request import Completion, RequestOptions, complete
from paceline.errors import PacelineError
from paceline.exit_codes import exit_code
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest

_GOVERNED = "governed"
_WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Way:
    """A way to generate.

    Attributes:
        name: for tables.
        size: block size; 0 decodes plainly, None leaves it to the governor.
        ahead: which gateway serves it.
    """

    name: str
    size: int | None
    ahead: bool = False

    def door(self, pair: Pair) -> Door:
        """The gateway that serves it."""
        return pair.ahead if self.ahead else pair.in_turn

    def request(self, prompt: Prompt, max_tokens: int) -> GenerationRequest:
        """The greedy request for a prompt."""
        if self.size is not None:
            return request_for(prompt, Configuration(self.name, self.size), max_tokens)
        return RequestOptions(max_tokens=max_tokens).request(ChatPrompt((ChatMessage("user", prompt.text),)))


_PLAIN = Way("plain", 0)


def ways(block_sizes: Sequence[int]) -> list[Way]:
    """All ways, plain decoding first."""
    found = [_PLAIN]
    for size in block_sizes:
        found += [Way(f"in turn, {size}", size), Way(f"ahead, {size}", size, ahead=True)]
    return [*found, Way(_GOVERNED, None, ahead=True)]


@dataclass(frozen=True, slots=True)
class Row:
    """One way over all prompts.

    Attributes:
        way: its name.
        tokens_per_second: of all prompts together.
        to_plain: quotient of these; `to_plain_median`: median over the prompts.
        decoding_to_plain: the same after the first token, so without reading the prompts.
        tokens_per_pass: of all prompts together.
        acceptance: accepted drafts divided by judged ones.
        ahead_hits: share of rounds whose block had been drafted ahead.
        off_rounds: share of rounds that the governor decided to decode plainly.
        round_ms, verify_ms, draft_wait_ms, draft_ms, rest_ms: per round: all of it; of that, in the verifier; waiting
            for the drafter; in the drafter, beside the verifier when ahead; neither judged nor waited.
        different: prompts whose tokens differ from plain decoding's, near-ties aside.
        prompts_to_plain: quotient for each prompt.
    """

    way: str
    tokens_per_second: float
    to_plain: float
    to_plain_median: float
    decoding_to_plain: float
    tokens_per_pass: float
    acceptance: float
    ahead_hits: float
    off_rounds: float
    round_ms: float
    verify_ms: float
    draft_wait_ms: float
    draft_ms: float
    rest_ms: float
    different: int
    prompts_to_plain: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Results:
    """What is written.

    Attributes:
        model: the target.
        max_tokens: of each prompt.
        prompts: how many.
        repeats: of each.
        rows: one per way.
        ratios: of goodput over all prompts.
    """

    model: str
    max_tokens: int
    prompts: int
    repeats: int
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is generated.

    Attributes:
        prompts: from which.
        max_tokens: of each.
        repeats: of each prompt in each way.
    """

    prompts: tuple[Prompt, ...]
    max_tokens: int
    repeats: int


async def measure(console: Console, options: FleetOptions, block_sizes: Sequence[int], effort: Effort) -> Results:
    """Starts the fleet, lets the ways take turns, and stops it."""
    all_ways = ways(block_sizes)
    runs: dict[str, list[Completion]] = {way.name: [] for way in all_ways}
    different = dict.fromkeys(runs, 0)
    async with running_pair(options) as pair:
        for way in all_ways:
            # The first passes of a process allocate memory, and the governor knows nothing of its replicas yet.
            await complete(way.door(pair).client, way.request(effort.prompts[0], _WARM_UP_TOKENS))
        for repeat in range(effort.repeats):
            for number, prompt in enumerate(effort.prompts):
                console.print(f"{prompt.name}, {repeat + 1} of {effort.repeats}", style="dim")
                first = (repeat + number) % len(all_ways)
                for way in (*all_ways[first:], *all_ways[:first]):
                    request = way.request(prompt, effort.max_tokens)
                    runs[way.name].append(await complete(way.door(pair).client, request))
                plain = runs[_PLAIN.name][-1]
                for way in all_ways[1:]:
                    found = await equality(pair.in_turn.client, prompt, plain, runs[way.name][-1], effort.max_tokens)
                    different[way.name] += found is Equality.DIFFERENT
    rows = {way.name: _row(way.name, runs, different, effort) for way in all_ways}
    return Results(
        options.model,
        effort.max_tokens,
        len(effort.prompts),
        effort.repeats,
        tuple(rows.values()),
        _ratios(rows, block_sizes),
    )


def _row(way: str, runs: Mapping[str, Sequence[Completion]], different: Mapping[str, int], effort: Effort) -> Row:
    found, plain = runs[way], runs[_PLAIN.name]
    rounds = sum(run.evidence.target_passes for run in found)
    judged = sum(run.evidence.draft_tokens for run in found)

    def per_round(name: str) -> float:
        values: list[float] = [getattr(run.evidence, name) for run in found]
        return sum(values) / rounds

    quotients: dict[str, list[float]] = {}
    names = [prompt.name for _ in range(effort.repeats) for prompt in effort.prompts]
    for name, run, base in zip(names, found, plain, strict=True):
        quotients.setdefault(name, []).append(run.tokens_per_second / base.tokens_per_second)
    by_prompt = {name: statistics.median(values) for name, values in quotients.items()}
    round_ms, verify_ms, wait_ms = per_round("total_ms"), per_round("verify_ms"), per_round("draft_wait_ms")
    return Row(
        way=way,
        tokens_per_second=_speed(found),
        to_plain=_speed(found) / _speed(plain),
        to_plain_median=statistics.median(by_prompt.values()),
        decoding_to_plain=_decoding_speed(found) / _decoding_speed(plain),
        tokens_per_pass=sum(len(run.token_ids) for run in found) / rounds,
        acceptance=sum(run.evidence.accepted_tokens for run in found) / max(judged, 1),
        ahead_hits=per_round("ahead_hits"),
        off_rounds=per_round("off_rounds"),
        round_ms=round_ms,
        verify_ms=verify_ms,
        draft_wait_ms=wait_ms,
        draft_ms=per_round("draft_ms"),
        rest_ms=round_ms - verify_ms - wait_ms,
        different=different[way],
        prompts_to_plain=by_prompt,
    )


def _speed(runs: Sequence[Completion]) -> float:
    return sum(len(run.token_ids) for run in runs) / sum(run.evidence.total_ms / 1e3 for run in runs)


def _decoding_speed(runs: Sequence[Completion]) -> float:
    """Tokens per second after the first token."""
    seconds = sum(run.evidence.total_ms - run.evidence.time_to_first_token_ms for run in runs) / 1e3
    return sum(len(run.token_ids) - 1 for run in runs) / seconds


def _ratios(rows: Mapping[str, Row], block_sizes: Sequence[int]) -> tuple[Ratio, ...]:
    """Of each block size; the best of both ways besides, as each might have a size of its own."""
    speed = {name: row.tokens_per_second for name, row in rows.items()}
    in_turn, ahead = ([speed[f"{way}, {size}"] for size in block_sizes] for way in ("in turn", "ahead"))
    each = [
        Ratio(f"ahead / in turn, blocks of {size}", one / other, at_least=1.5)
        for size, one, other in zip(block_sizes, ahead, in_turn, strict=True)
    ]
    plain = speed[_PLAIN.name]
    decoding = [
        Ratio(
            f"ahead / in turn after the first token, blocks of {size}",
            rows[f"ahead, {size}"].decoding_to_plain / rows[f"in turn, {size}"].decoding_to_plain,
        )
        for size in block_sizes
    ]
    fastest = max(rows[f"ahead, {size}"].decoding_to_plain for size in block_sizes)
    best = [Ratio("best ahead / best in turn", max(ahead) / max(in_turn))] if len(block_sizes) > 1 else []
    return (
        *each,
        *best,
        Ratio("best ahead / plain", max(ahead) / plain, at_least=2.0),
        *decoding,
        Ratio("best ahead / plain after the first token", fastest),
        Ratio("governed / plain", speed[_GOVERNED] / plain),
        Ratio("governed / best of the others", speed[_GOVERNED] / max(*ahead, *in_turn, plain)),
    )


def show(results: Results) -> None:
    """Prints the table and the ratios."""
    table = Table(
        title=f"{results.model}, one session, {results.prompts} prompts of {results.max_tokens} tokens",
        caption="To plain: of all prompts together, median over the prompts, and without reading the prompts. Times "
        "are milliseconds per round: round = verify + wait + rest, and draft is beside them.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("way", no_wrap=True)
    headings = (
        "tokens/s",
        "to plain",
        "median",
        "after\nfirst",
        "tokens\n/pass",
        "accepted",
        "ahead\nhits",
        "round",
        "verify",
        "wait",
    )
    for heading in (*headings, "draft", "rest", "different"):
        table.add_column(heading, justify="right")
    for row in results.rows:
        quotients = (row.to_plain, row.to_plain_median, row.decoding_to_plain)
        figures = (*quotients, row.tokens_per_pass, row.acceptance, row.ahead_hits)
        times = (row.round_ms, row.verify_ms, row.draft_wait_ms, row.draft_ms, row.rest_ms)
        cells = [f"{row.tokens_per_second:.1f}", *(f"{value:.2f}" for value in figures)]
        table.add_row(row.way, *cells, *(f"{value:.1f}" for value in times), str(row.different))
    Console(width=140).print(table)
    show_ratios("drafting ahead, all prompts", results.ratios)


def main() -> int:
    """Entry point of `python -m bench.fleet_ahead`."""
    parser = pair_parser(__doc__, repeats=1, quick="four prompts, short texts")
    parser.add_argument("--block-sizes", default="3", help="draft tokens per block, separated by commas")
    parser.add_argument("--governed-up-to", type=int, default=8, help="largest block that the governor may choose")
    parser.add_argument("--prompts", choices=("demo", "all"), default="all")
    arguments = parser.parse_args()
    console = out()
    warn_if_busy(console)
    prompts = DEMO_PROMPTS if arguments.quick or arguments.prompts == "demo" else PROMPTS
    effort = Effort(prompts, 32, 1) if arguments.quick else Effort(prompts, arguments.max_tokens, arguments.repeats)
    options = replace(pair_options(arguments), num_speculative_tokens=arguments.governed_up_to)
    block_sizes = [int(size) for size in arguments.block_sizes.split(",")]
    try:
        found = asyncio.run(measure(console, options, block_sizes, effort))
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    show(found)
    if not arguments.quick:
        console.print(f"written to {write_report('fleet_ahead', found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
