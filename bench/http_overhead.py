"""`make bench-http`: what streaming over HTTP costs beside streaming over gRPC, on the same fleet and prompts.

    python -m bench.http_overhead            # some minutes; writes bench/results/http_overhead.json
    python -m bench.http_overhead --quick    # once, short texts; writes nothing

Three ways take turns in one run: gRPC with `paceline.client`, HTTP with httpx and a parser of server-sent events that
does the least, and HTTP with the official `openai` client. All time is the client's: from sending the request. A ratio
is the median over pairs of turns with the same prompts in the same repeat. The gateway's processor time per token is
told as well: it hardly depends on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import psutil
from rich import box
from rich.console import Console
from rich.table import Table

from bench.http_stream import stream_chat
from bench.report import write_report
from paceline.benchmark.compare import Configuration, request_for
from paceline.benchmark.prompts import DEMO_PROMPTS, Prompt
from paceline.cli.console import out, print_error
from paceline.cli.display import Display
from paceline.cli.fleet import Fleet, FleetAddresses
from paceline.cli.fleet_options import DEFAULT_MODEL, FleetOptions
from paceline.client import AsyncClient
from paceline.errors import PacelineError
from paceline.exit_codes import exit_code
from paceline.generation import Chunk, Finished
from paceline.model_source import default_name

GRPC = "grpc"
_BUSY_LOAD = 0.7
_WARM_UP_TOKENS = 16
_TABLE_WIDTH = 120


@dataclass(frozen=True, slots=True)
class StreamRun:
    """One streamed generation as its client saw it.

    Attributes:
        first_text_s: from the request to the first text, in seconds.
        total_s: from the request to the end of the stream, in seconds.
        tokens: generated tokens, as the server counted them.
        text: the whole text.
    """

    first_text_s: float
    total_s: float
    tokens: int
    text: str


Part = tuple[str, int]
"""The text of one event, and the number of generated tokens once it is told (else 0)."""

Stream = Callable[[Prompt, int], AsyncIterator[Part]]
"""Streams at most so many tokens for a prompt."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Some streams at once, all in one way.

    Attributes:
        streams: one per prompt.
        wall_s: from the first request to the last end, in seconds.
        gateway_cpu_s: processor time of the gateway meanwhile, in seconds.
    """

    streams: tuple[StreamRun, ...]
    wall_s: float
    gateway_cpu_s: float

    @property
    def tokens(self) -> int:
        """Of all streams together."""
        return sum(run.tokens for run in self.streams)

    @property
    def tokens_per_second(self) -> float:
        """Of all streams together."""
        return self.tokens / self.wall_s

    @property
    def first_text_s(self) -> float:
        """Median over the streams, in seconds."""
        return statistics.median([run.first_text_s for run in self.streams])

    @property
    def texts(self) -> tuple[str, ...]:
        """What was generated."""
        return tuple([run.text for run in self.streams])


@dataclass(frozen=True, slots=True)
class Row:
    """One way under one load.

    Attributes:
        way: "grpc", "http" or "openai".
        concurrency: streams at once.
        tokens_per_second: of all streams together, median over the turns.
        first_text_ms: from the request to the first text, median over the turns.
        ratio_tokens_per_second: to gRPC; below 1 is slower.
        ratio_first_text: to gRPC; above 1 is later.
        gateway_cpu_ms_per_token: processor time of the gateway per token, over all turns.
        equal_texts: turns with the same texts as gRPC.
        turns: turns that were measured.
    """

    way: str
    concurrency: int
    tokens_per_second: float
    first_text_ms: float
    ratio_tokens_per_second: float
    ratio_first_text: float
    gateway_cpu_ms_per_token: float
    equal_texts: int
    turns: int


@dataclass(frozen=True, slots=True)
class Results:
    """What is written.

    Attributes:
        model: the target.
        repeats: of each turn.
        max_tokens: of each stream.
        load_at_start: load average of the machine before the fleet was started.
        rows: one per load and way.
    """

    model: str
    repeats: int
    max_tokens: int
    load_at_start: float
    rows: tuple[Row, ...]


def batches(prompts: Sequence[Prompt], concurrency: int) -> tuple[tuple[Prompt, ...], ...]:
    """What is asked at once: each prompt alone, or one batch that goes through the prompts again and again."""
    if concurrency == 1:
        return tuple([(prompt,) for prompt in prompts])
    return (tuple([prompts[index % len(prompts)] for index in range(concurrency)]),)


def make_rows(concurrency: int, turns: Mapping[str, Sequence[Turn]]) -> list[Row]:
    """Figures of each way under one load; entry i of every way had the same prompts in the same repeat."""
    base = turns[GRPC]

    def row(way: str, measured: Sequence[Turn]) -> Row:
        pairs = list(zip(measured, base, strict=True))
        return Row(
            way=way,
            concurrency=concurrency,
            tokens_per_second=statistics.median([turn.tokens_per_second for turn in measured]),
            first_text_ms=1e3 * statistics.median([turn.first_text_s for turn in measured]),
            ratio_tokens_per_second=statistics.median(
                [turn.tokens_per_second / other.tokens_per_second for turn, other in pairs]
            ),
            ratio_first_text=statistics.median([turn.first_text_s / other.first_text_s for turn, other in pairs]),
            gateway_cpu_ms_per_token=1e3
            * sum(turn.gateway_cpu_s for turn in measured)
            / sum(turn.tokens for turn in measured),
            equal_texts=sum(turn.texts == other.texts for turn, other in pairs),
            turns=len(measured),
        )

    return [row(way, measured) for way, measured in turns.items()]


def grpc_way(client: AsyncClient, num_speculative_tokens: int) -> Stream:
    """Streams with `paceline.client`."""
    speculation = Configuration("default", num_speculative_tokens)

    async def stream(prompt: Prompt, max_tokens: int) -> AsyncIterator[Part]:
        async for event in client.generate(request_for(prompt, speculation, max_tokens)):
            match event:
                case Chunk():
                    yield event.text, 0
                case Finished():
                    yield "", event.completion_tokens

    return stream


def http_way(client: httpx.AsyncClient, model: str) -> Stream:
    """Streams over HTTP with the least that a client can do."""

    def stream(prompt: Prompt, max_tokens: int) -> AsyncIterator[Part]:
        return stream_chat(client, model, prompt.text, max_tokens)

    return stream


def openai_way(client: openai.AsyncOpenAI, model: str) -> Stream:
    """Streams with the official client."""

    async def stream(prompt: Prompt, max_tokens: int) -> AsyncIterator[Part]:
        chunks = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt.text}],
            max_completion_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        async for chunk in chunks:
            text = chunk.choices[0].delta.content if chunk.choices else ""
            yield text or "", chunk.usage.completion_tokens if chunk.usage else 0

    return stream


async def timed(parts: AsyncIterator[Part]) -> StreamRun:
    """Reads a stream to its end; the clock starts now."""
    started = time.perf_counter()
    first_text_s, tokens, texts = 0.0, 0, list[str]()
    async for text, completion_tokens in parts:
        if text:
            first_text_s = first_text_s or time.perf_counter() - started
            texts.append(text)
        tokens = completion_tokens or tokens
    return StreamRun(first_text_s, time.perf_counter() - started, tokens, "".join(texts))


@asynccontextmanager
async def all_ways(addresses: FleetAddresses, options: FleetOptions) -> AsyncIterator[dict[str, Stream]]:
    """The three ways, each with a connection of its own."""
    model = default_name(options.model)
    async with AsyncExitStack() as stack:
        grpc = await stack.enter_async_context(AsyncClient(addresses.gateway))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=addresses.http, timeout=None))
        official = await stack.enter_async_context(
            openai.AsyncOpenAI(base_url=f"{addresses.http}/v1", api_key="none is asked for", max_retries=0)
        )
        yield {
            GRPC: grpc_way(grpc, options.num_speculative_tokens),
            "http": http_way(http, model),
            "openai": openai_way(official, model),
        }


async def take_turn(stream: Stream, prompts: Sequence[Prompt], max_tokens: int, gateway: psutil.Process) -> Turn:
    """Streams all prompts at once."""
    cpu_before_s, started = _cpu_s(gateway), time.perf_counter()
    runs = await asyncio.gather(*[timed(stream(prompt, max_tokens)) for prompt in prompts])
    return Turn(tuple(runs), time.perf_counter() - started, _cpu_s(gateway) - cpu_before_s)


def _cpu_s(process: psutil.Process) -> float:
    """Processor time that a process has used, in seconds."""
    times = process.cpu_times()
    return times.user + times.system


async def measure(
    ways: Mapping[str, Stream], gateway: psutil.Process, arguments: argparse.Namespace
) -> tuple[Row, ...]:
    """Lets all ways take turns under each load; each repeat begins with another one."""
    console = out()
    for stream in ways.values():
        await timed(stream(DEMO_PROMPTS[0], _WARM_UP_TOKENS))
    rows: list[Row] = []
    names = list(ways)
    for concurrency in (int(part) for part in arguments.concurrency.split(",")):
        turns: dict[str, list[Turn]] = {name: [] for name in names}
        for repeat in range(arguments.repeats):
            console.print(f"{concurrency} at once: repeat {repeat + 1} of {arguments.repeats}", style="dim")
            for batch in batches(DEMO_PROMPTS, concurrency):
                first = repeat % len(names)
                for name in names[first:] + names[:first]:
                    turns[name].append(await take_turn(ways[name], batch, arguments.max_tokens, gateway))
        rows += make_rows(concurrency, turns)
    return tuple(rows)


async def run(arguments: argparse.Namespace) -> Results:
    """Starts a fleet, measures, stops it."""
    load = os.getloadavg()[0]
    options = FleetOptions(model=arguments.model, port=0, http_port=0, log_dir=arguments.log_dir, cold_prompts=True)
    display = Display()
    fleet = Fleet(options, display)
    try:
        with display:
            await fleet.start()
        gateway = psutil.Process(next(child.pid for child in fleet.children if child.name == "gateway"))
        async with all_ways(fleet.addresses, options) as ways:
            rows = await measure(ways, gateway, arguments)
    finally:
        await fleet.stop()
    return Results(options.model, arguments.repeats, arguments.max_tokens, round(load, 2), rows)


def table_of(results: Results) -> Table:
    """One line per load and way."""
    title = f"{results.model}, {results.max_tokens} tokens per stream, medians of {results.repeats} repeats"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for heading in ("streams", "way", "tok/s", "to gRPC", "first text ms", "to gRPC", "gateway ms/tok", "texts"):
        table.add_column(heading, justify="left" if heading == "way" else "right")
    for row in results.rows:
        table.add_row(
            str(row.concurrency),
            row.way,
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio_tokens_per_second:.3f}",
            f"{row.first_text_ms:.1f}",
            f"{row.ratio_first_text:.3f}",
            f"{row.gateway_cpu_ms_per_token:.2f}",
            f"{row.equal_texts}/{row.turns} equal",
        )
    return table


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="the target")
    parser.add_argument("--concurrency", default="1,8", help="streams at once, one load after the other")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--log-dir", type=Path, default=Path("paceline-logs"))
    parser.add_argument("--quick", action="store_true", help="once, short texts; writes nothing")
    parsed = parser.parse_args(arguments)
    if parsed.quick:
        parsed.repeats, parsed.max_tokens = 1, 24
    return parsed


def main() -> int:
    """Entry point of `python -m bench.http_overhead`."""
    arguments = parse_arguments()
    console = out()
    if (load := os.getloadavg()[0]) > _BUSY_LOAD:
        console.print(f"[yellow]warning:[/] the machine is busy (load {load:.1f}): only the ratios mean something")
    try:
        results = asyncio.run(run(arguments))
    except PacelineError as error:
        print_error(error)
        return exit_code(error)
    Console(width=max(console.width, _TABLE_WIDTH)).print(table_of(results))
    if not arguments.quick:
        console.print(f"written to {write_report('http_overhead', results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
