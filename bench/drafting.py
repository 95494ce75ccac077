"""Draft cost and acceptance of drafters for one target, in one process and one thread, against plain decoding.

Every drafter takes turns with plain decoding on the same prompts in the same run, and must give the same tokens. Draft
and verify alternate here; a fleet, whose drafter works while the verifier does, is another benchmark. Times are given
as wall clock and as processor time: one thread does all the work, so they agree on a quiet machine, and on a busy one
processor time still says what the work costs.

    python -m bench.drafting --quick
    python -m bench.drafting --drafters int8,int4 --block-sizes 3,4,6,8
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from bench.lossless import chat_prompts
from bench.report import write_report
from bench.target import TARGET
from paceline.benchmark.prompts import PROMPTS, Prompt
from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.local import LocalDrafter
from paceline.drafting.method import DraftMethod
from paceline.engine.load_runner import load_runner
from paceline.engine.local import LocalRequest, LocalResult, generate
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.messages import SamplingParams
from paceline.model_source import resolve
from paceline.quantize import Bits
from paceline.speculation.tree import DraftTree
from paceline.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 2048

_SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True),
}


def drafters(target: str) -> dict[str, Callable[[], DraftMethod]]:
    """The drafters that can be measured, by name."""

    def model(runner: RunnerKind, bits: Bits = Bits.INT8, methods: tuple[str, ...] = ("draft_model",)) -> DraftMethod:
        settings = MethodSettings(
            methods,
            target,
            runner=runner,
            bits=bits,
            kv_bytes=128 << 20,
            max_sessions=1,
            max_model_len=MAX_MODEL_LEN,
        )
        return build_method(settings, print)

    return {
        "int8": lambda: model(RunnerKind.ONNX, Bits.INT8),
        "int4": lambda: model(RunnerKind.ONNX, Bits.INT4),
        "torch": lambda: model(RunnerKind.TORCH),
        "ngram": lambda: build_method(MethodSettings(methods=("ngram",))),
        "ngram+int8": lambda: model(RunnerKind.ONNX, Bits.INT8, ("ngram", "draft_model")),
    }


@dataclass(frozen=True, slots=True)
class Run:
    """One generation, measured.

    Attributes:
        result: its tokens and counts.
        seconds: from the first command to the last token, prompt included.
        cpu_seconds: processor time of the same.
        draft_cpu_seconds: of that, spent in the drafting method.
    """

    result: LocalResult
    seconds: float
    cpu_seconds: float
    draft_cpu_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One drafter with one block size over all prompts.

    Attributes:
        tokens_per_pass: new tokens per target pass.
        acceptance: accepted of the drafted tokens.
        draft_cpu_ms_per_token: processor time of the method per drafted token, catching up and the prompt included.
        ratio: median over the prompts of plain seconds / speculative seconds.
        cpu_ratio: the same of processor time.
        cpu_ratio_by_kind: the same per kind of prompt.
        tokens_per_s: of the speculative runs together.
        equal: prompts whose tokens equal plain decoding's, of all.
    """

    drafter: str
    sampling: str
    num_draft_tokens: int
    tokens_per_pass: float
    acceptance: float
    draft_cpu_ms_per_token: float
    ratio: float
    cpu_ratio: float
    cpu_ratio_by_kind: dict[str, float]
    tokens_per_s: float
    equal: str


class Bench:
    """The target with its tokenizer, and the prompts as ids."""

    def __init__(self, target: str, prompts: Sequence[Prompt], max_tokens: int) -> None:
        folder = resolve(target, progress=print)
        tokenizer = Tokenizer.load(folder)
        self.prompts = prompts
        self.max_tokens = max_tokens
        self.ids = chat_prompts(folder, [prompt.text for prompt in prompts])
        # Without prefix caching no run gets rows from the one before it on the same prompt.
        options = RunnerOptions(kv_bytes=256 << 20, max_model_len=MAX_MODEL_LEN, prefix_caching=False)
        runner = load_runner(folder, options=options)
        self.engine = TargetEngine(runner, eos_token_ids=tokenizer.eos_token_ids, vocab_size=tokenizer.vocab_size)

    def plain(self, index: int, sampling: SamplingParams) -> Run:
        """Decodes one prompt without drafts."""
        request = LocalRequest(self.ids[index], sampling, self.max_tokens)
        started, cpu_started = time.perf_counter(), time.process_time()
        result = generate(self.engine, [request])[0]
        return Run(result, time.perf_counter() - started, time.process_time() - cpu_started)

    def speculative(self, index: int, sampling: SamplingParams, method: DraftMethod, num_draft_tokens: int) -> Run:
        """Decodes one prompt with a drafter."""
        drafter = LocalDrafter(method, sampling, len(self.ids[index]))
        draft_cpu_seconds = 0.0

        def propose(context: Sequence[int], max_depth: int) -> DraftTree:
            nonlocal draft_cpu_seconds
            began = time.process_time()
            block = drafter(context, max_depth)
            draft_cpu_seconds += time.process_time() - began
            return block

        request = LocalRequest(self.ids[index], sampling, self.max_tokens, num_draft_tokens, propose)
        started, cpu_started = time.perf_counter(), time.process_time()
        result = generate(self.engine, [request])[0]
        run = Run(result, time.perf_counter() - started, time.process_time() - cpu_started, draft_cpu_seconds)
        drafter.close()
        return run

    def measure(self, name: str, method: DraftMethod, sampling_name: str, block_sizes: Sequence[int]) -> list[Row]:
        """All block sizes of one drafter; plain decoding takes its turn at each prompt."""
        sampling = _SAMPLINGS[sampling_name]
        plain: list[Run] = []
        runs: dict[int, list[Run]] = {size: [] for size in block_sizes}
        for index in range(len(self.prompts)):
            plain.append(self.plain(index, sampling))
            for size in block_sizes:
                runs[size].append(self.speculative(index, sampling, method, size))
        return [self._row(name, sampling_name, size, plain, runs[size]) for size in block_sizes]

    def _row(self, name: str, sampling_name: str, size: int, plain: Sequence[Run], runs: Sequence[Run]) -> Row:
        pairs = list(zip(plain, runs, strict=True))
        cpu_ratios = [base.cpu_seconds / run.cpu_seconds for base, run in pairs]
        kinds: dict[str, list[float]] = {}
        for prompt, ratio in zip(self.prompts, cpu_ratios, strict=True):
            kinds.setdefault(prompt.kind, []).append(ratio)
        num_tokens = sum(len(run.result.tokens) for run in runs)
        num_drafted = sum(run.result.num_drafted for run in runs)
        num_equal = sum(base.result.tokens == run.result.tokens for base, run in pairs)
        return Row(
            drafter=name,
            sampling=sampling_name,
            num_draft_tokens=size,
            tokens_per_pass=num_tokens / sum(run.result.num_rounds for run in runs),
            acceptance=sum(run.result.num_accepted for run in runs) / max(1, num_drafted),
            draft_cpu_ms_per_token=1000 * sum(run.draft_cpu_seconds for run in runs) / max(1, num_drafted),
            ratio=statistics.median(base.seconds / run.seconds for base, run in pairs),
            cpu_ratio=statistics.median(cpu_ratios),
            cpu_ratio_by_kind={kind: statistics.median(values) for kind, values in kinds.items()},
            tokens_per_s=num_tokens / sum(run.seconds for run in runs),
            equal=f"{num_equal}/{len(runs)}",
        )


def show(rows: Sequence[Row]) -> None:
    """Prints the table."""
    table = Table(title="drafters in one process, one thread")
    table.add_column("drafter")
    table.add_column("sampling")
    for heading in ("K", "tokens/pass", "acceptance", "CPU ms/draft", "ratio", "CPU ratio", "tok/s", "equal"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row.drafter,
            row.sampling,
            str(row.num_draft_tokens),
            f"{row.tokens_per_pass:.2f}",
            f"{row.acceptance:.1%}",
            f"{row.draft_cpu_ms_per_token:.1f}",
            f"{row.ratio:.2f}",
            f"{row.cpu_ratio:.2f}",
            f"{row.tokens_per_s:.1f}",
            row.equal,
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=TARGET, help="model reference of the target and of its copies")
    parser.add_argument("--drafters", default="int8,int4,torch,ngram,ngram+int8", help="names, separated by commas")
    parser.add_argument("--block-sizes", default="3,4,6,8", help="draft tokens per block, separated by commas")
    parser.add_argument("--samplings", default="greedy", help=f"of {','.join(_SAMPLINGS)}")
    parser.add_argument("--prompts", type=int, default=8, help="how many prompts, spread over the kinds")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="two prompts, int8, one block size; writes no result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.drafters, options.block_sizes, options.prompts, options.max_tokens = "int8", "4", 2, 32
    step = max(1, len(PROMPTS) // options.prompts)
    bench = Bench(options.target, PROMPTS[::step][: options.prompts], options.max_tokens)
    bench.plain(0, _SAMPLINGS["greedy"])  # the first passes allocate
    makers = drafters(options.target)
    block_sizes = [int(size) for size in options.block_sizes.split(",")]
    rows: list[Row] = []
    for name in options.drafters.split(","):
        method = makers[name]()
        for sampling in options.samplings.split(","):
            rows += bench.measure(name, method, sampling, block_sizes)
            show(rows)
    if not options.quick:
        print(write_report("drafting", rows))


if __name__ == "__main__":
    main()
