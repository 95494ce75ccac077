"""What one pass of the target costs: plain, verifying, stock `transformers`, and the bare matrix products in it.

    python -m bench.engine_pass [--contexts 128 1024] [--blocks 0 1 3 4 7 15] [--repeats 15]

All kinds of pass take turns within one run, so that a noisy machine disturbs them alike; medians are reported, and
ratios count more than milliseconds. With one thread the table shows processor time, which other programs stretch least;
with several wall time. Writes bench/results/engine_pass.json.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import psutil
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

from bench.report import write_report
from paceline.engine.loader import load_model
from paceline.engine.packing import PackedLinear
from paceline.engine.runner import SequencePass
from paceline.engine.transformers_runner import TransformersRunner
from paceline.model_source import resolve
from paceline.speculation.tree import DraftTree

TARGET = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class PassCost:
    """Median milliseconds of one kind of pass.

    Attributes:
        kind: "engine", "transformers" or "matmuls".
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
        passes: all costs.
        rss_mb: memory of the process with the engine alone.
        weights_mb: of the model, packed copies included.
    """

    model: str
    threads: int
    passes: tuple[PassCost, ...]
    rss_mb: float
    weights_mb: float


def engine_pass(runner: TransformersRunner, context: int, num_tokens: int) -> Callable[[], object]:
    """One pass of a root and a chain after `context` tokens; nothing is committed, so it can be repeated."""
    kv = runner.new_sequence()
    kv.reserve(context)
    runner.forward([SequencePass(kv, tuple(range(100, 100 + context)))])
    kv.commit(context)
    kv.reserve(num_tokens)
    part = SequencePass(kv, (5,), DraftTree.chain(range(1, num_tokens)), num_logits=num_tokens)
    return lambda: runner.forward([part])


def transformers_pass(model: LlamaForCausalLM, context: int, num_tokens: int) -> Callable[[], object]:
    """The same with the stock model and its own cache."""
    cache = DynamicCache(config=model.config)
    ids = torch.arange(100, 100 + context)[None]
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)
    tokens = torch.arange(num_tokens)[None]

    def run() -> None:
        model(input_ids=tokens, cache=cache, use_cache=True)
        cache.crop(-num_tokens)

    return run


def matmul_pass(runner: TransformersRunner, num_tokens: int) -> Callable[[], object]:
    """Only the packed matrix products of a pass, each on an input of its own."""
    layers = [module for module in runner.model.modules() if isinstance(module, PackedLinear)]
    inputs = [torch.randn(1, num_tokens, layer.in_features) for layer in layers]

    def run() -> None:
        for layer, rows in zip(layers, inputs, strict=True):
            layer(rows)

    return run


@torch.inference_mode()
def measure(contexts: Sequence[int], blocks: Sequence[int], repeats: int) -> Result:
    folder = resolve(TARGET)
    runner = TransformersRunner(load_model(folder))
    rss_mb = psutil.Process().memory_info().rss / 1e6
    stock = cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    costs: list[PassCost] = []
    for context in contexts:
        runs: dict[tuple[str, int], Callable[[], object]] = {
            ("transformers", 1): transformers_pass(stock, context, 1),
            ("transformers", 5): transformers_pass(stock, context, 5),
        }
        for block in blocks:
            runs["engine", block + 1] = engine_pass(runner, context, block + 1)
            runs["matmuls", block + 1] = matmul_pass(runner, block + 1)
        wall: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
        processor: dict[tuple[str, int], list[float]] = {key: [] for key in runs}
        for _ in range(repeats + 1):
            for key, run in runs.items():
                started, started_thread = time.perf_counter(), time.thread_time()
                run()
                wall[key].append((time.perf_counter() - started) * 1e3)
                processor[key].append((time.thread_time() - started_thread) * 1e3)
        for key in runs:
            medians = [statistics.median(values[key][1:]) for values in (wall, processor)]
            costs.append(PassCost(key[0], context, key[1], medians[0], medians[1]))
    return Result(TARGET, torch.get_num_threads(), tuple(costs), rss_mb, runner.info.weights_bytes / 1e6)


def show(result: Result) -> None:
    console = Console()
    for context in sorted({cost.context for cost in result.passes}):
        table = Table(title=f"{result.model}, context {context}, {result.threads} thread(s), milliseconds per pass")
        for name in ("tokens in the pass", "engine", "bare matmuls", "engine / plain", "engine / transformers plain"):
            table.add_column(name, justify="right")
        by_kind = {
            (cost.kind, cost.num_tokens): cost.processor_ms if result.threads == 1 else cost.wall_ms
            for cost in result.passes
            if cost.context == context
        }
        plain, stock = by_kind["engine", 1], by_kind["transformers", 1]
        for (kind, num_tokens), milliseconds in sorted(by_kind.items(), key=lambda item: item[0][1]):
            if kind == "engine":
                table.add_row(
                    str(num_tokens),
                    f"{milliseconds:.1f}",
                    f"{by_kind['matmuls', num_tokens]:.1f}",
                    f"{milliseconds / plain:.2f}",
                    f"{milliseconds / stock:.2f}",
                )
        console.print(table)
        console.print(f"transformers: plain {stock:.1f} ms, 5 tokens {by_kind['transformers', 5]:.1f} ms")
    console.print(f"memory of the process {result.rss_mb:.0f} MB, of which weights {result.weights_mb:.0f} MB")


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what one pass costs.")
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 1024])
    parser.add_argument("--blocks", type=int, nargs="+", default=[0, 1, 3, 4, 7, 15])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    result = measure(options.contexts, sorted({0, *options.blocks}), options.repeats)
    show(result)
    print(f"written to {write_report('engine_pass', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
