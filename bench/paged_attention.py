"""What paging costs attention: attention over the pool against the same over contiguous buffers.

    python -m bench.paged_attention [--context 2048] [--repeats 60] [--quick]

Layouts of a sequence's pages: neighbours; a shared prefix and pages of its own behind it; one of eight sequences that
grew side by side, as the pool laid them out; a new one in a pool that many sessions have gone through, in two draws;
and, as the worst case, pages in random order, before and after they were moved together. Each work is the attention of
several layers one after another, so that keys and values come from memory as they do in a pass. All take turns within
one run; processor time of one thread, medians. What the pool makes has a bound. Writes
bench/results/paged_attention.json.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from bench.ratios import Ratio, show_ratios
from bench.report import write_report
from bench.turns import take_turns
from paceline.engine.attention import PagedAttention
from paceline.engine.kv.pool import KVPool, SequenceKV
from paceline.engine.kv.sequence import page_runs
from paceline.engine.pass_plan import plan_pass
from paceline.engine.runner import SequencePass
from paceline.speculation.tree import DraftTree

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 9, 3, 64
"""Of one layer of SmolLM2-135M."""
NUM_LAYERS = 10
POOL_PAGES = 2048
NEW_TOKENS = (1, 5)
CONTEXT, AT_MOST = 2048, 1.15
"""Paged / contiguous is bounded at this context, for every layout that the pool makes."""

Layout = Callable[[KVPool, int], SequenceKV]


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """Attention for one layout.

    Attributes:
        layout: of the sequence's pages.
        num_runs: runs of neighbouring pages.
        context: rows before the pass.
        num_tokens: tokens in the pass.
        paged_us: median microseconds per layer over the pool, writing the new rows included.
        contiguous_us: the same over contiguous buffers, new rows written to their ends.
        ratio: of the two.
        at_most: its bound; None for pages that the pool never lays out so, and at other contexts.
    """

    layout: str
    num_runs: int
    context: int
    num_tokens: int
    paged_us: float
    contiguous_us: float
    ratio: float
    at_most: float | None

    @property
    def verdict(self) -> Ratio:
        """The ratio with its bound."""
        return Ratio(f"{self.layout}, {self.num_tokens} token(s)", self.ratio, self.at_most)


def grow(kv: SequenceKV, num_rows: int) -> SequenceKV:
    """Makes a sequence longer as decoding does: little by little."""
    while kv.num_rows < num_rows:
        step = min(5, num_rows - kv.num_rows)
        kv.reserve(step)
        kv.commit(step)
    return kv


def neighbours(pool: KVPool, context: int) -> SequenceKV:
    """Alone in the pool."""
    return grow(pool.new_sequence(), context)


def shared_prefix(pool: KVPool, context: int) -> SequenceKV:
    """Half of the rows are another sequence's."""
    tokens = tuple(range(context))
    first = grow(pool.new_sequence(), context // 2)
    first.publish(tokens[: context // 2])
    grow(first, context)
    kv = pool.new_sequence()
    kv.adopt(tokens)
    return grow(kv, context)


def side_by_side(pool: KVPool, context: int) -> SequenceKV:
    """One of eight that grew at the same time."""
    sequences = [pool.new_sequence() for _ in range(8)]
    for length in range(5, context + 1, 5):
        for kv in sequences:
            grow(kv, length)
    return grow(sequences[3], context)


def after_many_sessions(pool: KVPool, context: int, seed: int = 1) -> SequenceKV:
    """In a pool full of what ended sessions published; how many runs are left for a new one is a matter of chance."""
    generator = random.Random(seed)
    live: list[SequenceKV] = []
    for session in range(400):
        if len(live) == 8:
            live.pop(generator.randrange(8)).free()
        length = generator.randrange(64, context)
        live.append(grow(pool.new_sequence(), length))
        live[-1].publish([session * context + index for index in range(length)])
    for kv in live[2:]:
        kv.free()
    return grow(pool.new_sequence(), context)


def in_random_order(pool: KVPool, context: int) -> SequenceKV:
    """The worst case, which the pool never makes."""
    kv = neighbours(pool, context)
    pages = list(kv.pages)
    random.Random(2).shuffle(pages)
    kv.pages[:] = pages
    return kv


WORST = "random order (worst case)"
MOVED = "random order, moved together"
NUM_TRIALS = 3
LAYOUTS: dict[str, Layout] = {
    "neighbours": neighbours,
    "shared prefix and own pages": shared_prefix,
    "one of 8 that grew side by side": side_by_side,
    "in a pool that 400 sessions went through": after_many_sessions,
    "the same, the most runs of 8 draws": partial(after_many_sessions, seed=6),
    WORST: in_random_order,
}


def paged(layout: Layout, context: int, num_tokens: int, *, moved: bool) -> tuple[Callable[[], object], int]:
    """Attention over the pool as a runner calls it, and the number of runs that it reads."""
    attention = PagedAttention.for_layers([None] * NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM)
    pool = KVPool(attention.plane_shapes(), POOL_PAGES)
    for group in pool.groups:
        group.normal_()
    attention.attach(pool)
    kv = layout(pool, context)
    kv.reserve(num_tokens)
    part = SequencePass(kv, (1,), DraftTree.chain(range(1, num_tokens)), num_logits=num_tokens)
    if moved:
        attention.plan = plan_pass([part], torch.device("cpu"))
    else:
        pages = list(kv.pages)
        attention.plan = plan_pass([part], torch.device("cpu"))
        kv.pages[:] = pages
        attention.plan.sequences[0].pages = pages
    query, key, value = (
        torch.randn(1, heads, num_tokens, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    runs = len(page_runs(attention.plan.sequences[0].pages))

    def run() -> None:
        for layer in range(NUM_LAYERS):
            attention(layer, query, key, value, None, None, None)

    return run, runs


def contiguous(context: int, num_tokens: int) -> Callable[[], object]:
    """The same attention with each layer's keys and values in buffers of their own."""
    num_rows = context + num_tokens
    repeats = NUM_HEADS // NUM_KV_HEADS
    layers = [[torch.randn(NUM_KV_HEADS, num_rows, HEAD_DIM) for _ in range(2)] for _ in range(NUM_LAYERS)]
    query, key, value = (
        torch.randn(1, heads, num_tokens, HEAD_DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
    )
    mask = None
    if num_tokens > 1:
        hidden = torch.ones(num_tokens, num_rows, dtype=torch.bool).triu_(context + 1)
        mask = torch.zeros(num_tokens, num_rows).masked_fill_(hidden, float("-inf")).repeat(repeats, 1)

    def run() -> None:
        for keys, values in layers:
            keys[:, context:] = key[0]
            values[:, context:] = value[0]
            rows = query[0].reshape(1, NUM_KV_HEADS, repeats * num_tokens, HEAD_DIM)
            result = functional.scaled_dot_product_attention(rows, keys[None], values[None], attn_mask=mask)
            result.view(NUM_HEADS, num_tokens, -1).transpose(0, 1)

    return run


@torch.inference_mode()
def measure(context: int, repeats: int) -> list[AttentionCost]:
    """Every layout against contiguous buffers.

    The same work takes up to a tenth longer or shorter from where its memory happens to lie, so all is built anew for
    each trial, in another order; figures are medians of the trials.
    """
    return [cost for num_tokens in NEW_TOKENS for cost in _measure(context, num_tokens, repeats)]


def _measure(context: int, num_tokens: int, repeats: int) -> list[AttentionCost]:
    layouts = [*((name, layout, name != WORST) for name, layout in LAYOUTS.items()), (MOVED, in_random_order, True)]
    runs: dict[str, int] = {}
    paged_us: dict[str, list[float]] = {name: [] for name, _, _ in layouts}
    base_us: list[float] = []
    for trial in range(NUM_TRIALS):
        begin = trial * len(layouts) // NUM_TRIALS
        turns: dict[str, Callable[[], object]] = {}
        for name, layout, moved in layouts[begin:] + layouts[:begin]:
            turns[name], runs[name] = paged(layout, context, num_tokens, moved=moved)
        turns[""] = contiguous(context, num_tokens)
        costs = take_turns(turns, repeats)
        base_us.append(costs[""].processor_ms * 1e3 / NUM_LAYERS)
        for name, figures in paged_us.items():
            figures.append(costs[name].processor_ms * 1e3 / NUM_LAYERS)
    return [
        AttentionCost(
            layout=name,
            num_runs=runs[name],
            context=context,
            num_tokens=num_tokens,
            paged_us=statistics.median(figures),
            contiguous_us=statistics.median(base_us),
            ratio=statistics.median(us / base for us, base in zip(figures, base_us, strict=True)),
            at_most=AT_MOST if context == CONTEXT and name != WORST else None,
        )
        for name, figures in paged_us.items()
    ]


def show(costs: Sequence[AttentionCost]) -> None:
    table = Table(title=f"attention per layer at {costs[0].context} rows, microseconds")
    for name in ("pages", "runs", "tokens", "paged", "contiguous"):
        table.add_column(name, justify="left" if name == "pages" else "right")
    for cost in costs:
        figures = (f"{cost.paged_us:.0f}", f"{cost.contiguous_us:.0f}")
        table.add_row(cost.layout, str(cost.num_runs), str(cost.num_tokens), *figures)
    Console(width=120).print(table)
    show_ratios("paged / contiguous", [cost.verdict for cost in costs])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure what paging costs attention.")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--repeats", type=int, default=60, help="of each of three trials")
    parser.add_argument("--quick", action="store_true", help="few repeats, to see that it works; writes nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    costs = measure(options.context, 10 if options.quick else options.repeats)
    show(costs)
    if not options.quick:
        print(f"written to {write_report('paged_attention', costs)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
