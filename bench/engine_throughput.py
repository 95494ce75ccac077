"""Decoding through the engine: against `transformers.generate`, eight sessions against one, and what the engine adds.

    python -m bench.engine_throughput [--tokens 32] [--repeats 3] [--quick]

* plain decoding of one session / `transformers.generate`;
* eight sessions together / the same eight one after another: plain, with the int8 copy of the target as drafter, and
  with n-grams, four drafts to a block;
* the model's own matrix products and attention / everything in the engine's steps, scheduling and sampling included, at
  one and at eight sessions.

All ways take turns on the same prompts in one process with one thread, each generation to its full length; ratios are
medians of processor time, which other programs stretch least. The prompts are read within that time, and nothing is
shared between generations: prefix caching is off. A run takes about three minutes. Writes
bench/results/engine_throughput.json.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from bench.kernel_meter import kernel_meter
from bench.lossless import chat_prompts, demo_method
from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from bench.target import TARGET
from bench.turns import Cost, take_turns
from paceline.benchmark.prompts import PROMPTS
from paceline.drafting.local import LocalDrafter
from paceline.drafting.method import DraftMethod
from paceline.engine.load_runner import load_runner
from paceline.engine.local import Generation, LocalRequest, generate
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.errors import from_failure
from paceline.messages import Failed, SamplingParams
from paceline.model_source import resolve

NUM_SESSIONS = 8
BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, seed=1, ignore_eos=True)
METHODS = ("draft_model", "ngram")
WARM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Speed:
    """One way to decode all prompts.

    Attributes:
        way: what was done.
        num_tokens: new tokens in all.
        cost: of all of them.
        tokens_per_second: new tokens by the second of processor time.
    """

    way: str
    num_tokens: int
    cost: Cost
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Share:
    """Where the time of the engine's steps went, of decoding after the prompts; medians of all steps.

    Attributes:
        way: greedy or sampled, and how many sessions.
        step_ms: processor time of one step.
        products_ms: of that, matrix products of the model.
        attention_ms: of that, attention.
    """

    way: str
    step_ms: float
    products_ms: float
    attention_ms: float

    @property
    def kernels(self) -> float:
        """Share of products and attention."""
        return (self.products_ms + self.attention_ms) / self.step_ms


@dataclass(frozen=True, slots=True)
class Result:
    """Everything of one run.

    Attributes:
        model: the target.
        runner: which code ran it.
        num_sessions: how many are together.
        num_tokens: new tokens of each.
        ratios: what is promised.
        speeds: of all ways.
        shares: where the time of a step goes.
    """

    model: str
    runner: str
    num_sessions: int
    num_tokens: int
    ratios: tuple[Ratio, ...]
    speeds: tuple[Speed, ...]
    shares: tuple[Share, ...]


class Bench:
    """The engine, the stock model and the prompts."""

    def __init__(self, num_tokens: int) -> None:
        folder = resolve(TARGET)
        runner = load_runner(folder, options=RunnerOptions(prefix_caching=False))
        self.runner_name = type(runner).__name__
        self.engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.stock = cast("LlamaForCausalLM", model.train(mode=False))
        self.num_tokens = num_tokens
        texts = chat_prompts(folder, [prompt.text for prompt in PROMPTS])
        self.prompts = sorted(texts, key=len)[:NUM_SESSIONS]

    def requests(self, sampling: SamplingParams) -> list[LocalRequest]:
        """All prompts, decoded plainly."""
        return [LocalRequest(prompt, sampling, self.num_tokens) for prompt in self.prompts]

    @torch.inference_mode()
    def stock_generate(self) -> None:
        """All prompts one after another; as many tokens as ours."""
        for prompt in self.prompts:
            ids = torch.tensor([prompt])
            self.stock.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=self.num_tokens,
                min_new_tokens=self.num_tokens,
            )

    def decode(self, method: DraftMethod | None, *, together: bool) -> None:
        """All prompts at once, or one after another."""
        requests = self.requests(GREEDY)
        drafters: list[LocalDrafter] = []
        if method is not None:
            drafters = [LocalDrafter(method, GREEDY, len(request.prompt)) for request in requests]
            requests = [
                replace(request, num_draft_tokens=BLOCK, propose=drafter)
                for request, drafter in zip(requests, drafters, strict=True)
            ]
        for group in [requests] if together else [[request] for request in requests]:
            generate(self.engine, group)
        for drafter in drafters:
            drafter.close()

    def share(self, way: str, sampling: SamplingParams, num_sessions: int) -> Share:
        """Decodes plainly and times every step that feeds no prompt."""
        generations = [Generation(self.engine, request, ()) for request in self.requests(sampling)[:num_sessions]]
        by_session = {generation.session: generation for generation in generations}
        products: list[float] = []
        attention: list[float] = []
        steps: list[float] = []
        for generation in generations:
            generation.start_round()
        with kernel_meter() as spent:
            while self.engine.has_work:
                before = (spent.products_s, spent.attention_s)
                started = time.thread_time()
                answers = self.engine.step()
                took = time.thread_time() - started
                if self.engine.last_pass.num_tokens == num_sessions:
                    steps.append(took * 1e3)
                    products.append((spent.products_s - before[0]) * 1e3)
                    attention.append((spent.attention_s - before[1]) * 1e3)
                for answer in answers:
                    generation = by_session[answer.session]
                    if isinstance(answer, Failed):
                        raise from_failure(answer.failure)
                    generation.take(answer)
                    if not generation.done:
                        generation.start_round()
        for session in by_session:
            self.engine.close(session)
        return Share(way, median(steps), median(products), median(attention))


def measure(num_tokens: int, repeats: int) -> Result:
    bench = Bench(num_tokens)
    works: dict[str, Callable[[], object]] = {"transformers.generate, one after another": bench.stock_generate}
    methods: dict[str, DraftMethod | None] = {"plain": None, **{name: demo_method(name) for name in METHODS}}
    for name, method in methods.items():
        works[f"{name}, one after another"] = partial(bench.decode, method, together=False)
        works[f"{name}, together"] = partial(bench.decode, method, together=True)
    bench.num_tokens = min(WARM_TOKENS, num_tokens)
    for work in works.values():
        work()
    bench.num_tokens = num_tokens
    costs = take_turns(works, repeats, is_warm=True)
    total = num_tokens * len(bench.prompts)
    speeds = [Speed(way, total, cost, total * 1e3 / cost.processor_ms) for way, cost in costs.items()]
    shares = [
        bench.share(f"{name}, {count} session(s)", sampling, count)
        for count in (1, NUM_SESSIONS)
        for name, sampling in (("greedy", GREEDY), ("sampled", SAMPLED))
    ]
    return Result(
        TARGET,
        bench.runner_name,
        NUM_SESSIONS,
        num_tokens,
        tuple(make_ratios({speed.way: speed.tokens_per_second for speed in speeds}, shares)),
        tuple(speeds),
        tuple(shares),
    )


def make_ratios(speed: dict[str, float], shares: Sequence[Share]) -> list[Ratio]:
    """The promised ratios."""
    alone, together = "one after another", "together"
    stock = speed[f"transformers.generate, {alone}"]
    ratios = [Ratio("plain, one session / transformers.generate", speed[f"plain, {alone}"] / stock, at_least=1.3)]
    ratios += [
        Ratio(
            f"{name}: {NUM_SESSIONS} sessions / one session",
            speed[f"{name}, {together}"] / speed[f"{name}, {alone}"],
            at_least=3.0 if name == "plain" else None,
        )
        for name in ("plain", *METHODS)
    ]
    ratios += [
        Ratio(f"{name} / plain, {how}", speed[f"{name}, {how}"] / speed[f"plain, {how}"])
        for name in METHODS
        for how in (alone, together)
    ]
    for share in shares:
        bound = 0.85 if f", {NUM_SESSIONS} " in share.way else None
        ratios.append(Ratio(f"products and attention / step ({share.way})", share.kernels, at_least=bound))
    return ratios


def show(result: Result) -> None:
    console = Console(width=120)
    table = Table("way", "tokens per second", title=f"{result.model}, {result.num_sessions} prompts, one thread")
    for speed in result.speeds:
        table.add_row(speed.way, f"{speed.tokens_per_second:.1f}")
    console.print(table)
    table = Table("way", "step ms", "products", "attention", "rest", title="where a step's time goes")
    for share in result.shares:
        rest = share.step_ms - share.products_ms - share.attention_ms
        cells = [f"{value:.1f}" for value in (share.step_ms, share.products_ms, share.attention_ms, rest)]
        table.add_row(share.way, *cells)
    console.print(table)
    show_ratios("decoding", result.ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure decoding through the engine.")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens of each generation")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short texts, once; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(12, 1) if options.quick else measure(options.tokens, options.repeats)
    show(result)
    if not options.quick:
        print(f"written to {write_report('engine_throughput', result)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
