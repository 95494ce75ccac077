"""`make bench-fleet`, first part: what gateway, gRPC and Redis cost beside the same rounds in one process.

    python -m bench.fleet            # some minutes; writes bench/results/fleet.json
    python -m bench.fleet --quick    # once, short texts; writes nothing

Prompts are decoded greedily, one session at a time: plainly and with blocks through the fleet, and the same in one
process that calls the engine and the drafter directly. Both run the same rounds, which is checked: same tokens, same
number of passes, same number of judged drafts. All ways take turns, each run goes over all prompts, and figures are
medians over the runs. The fleet's time is the client's, from the request to the last message.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console
from rich.table import Table

from bench.lossless import chat_prompts
from bench.one_process import LocalJob, OneProcess, one_process
from bench.pair import Door, pair_options, pair_parser, running_pair, warn_if_busy
from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from bench.run import verifier_core
from paceline.benchmark.prompts import PROMPTS, Prompt
from paceline.cli.console import out, print_error
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.prepare import prepare
from paceline.cli.request import complete
from paceline.errors import PacelineError
from paceline.exit_codes import exit_code
from paceline.messages import SamplingParams
from paceline.text.request import GenerationRequest, SpeculationOptions, TokenPrompt

FLEET, PROCESS, AHEAD, FLEET_PLAIN, PROCESS_PLAIN = (
    "fleet, in turn",
    "one process, in turn",
    "fleet, ahead",
    "fleet, plain",
    "one process, plain",
)
WAYS = (FLEET, PROCESS, AHEAD, FLEET_PLAIN, PROCESS_PLAIN)
# Short ones: a drafter that reads a long prompt is late for the first rounds, which are plain then, and others.
_PROMPTS = ("chat_sky", "code_primes")
_METRIC = "paceline_round_overhead_seconds"
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Generated:
    """One prompt in one way.

    Attributes:
        token_ids: new tokens.
        seconds: from the request to the end.
        verify_s: of these, in the verifier; the rest of a pass in one process.
        draft_s: in the drafter; ahead it runs beside the verifier.
        rounds: passes of the target.
        draft_tokens: tokens that were judged.
    """

    token_ids: tuple[int, ...]
    seconds: float
    verify_s: float
    draft_s: float
    rounds: int
    draft_tokens: int


@dataclass(frozen=True, slots=True)
class Row:
    """One way.

    Attributes:
        way: one of `WAYS`.
        tokens_per_second: of all prompts together, median over the runs.
        round_ms: mean time of a round, median over the runs, like the next ones.
        verify_ms: of a round, in the verifier.
        draft_ms: of a round, in the drafter.
        rest_ms: of a round in turn, what is neither: gateway, wire, store and client.
    """

    way: str
    tokens_per_second: float
    round_ms: float
    verify_ms: float
    draft_ms: float
    rest_ms: float


@dataclass(frozen=True, slots=True)
class Results:
    """What is written.

    Attributes:
        model: the target.
        num_draft_tokens: block size.
        max_tokens: of each prompt.
        prompts: their names.
        repeats: runs of each way.
        same_rounds: generations whose tokens, passes and drafts equal those in one process.
        generations: that were compared.
        rows: one per way.
        overhead_p50_ms: median over rounds of wire, gateway and store, drafting in turn; by the gateway's metrics.
        overhead_p50_ahead_ms: the same drafting ahead, where drafts are on their way meanwhile.
        ratios: goodput of the fleet to one process; median of the runs' quotients.
    """

    model: str
    num_draft_tokens: int
    max_tokens: int
    prompts: tuple[str, ...]
    repeats: int
    same_rounds: int
    generations: int
    rows: tuple[Row, ...]
    overhead_p50_ms: float
    overhead_p50_ahead_ms: float
    ratios: tuple[Ratio, ...]


def short_prompts() -> list[Prompt]:
    """What is generated from."""
    return [prompt for prompt in PROMPTS if prompt.name in _PROMPTS]


class Turns:
    """Generates in each way.

    Args:
        in_turn, ahead: gateways of one fleet.
        process: target and drafter without a fleet.
        num_draft_tokens: block size.
        max_tokens: of each prompt.
    """

    def __init__(self, in_turn: Door, ahead: Door, process: OneProcess, num_draft_tokens: int, max_tokens: int) -> None:
        self._doors = {FLEET: in_turn, FLEET_PLAIN: in_turn, AHEAD: ahead}
        self._process = process
        self._num_draft_tokens = num_draft_tokens
        self._max_tokens = max_tokens

    async def generate(self, way: str, prompt: tuple[int, ...]) -> Generated:
        """One prompt in one way."""
        size = 0 if way in (FLEET_PLAIN, PROCESS_PLAIN) else self._num_draft_tokens
        if way in self._doors:
            return await self._fleet(self._doors[way], prompt, size)
        run = await self._process.run(LocalJob(prompt, self._max_tokens, size))
        verify_s = run.seconds - run.draft_seconds
        return Generated(run.token_ids, run.seconds, verify_s, run.draft_seconds, run.rounds, run.draft_tokens)

    async def _fleet(self, door: Door, prompt: tuple[int, ...], size: int) -> Generated:
        request = GenerationRequest(
            TokenPrompt(prompt),
            sampling=SamplingParams(temperature=0.0),
            max_tokens=self._max_tokens,
            speculation=SpeculationOptions(size > 0, "", size),
        )
        began = time.perf_counter()
        found = await complete(door.client, request)
        seconds = time.perf_counter() - began
        evidence = found.evidence
        return Generated(
            found.token_ids,
            seconds,
            evidence.verify_ms / 1e3,
            evidence.draft_ms / 1e3,
            evidence.target_passes,
            evidence.draft_tokens,
        )


async def measure(console: Console, options: FleetOptions, size: int, max_tokens: int, repeats: int) -> Results:
    """Starts everything, lets the ways take turns, and stops it."""
    prepared = await prepare(options.model, bits=options.copy_bits, draft_model="", progress=console.print)
    ids = chat_prompts(Path(prepared.target_dir), [prompt.text for prompt in short_prompts()])
    runs: dict[str, list[list[Generated]]] = {way: [] for way in WAYS}
    async with AsyncExitStack() as stack:
        pair = await stack.enter_async_context(running_pair(options))
        process = await stack.enter_async_context(
            one_process(prepared.target_dir, prepared.drafter_dir, core=verifier_core())
        )
        turns = Turns(pair.in_turn, pair.ahead, process, size, max_tokens)
        for way in WAYS:
            await turns.generate(way, ids[0])  # the first passes of a process allocate memory
        before = [await _buckets(door) for door in (pair.in_turn, pair.ahead)]
        for repeat in range(repeats):
            console.print(f"run {repeat + 1} of {repeats}", style="dim")
            for way in WAYS:
                runs[way].append([])
            for number, prompt in enumerate(ids):
                first = (repeat + number) % len(WAYS)
                for way in (*WAYS[first:], *WAYS[:first]):
                    runs[way][-1].append(await turns.generate(way, prompt))
        after = [await _buckets(door) for door in (pair.in_turn, pair.ahead)]
    p50 = [1e3 * quantile(_minus(late, early), 0.5) for early, late in zip(before, after, strict=True)]
    return results(options.model, size, max_tokens, runs, p50[0], p50[1])


def results(
    model: str,
    size: int,
    max_tokens: int,
    runs: Mapping[str, Sequence[Sequence[Generated]]],
    p50: float,
    p50_ahead: float,
) -> Results:
    """Figures of all runs.

    Args:
        model: the target.
        size: block size.
        max_tokens: of each prompt.
        runs: by way; for each repeat what was generated from each prompt.
        p50: overhead of a round in turn, in ms.
        p50_ahead: ahead.
    """
    pairs = [
        (one, other)
        for left, right in ((FLEET, PROCESS), (FLEET_PLAIN, PROCESS_PLAIN))
        for ones, others in zip(runs[left], runs[right], strict=True)
        for one, other in zip(ones, others, strict=True)
    ]
    speeds = {way: [_speed(run) for run in found] for way, found in runs.items()}

    def ratio(way: str, other: str) -> float:
        return statistics.median([one / two for one, two in zip(speeds[way], speeds[other], strict=True)])

    return Results(
        model=model,
        num_draft_tokens=size,
        max_tokens=max_tokens,
        prompts=tuple(prompt.name for prompt in short_prompts()),
        repeats=len(runs[FLEET]),
        same_rounds=sum(_rounds(one) == _rounds(other) for one, other in pairs),
        generations=len(pairs),
        rows=tuple(_row(way, runs[way], speeds[way]) for way in WAYS),
        overhead_p50_ms=p50,
        overhead_p50_ahead_ms=p50_ahead,
        ratios=(
            Ratio("fleet / one process, same rounds", ratio(FLEET, PROCESS), at_least=0.9),
            Ratio("fleet / one process, plain decoding", ratio(FLEET_PLAIN, PROCESS_PLAIN), at_least=0.9),
            Ratio("fleet that drafts ahead / one process", ratio(AHEAD, PROCESS), at_least=0.9),
            Ratio("overhead of a round in turn, p50, ms", p50, at_most=3.0),
            Ratio("overhead of a round ahead, p50, ms", p50_ahead, at_most=3.0),
        ),
    )


def _rounds(run: Generated) -> tuple[tuple[int, ...], int, int]:
    return run.token_ids, run.rounds, run.draft_tokens


def _speed(run: Sequence[Generated]) -> float:
    return sum(len(each.token_ids) for each in run) / sum(each.seconds for each in run)


def _row(way: str, runs: Sequence[Sequence[Generated]], speeds: Sequence[float]) -> Row:
    def per_round_ms(seconds: Sequence[Sequence[float]]) -> float:
        sums = [sum(run) / sum(each.rounds for each in found) for run, found in zip(seconds, runs, strict=True)]
        return 1e3 * statistics.median(sums)

    rest = [[each.seconds - each.verify_s - each.draft_s for each in run] for run in runs]
    return Row(
        way,
        statistics.median(speeds),
        per_round_ms([[each.seconds for each in run] for run in runs]),
        per_round_ms([[each.verify_s for each in run] for run in runs]),
        per_round_ms([[each.draft_s for each in run] for run in runs]),
        0.0 if way == AHEAD else per_round_ms(rest),
    )


async def _buckets(door: Door) -> dict[float, float]:
    """Observations by upper bound, of rounds with a block."""

    def fetch() -> dict[float, float]:
        with urllib.request.urlopen(door.metrics, timeout=_TIMEOUT_S) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            float(sample.labels["le"]): sample.value
            for family in families
            for sample in family.samples
            if sample.name == f"{_METRIC}_bucket" and sample.labels["method"] != "none"
        }

    return await asyncio.to_thread(fetch)


def _minus(late: Mapping[float, float], early: Mapping[float, float]) -> dict[float, float]:
    return {bound: count - early.get(bound, 0.0) for bound, count in late.items()}


def quantile(buckets: Mapping[float, float], share: float) -> float:
    """A quantile of a cumulative histogram, as Prometheus reckons it: evenly spread within a bucket.

    Args:
        buckets: observations at most as large as each bound.
        share: from 0 to 1.
    """
    wanted = share * max(buckets.values(), default=0.0)
    low, below = 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= wanted and count > below:
            return low if bound == float("inf") else low + (bound - low) * (wanted - below) / (count - below)
        low, below = bound, count
    return 0.0


def show(results: Results) -> None:
    """Prints the table and the ratios."""
    table = Table(
        title=f"{results.model}, one session, blocks of {results.num_draft_tokens}, median of {results.repeats} runs",
        caption=f"{results.same_rounds} of {results.generations} generations have the tokens, passes and drafts of one "
        "process. Times are milliseconds per round.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
    )
    table.add_column("way")
    for heading in ("tokens/s", "round", "verify", "draft", "rest"):
        table.add_column(heading, justify="right")
    for row in results.rows:
        rest = f"{row.rest_ms:.2f}" if row.rest_ms else ""
        times = (f"{row.round_ms:.1f}", f"{row.verify_ms:.1f}", f"{row.draft_ms:.1f}", rest)
        table.add_row(row.way, f"{row.tokens_per_second:.1f}", *times)
    Console(width=120).print(table)
    show_ratios("one session", results.ratios)


def main() -> int:
    """Entry point of `python -m bench.fleet`."""
    parser = pair_parser(__doc__, repeats=5, quick="once, short texts")
    parser.add_argument("--block-size", type=int, default=4, help="draft tokens per block")
    arguments = parser.parse_args()
    console = out()
    warn_if_busy(console)
    max_tokens, repeats = (32, 1) if arguments.quick else (arguments.max_tokens, arguments.repeats)
    try:
        found = asyncio.run(measure(console, pair_options(arguments), arguments.block_size, max_tokens, repeats))
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    show(found)
    if not arguments.quick:
        console.print(f"written to {write_report('fleet', found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
