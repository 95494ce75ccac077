"""Whatever happened to a sequence's rows, its next logits are those of a forward pass without any cache.

Random rounds on real (tiny, random) models: chunks, blocks with trees, rollbacks, forks, preemptions and prefixes that
another sequence has computed, several sequences side by side in a pool of a few small pages. After every round every
sequence that it touched is asked for the logits of its next token, and the stock model of `transformers`, which knows
no cache here, says what they have to be.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from paceline.engine.kv.pool import SequenceKV
from paceline.engine.load_runner import load_runner
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.errors import CapacityExceeded
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, write_model

PAGE_TOKENS = 8
NUM_PAGES = 16
ROW_BYTES = 3 * 2 * 2 * 8 * 4
"""Layers x (keys and values) x key/value heads x head size x bytes."""
MOST_TOKENS = 40
TOLERANCE = 1e-4

token_lists = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=20)
trees = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=3).map(DraftTree.from_paths)


class World:
    """Sequences on one runner, each with the tokens that its rows must stand for."""

    def __init__(self, runner: ModelRunner, stock: LlamaForCausalLM) -> None:
        self.runner = runner
        self.stock = stock
        self.sequences: list[tuple[SequenceKV, list[int]]] = []

    def open(self, kv: SequenceKV | None = None, tokens: Sequence[int] = ()) -> int:
        self.sequences.append((kv or self.runner.new_sequence(), list(tokens)))
        return len(self.sequences) - 1

    def end(self, index: int) -> None:
        kv, _ = self.sequences.pop(index)
        kv.free()

    def feed(self, parts: Sequence[tuple[int, Sequence[int], DraftTree, Sequence[int]]]) -> None:
        """One pass: per part the sequence, its new tokens, the tree under them, and the path that is kept."""
        passes: list[SequencePass] = []
        fitting = []
        for part in parts:
            index, tokens, tree, _ = part
            kv, _ = self.sequences[index]
            num_tokens = len(tokens) + tree.num_draft_tokens
            try:
                kv.reserve(num_tokens)
            except CapacityExceeded:
                continue
            passes.append(SequencePass(kv, tuple(tokens), tree, num_tokens))
            fitting.append(part)
        if not passes:
            return
        self.runner.forward(passes)
        for index, tokens, tree, path in fitting:
            kv, known = self.sequences[index]
            kv.commit(len(tokens), path)
            known += [*tokens, *(tree.token_of(node) for node in path)]
            kv.publish(known)
        self.check([index for index, *_ in fitting])

    def check(self, indices: Sequence[int]) -> None:
        """The logits after a probe that is not kept, in one pass for all."""
        probe = 5
        passes = []
        for index in indices:
            kv, known = self.sequences[index]
            assert kv.num_rows == len(known)
            try:
                kv.reserve(1)
            except CapacityExceeded:
                continue
            passes.append((SequencePass(kv, (probe,), num_logits=1), [*known, probe]))
        if not passes:
            return
        logits = self.runner.forward([part for part, _ in passes])
        for (part, tokens), (cached,) in zip(passes, logits, strict=True):
            part.kv.rollback(len(tokens) - 1)
            torch.testing.assert_close(cached, fresh_logits(self.stock, tokens), rtol=TOLERANCE, atol=TOLERANCE)
        self.runner.pool.check_integrity()


@torch.inference_mode()
def fresh_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after the last token, without any cache # [vocab_size]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0, -1]
    return logits.float()


def leaf_path(tree: DraftTree, data: st.DataObject) -> list[int]:
    """Some path from the root down; perhaps an empty one."""
    node = data.draw(st.integers(0, tree.num_draft_tokens))
    return tree.ancestors(node)[1:]


def play_a_round(world: World, data: st.DataObject) -> None:
    """One random thing that an engine does."""
    numbers = range(len(world.sequences))
    what = data.draw(st.sampled_from(["feed", "feed", "feed", "open", "open", "rollback", "fork", "preempt", "end"]))
    if what == "open" or not world.sequences:
        # A prompt that repeats what another sequence began with, up to some token.
        tokens = data.draw(token_lists)
        if world.sequences:
            other = world.sequences[data.draw(st.sampled_from(numbers))][1]
            tokens = [*other[: data.draw(st.integers(0, len(other)))], *tokens]
        recompute(world, world.open(), tokens[:MOST_TOKENS], data)
        return
    index = data.draw(st.sampled_from(numbers))
    kv, known = world.sequences[index]
    if what == "end":
        world.end(index)
    elif what == "rollback":
        num_rows = data.draw(st.integers(0, len(known)))
        kv.rollback(num_rows)
        del known[num_rows:]
        world.check([index])
    elif what == "fork":
        try:
            forked = kv.fork()
        except CapacityExceeded:
            return
        world.check([world.open(forked, known), index])
    elif what == "preempt" and known:
        kv.rollback(0)
        recompute(world, index, known[:], data)
    else:
        some = data.draw(st.lists(st.sampled_from(numbers), min_size=1, max_size=3, unique=True))
        parts = []
        for number in some:
            if len(world.sequences[number][1]) < MOST_TOKENS:
                tree = data.draw(st.just(EMPTY_BLOCK) | trees)
                parts.append((number, data.draw(token_lists), tree, leaf_path(tree, data)))
        world.feed(parts)


def recompute(world: World, index: int, tokens: Sequence[int], data: st.DataObject) -> None:
    """Feeds a sequence without rows from the first token on, in chunks, behind whatever pages can be adopted."""
    kv, known = world.sequences[index]
    known[:] = tokens[: kv.adopt(tokens)]
    assert kv.num_rows == len(known) < len(tokens)
    while len(known) < len(tokens):
        before = len(known)
        size = data.draw(st.integers(1, len(tokens)))
        world.feed([(index, tokens[before : before + size], EMPTY_BLOCK, ())])
        if len(known) == before:  # the pool is full
            world.end(index)
            return


@dataclass(frozen=True, slots=True)
class Pair:
    """A model run by one of the runners, and as `transformers` runs it.

    `evicted`: pages that were evicted by the end of an example, and by the beginning of the next one, negated.
    """

    runner: ModelRunner
    stock: LlamaForCausalLM
    evicted: list[int] = field(default_factory=list)


@pytest.fixture(
    scope="module",
    params=itertools.product(["llama", "mistral_window"], [RunnerChoice.NATIVE, RunnerChoice.TRANSFORMERS]),
    ids=lambda parameters: f"{parameters[0]}-{parameters[1].value}",
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    name, choice = request.param
    folder = write_model(tmp_path_factory.mktemp(name), SERVED[name], seed=2)
    options = RunnerOptions(kv_bytes=NUM_PAGES * PAGE_TOKENS * ROW_BYTES, page_tokens=PAGE_TOKENS, runner=choice)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return Pair(load_runner(folder, options=options), cast("LlamaForCausalLM", stock))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(data=st.data())
def test_next_logits_are_those_of_a_fresh_forward_after_every_round(pair: Pair, data: st.DataObject) -> None:
    world = World(pair.runner, pair.stock)
    try:
        for _ in range(data.draw(st.integers(6, 24))):
            play_a_round(world, data)
    finally:
        while world.sequences:
            world.end(0)
    assert pair.runner.pool.pages_in_use == 0
    pair.runner.pool.check_integrity()
    pair.evicted.append(pair.runner.pool.prefix_stats.evicted_pages)
    # The next example begins with an empty pool, or it would not repeat itself.
    everything = pair.runner.new_sequence()
    everything.reserve(NUM_PAGES * PAGE_TOKENS)
    everything.free()
    pair.evicted.append(-pair.runner.pool.prefix_stats.evicted_pages)


def test_the_rounds_shared_and_evicted_pages(pair: Pair) -> None:
    """After the test above: what it is there for has happened."""
    assert pair.runner.pool.prefix_stats.hit_tokens > 0
    assert sum(pair.evicted) + pair.runner.pool.prefix_stats.evicted_pages > 0
