"""Memory of the engine alone: the process against its weights and key/value rows, and what it takes while loading.

    python -m bench.engine_memory [--quick]

Each runner is measured in a process of its own, before and after loading and with rows in use. Writes
bench/results/engine_memory.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from rich.console import Console
from rich.table import Table

from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from bench.target import TARGET
from paceline.engine.load_runner import load_runner
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.model_source import resolve

CONTEXT = 2048
_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Memory:
    """What one runner takes, in megabytes where nothing else is said.

    Attributes:
        runner: which code runs the model.
        before: the process with all code imported.
        loaded: the process with the model ready and no rows in use.
        peak: most that the process has held up to then.
        filled: the process with `CONTEXT` rows in use.
        weights: of the model, as the runner counts them.
        rows: key/value rows in use, as the pool counts them.
        bytes_per_token: of key/value rows.
        expected_bytes_per_token: 2 x layers x key/value heads x head size x bytes, from the model's configuration.
    """

    runner: str
    before: float
    loaded: float
    peak: float
    filled: float
    weights: float
    rows: float
    bytes_per_token: int
    expected_bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Result:
    """All runners.

    Attributes:
        model: the target.
        ratios: process against weights and rows.
        runners: the figures.
    """

    model: str
    ratios: tuple[Ratio, ...]
    runners: tuple[Memory, ...]


def resident() -> float:
    return psutil.Process().memory_info().rss / _MEGABYTE


def measure_here(choice: RunnerChoice) -> Memory:
    """Measures this process, which has run nothing else."""
    folder = resolve(TARGET)
    before = resident()
    runner = load_runner(folder, options=RunnerOptions(runner=choice))
    loaded = resident()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MEGABYTE
    kv = runner.new_sequence()
    for start in range(0, CONTEXT, 256):
        kv.reserve(256)
        runner.forward([SequencePass(kv, tuple(range(start + 100, start + 356)))])
        kv.commit(256)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return Memory(
        runner=choice.value,
        before=before,
        loaded=loaded,
        peak=peak,
        filled=resident(),
        weights=runner.info.weights_bytes / _MEGABYTE,
        rows=runner.pool.pages_in_use * runner.pool.page_tokens * runner.pool.bytes_per_token / _MEGABYTE,
        bytes_per_token=runner.info.kv_bytes_per_token,
        expected_bytes_per_token=2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 4,
    )


def measure_apart(choice: RunnerChoice) -> Memory:
    """Measures a fresh process."""
    command = [sys.executable, "-m", "bench.engine_memory", "--only", choice.value]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return Memory(**json.loads(output.splitlines()[-1]))


def make_ratios(runners: Sequence[Memory]) -> list[Ratio]:
    ratios = []
    for memory in runners:
        name = f"{memory.runner} runner"
        exact = memory.bytes_per_token / memory.expected_bytes_per_token
        ratios += [
            Ratio(f"{name}: bytes per token / 2 x layers x heads x size x bytes", exact, at_most=1.0, at_least=1.0),
            Ratio(f"{name}: growth by loading / weights", (memory.loaded - memory.before) / memory.weights),
            Ratio(f"{name}: growth with rows / weights and rows", _growth(memory) / (memory.weights + memory.rows)),
            Ratio(f"{name}: peak growth while loading / weights", (memory.peak - memory.before) / memory.weights),
        ]
    return ratios


def _growth(memory: Memory) -> float:
    return memory.filled - memory.before


def show(result: Result) -> None:
    names = [field.name for field in dataclasses.fields(Memory)]
    table = Table(*names[:7], title=f"{result.model}: megabytes of the process, {CONTEXT} rows when filled")
    for memory in result.runners:
        cells = [getattr(memory, name) for name in names[:7]]
        table.add_row(*(cell if isinstance(cell, str) else f"{cell:.0f}" for cell in cells))
    Console(width=120).print(table)
    show_ratios("memory", result.ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the engine's memory.")
    parser.add_argument("--only", choices=[kind.value for kind in RunnerChoice], help="one runner in this process")
    parser.add_argument("--quick", action="store_true", help="writes nothing")
    options = parser.parse_args()
    if options.only:
        print(json.dumps(dataclasses.asdict(measure_here(RunnerChoice(options.only)))))
        return 0
    runners = tuple(measure_apart(kind) for kind in (RunnerChoice.NATIVE, RunnerChoice.TRANSFORMERS))
    result = Result(TARGET, tuple(make_ratios(runners)), runners)
    show(result)
    if not options.quick:
        print(f"written to {write_report('engine_memory', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
