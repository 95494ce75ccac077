"""What one pass of the target costs: plain, verifying, stock `transformers`, and the bare matrix products in it.

    python -m bench.engine_pass [--contexts 128 1024] [--blocks 0 1 3 4 7 15] [--repeats 15] [--quick]

Both runners, the native one and the one of `transformers`, the stock model and the products take turns within one run,
so that a noisy machine disturbs them alike; medians are reported, and ratios count more than milliseconds. With one
thread they are ratios of processor time, which other programs stretch least; with several of wall time. Writes
bench/results/engine_pass.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from bench.kernel_meter import bare_products
from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from bench.target import TARGET
from bench.turns import take_turns
from paceline.engine.load_runner import load_runner
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.model_source import resolve
from paceline.speculation.tree import DraftTree

RUNNERS = (RunnerChoice.NATIVE, RunnerChoice.TRANSFORMERS)
STOCK = "stock transformers"
VERIFY_TOKENS = 5


@dataclass(frozen=True, slots=True)
class PassCost:
    """Median milliseconds of one kind of pass.

    Attributes:
        kind: "native" or "transformers" for a pass of that runner, the same with " products" for its bare matrix
            products, or "stock transformers".
        context: tokens before the pass.
        num_tokens: tokens in the pass.
        wall_ms: by the clock.
        processor_ms: of the calling thread.
    """

    kind: str
    context: int
    num_tokens: int
    wall_ms: float
    processor_ms: float


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one run.

    Attributes:
        model: the target.
        threads: of torch.
        ratios: what is promised, of the native runner, and the same for the other.
        passes: all costs.
    """

    model: str
    threads: int
    ratios: tuple[Ratio, ...]
    passes: tuple[PassCost, ...]


def engine_pass(runner: ModelRunner, context: int, num_tokens: int) -> Callable[[], object]:
    """One pass of a root and a chain after `context` tokens; nothing is committed, so it can be repeated."""
    kv = runner.new_sequence()
    kv.reserve(context)
    runner.forward([SequencePass(kv, tuple(range(100, 100 + context)))])
    kv.commit(context)
    kv.reserve(num_tokens)
    part = SequencePass(kv, (5,), DraftTree.chain(range(1, num_tokens)), num_logits=num_tokens)
    return lambda: runner.forward([part])


def stock_pass(model: LlamaForCausalLM, context: int, num_tokens: int) -> Callable[[], object]:
    """The same with the stock model and its own cache."""
    cache = DynamicCache(config=model.config)
    ids = torch.arange(100, 100 + context)[None]
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    tokens = torch.arange(num_tokens)[None]

    def run() -> None:
        model(input_ids=tokens, cache=cache, use_cache=True)
        cache.crop(-num_tokens)

    return run


@torch.inference_mode()
def measure(contexts: Sequence[int], blocks: Sequence[int], repeats: int) -> Result:
    folder = resolve(TARGET)
    runners = {kind: load_runner(folder, options=RunnerOptions(runner=kind)) for kind in RUNNERS}
    stock = cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    costs: list[PassCost] = []
    for context in contexts:
        works: dict[tuple[str, int], Callable[[], object]] = {
            (STOCK, num_tokens): stock_pass(stock, context, num_tokens) for num_tokens in (1, VERIFY_TOKENS)
        }
        for block in blocks:
            for kind, runner in runners.items():
                work = engine_pass(runner, context, block + 1)
                works[kind.value, block + 1] = work
                works[f"{kind.value} products", block + 1] = bare_products(work)
        for (name, num_tokens), cost in take_turns(works, repeats).items():
            costs.append(PassCost(name, context, num_tokens, cost.wall_ms, cost.processor_ms))
    threads = torch.get_num_threads()
    return Result(TARGET, threads, tuple(make_ratios(costs, threads)), tuple(costs))


def make_ratios(costs: Sequence[PassCost], threads: int) -> list[Ratio]:
    """The promised ratios at every context; the native runner's have bounds."""
    ratios = []
    for context in sorted({cost.context for cost in costs}):
        of = {
            (cost.kind, cost.num_tokens): cost.processor_ms if threads == 1 else cost.wall_ms
            for cost in costs
            if cost.context == context
        }
        for kind in RUNNERS:
            bound = kind is RunnerChoice.NATIVE
            plain, verify = of[kind.value, 1], of[kind.value, VERIFY_TOKENS]
            products = f"{kind.value} products"
            where = f"{kind.value} runner, context {context}"
            ratios += [
                Ratio(f"{where}: verify {VERIFY_TOKENS} / plain", verify / plain, at_most=1.5 if bound else None),
                Ratio(f"{where}: verify {VERIFY_TOKENS} / stock plain", verify / of[STOCK, 1], 1.05 if bound else None),
                Ratio(f"{where}: plain / its products", plain / of[products, 1]),
                Ratio(f"{where}: verify {VERIFY_TOKENS} / its products", verify / of[products, VERIFY_TOKENS]),
            ]
    return ratios


def show(result: Result) -> None:
    console = Console(width=120)
    for context in sorted({cost.context for cost in result.passes}):
        table = Table(title=f"{result.model}, context {context}, {result.threads} thread(s), milliseconds per pass")
        by_kind: dict[str, dict[int, float]] = {}
        for cost in result.passes:
            if cost.context == context:
                milliseconds = cost.processor_ms if result.threads == 1 else cost.wall_ms
                by_kind.setdefault(cost.kind, {})[cost.num_tokens] = milliseconds
        table.add_column("tokens in the pass", justify="right")
        for kind in by_kind:
            table.add_column(kind, justify="right")
        for num_tokens in sorted({count for costs in by_kind.values() for count in costs}):
            cells = [f"{costs[num_tokens]:.1f}" if num_tokens in costs else "" for costs in by_kind.values()]
            table.add_row(str(num_tokens), *cells)
        console.print(table)
    show_ratios("one pass", result.ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what one pass costs.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 1, 3, 4, 7, 15])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few repeats of the promised passes; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    blocks = [] if options.quick else options.blocks
    result = measure(options.contexts, sorted({0, VERIFY_TOKENS - 1, *blocks}), 3 if options.quick else options.repeats)
    show(result)
    if not options.quick:
        print(f"written to {write_report('engine_pass', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
