"""Paged attention against a plain softmax in float64: ragged batches, trees, windows, scattered pages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.kv.pool import KVPool, SequenceKV
from paceline.engine.kv.sequence import page_runs
from paceline.engine.pass_plan import MAX_RUNS, plan_pass
from paceline.engine.runner import SequencePass
from paceline.speculation.tree import DraftTree

PAGE_TOKENS = 16
NUM_PAGES = 96
HEAD_DIM = 8
CPU = torch.device("cpu")


def random_tree(generator: random.Random, num_nodes: int, *, chain: bool) -> DraftTree:
    if chain:
        return DraftTree.chain(range(1, num_nodes + 1))
    return DraftTree(tuple(range(1, num_nodes + 1)), tuple(generator.randrange(node + 1) for node in range(num_nodes)))


def scatter(kv: SequenceKV, pool: KVPool, order: Sequence[int]) -> None:
    """Puts the sequence's rows into other pages, in the given order of them, and fills the pool: there they stay."""
    taken = pool.take_pages(len(order), NUM_PAGES // 2 - 1)
    moved = [taken[index] for index in order]
    for source, target in zip(kv.pages, moved, strict=True):
        pool.copy_rows(source, target, PAGE_TOKENS)
    pool.release(kv.pages)
    kv.pages[:] = moved
    pool.take_pages(pool.pages_available, None)


class World:
    """A pool of random rows, and random new tokens for the parts of a pass."""

    def __init__(self, num_heads: int, num_kv_heads: int, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self.generator = random.Random(seed)
        torch.manual_seed(seed)
        self.attention = PagedAttention.for_layers([None], num_kv_heads, HEAD_DIM)
        self.pool = KVPool(self.attention.plane_shapes(), NUM_PAGES, PAGE_TOKENS, dtype=dtype, prefix_caching=False)
        for group in self.pool.groups:
            group.normal_()
        self.attention.attach(self.pool)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads

    def sequence(self, num_rows: int) -> SequenceKV:
        kv = self.pool.new_sequence()
        kv.reserve(num_rows)
        kv.commit(num_rows)
        return kv

    def tokens(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        query, key, value = (torch.randn(1, count, num_tokens, HEAD_DIM) for count in heads)
        return query, key, value

    def run(
        self,
        parts: Sequence[SequencePass],
        tokens: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        self.attention.plan = plan_pass(parts, CPU)
        return self.attention(0, *tokens, None, window, softcap)[0]

    def expected(
        self, part: SequencePass, query: torch.Tensor, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        """Attention of one part by its definition; its new rows must be written. query # [num_heads, num_new, dim]"""
        num_rows = part.kv.num_rows + part.num_tokens
        slots = part.kv.slot_list(0, num_rows)
        keys, values = (plane[:, slots].double() for plane in self.pool.groups[0])
        keys, values = (rows.repeat_interleave(self.num_heads // self.num_kv_heads, 0) for rows in (keys, values))
        scores = query.double() @ keys.transpose(1, 2) * HEAD_DIM**-0.5
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores.masked_fill_(~self._visible(part, num_rows, window), -torch.inf)
        result: torch.Tensor = scores.softmax(-1) @ values
        return result.transpose(0, 1)

    @staticmethod
    def _visible(part: SequencePass, num_rows: int, window: int | None) -> torch.Tensor:
        """Row by row: a token sees older rows, its own chain up to itself, and of the tree its ancestors."""
        first, num_chain = part.kv.num_rows, len(part.tokens)
        root = first + num_chain - 1
        position = torch.tensor([*range(root), *(root + depth for depth in part.tree.depths)])
        visible = torch.zeros(part.num_tokens, num_rows, dtype=torch.bool)
        for new in range(part.num_tokens):
            visible[new, : first + min(new, num_chain - 1) + 1] = True
            node = new - num_chain + 1
            while node > 0:
                visible[new, root + node] = True
                node = part.tree.parents[node - 1]
        if window is None:
            return visible
        return visible & (position[first:, None] - position < window)


def random_parts(world: World, *, scattered: bool) -> list[SequencePass]:
    generator = world.generator
    parts = []
    for index in range(3):
        kv = world.sequence(generator.randrange(1, 200))
        chain = tuple(range(generator.choice([1, 1, 3, 40])))
        tree = random_tree(generator, generator.choice([0, 4, 9]), chain=index == 0)
        part = SequencePass(kv, chain, tree, num_logits=1)
        kv.reserve(part.num_tokens)
        parts.append(part)
    if scattered:
        # One alone, since nothing else fits into the pool any more.
        last = parts[-1]
        order = list(range(len(last.kv.pages)))
        cut = len(order) // 2
        scatter(last.kv, world.pool, [*order[cut:], *order[:cut]] if generator.random() < 0.5 else order[::-1])
        return parts[-1:]
    return parts


@pytest.mark.parametrize("scattered", [False, True], ids=["neighbours", "scattered"])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (24, None), (None, 5.0), (24, 5.0)])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (4, 4)])
def test_it_equals_the_definition(
    num_heads: int, num_kv_heads: int, window: int | None, softcap: float | None, scattered: bool
) -> None:
    for seed in range(6):
        world = World(num_heads, num_kv_heads, seed)
        parts = random_parts(world, scattered=scattered)
        tokens = world.tokens(sum(part.num_tokens for part in parts))
        result = world.run(parts, tokens, window, softcap)
        start = 0
        for part in parts:
            stop = start + part.num_tokens
            expected = world.expected(part, tokens[0][0, :, start:stop], window, softcap)
            torch.testing.assert_close(result[start:stop].double(), expected, atol=2e-6, rtol=1e-5)
            start = stop


@pytest.mark.parametrize("num_new", [1, 5, 50])
@pytest.mark.parametrize("window", [None, 150])
def test_several_pieces(num_new: int, window: int | None) -> None:
    world = World(6, 2, seed=1)
    kv = world.sequence(300)
    part = SequencePass(kv, (1,), random_tree(world.generator, num_new - 1, chain=num_new == 50), num_logits=1)
    kv.reserve(num_new)
    order = list(range(len(kv.pages)))
    scatter(kv, world.pool, [*order[15:], *order[:9], *order[14:8:-1]])
    tokens = world.tokens(num_new)
    result = world.run([part], tokens, window)
    plan = world.attention.plan
    assert plan is not None
    assert len(plan.sequences[0].pieces(window, 3, torch.float32)) > 1
    expected = world.expected(part, tokens[0][0], window, None)
    torch.testing.assert_close(result.double(), expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("window", [None, 40], ids=["the last ones", "those outside the window"])
def test_a_query_may_be_blind_for_several_pieces(window: int | None) -> None:
    world = World(6, 2, seed=8)
    kv = world.sequence(16)
    part = SequencePass(kv, tuple(range(240)), num_logits=1)
    kv.reserve(240)
    scatter(kv, world.pool, [*range(12, 16), *range(8, 12), *range(4, 8), *range(4)])
    tokens = world.tokens(240)
    result = world.run([part], tokens, window)
    plan = world.attention.plan
    assert plan is not None
    pieces = plan.sequences[0].pieces(window, 3, torch.float32)
    assert len(pieces) == 4
    blind = torch.stack([piece.blind for piece in pieces if piece.blind is not None])
    assert blind.sum(0).max() >= 2
    torch.testing.assert_close(result.double(), world.expected(part, tokens[0][0], window, None), atol=2e-6, rtol=1e-5)


def test_a_piece_that_begins_inside_the_new_rows_counts_for_those_who_see_it() -> None:
    """The first queries of a chunk see nothing of a run that begins behind them."""
    world = World(6, 2, seed=2)
    kv = world.sequence(100)
    part = SequencePass(kv, tuple(range(100)), num_logits=1)
    kv.reserve(100)
    scatter(kv, world.pool, [*range(5, 13), *range(5)])
    tokens = world.tokens(100)
    result = world.run([part], tokens)
    assert world.attention.plan is not None
    first, second = world.attention.plan.sequences[0].pieces(None, 3, torch.float32)
    assert first.num_rows == 128 > kv.num_rows
    assert second.blind is not None
    torch.testing.assert_close(result.double(), world.expected(part, tokens[0][0], None, None), atol=2e-6, rtol=1e-5)


def test_a_sequence_gets_the_same_bits_whoever_is_beside_it() -> None:
    world = World(6, 2, seed=3)
    parts = random_parts(world, scattered=False)
    tokens = world.tokens(sum(part.num_tokens for part in parts))
    together = world.run(parts, tokens)
    start = 0
    for part in parts:
        stop = start + part.num_tokens
        query, key, value = (rows[:, :, start:stop] for rows in tokens)
        assert torch.equal(world.run([part], (query, key, value)), together[start:stop])
        start = stop


def test_half_precision_is_rounded_once_however_many_pieces_are_read() -> None:
    world = World(6, 2, seed=7, dtype=torch.bfloat16)
    kv = world.sequence(10 * PAGE_TOKENS)
    kv.pages[:] = [*kv.pages[5:], *kv.pages[:5]]
    rest = world.pool.new_sequence()  # leaves no room to move them together
    rest.reserve((world.pool.pages_available - 1) * PAGE_TOKENS)
    kv.reserve(5)
    part = SequencePass(kv, tuple(range(5)), num_logits=1)
    query, key, value = (rows.bfloat16() for rows in world.tokens(5))
    result = world.run([part], (6 * query, key, value)).double()
    plan = world.attention.plan
    assert plan is not None
    assert len(plan.sequences[0].pieces(None, 3, torch.bfloat16)) > 1
    expected = world.expected(part, 6 * query[0], None, None)
    rounded_once = (expected.bfloat16().double() - expected).abs().mean()
    assert (result - expected).abs().mean() < 3 * rounded_once


def test_rows_that_no_token_sees_any_more_are_not_read() -> None:
    world = World(6, 2, seed=4)
    kv = world.sequence(200)
    kv.reserve(2)
    world.pool.groups[0][:, :, kv.slot_list(0, 160)] = torch.nan
    part = SequencePass(kv, (1, 2), num_logits=1)
    assert world.run([part], world.tokens(2), window=32).isfinite().all()


def test_neighbouring_pages_are_read_in_place() -> None:
    world = World(6, 2, seed=5)
    kv = world.sequence(200)
    (piece,) = plan_pass([SequencePass(kv, (1,))], CPU).sequences[0].pieces(None, 3, torch.float32)
    keys = world.pool.groups[0][:1]
    assert piece.rows(keys).untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


def test_a_badly_scattered_sequence_is_moved_together_before_the_pass() -> None:
    world = World(6, 2, seed=6)
    others = [world.sequence(PAGE_TOKENS) for _ in range(12)]
    kv = world.sequence(1)
    for other in others[::2]:
        other.free()
    for start in range(1, 6 * PAGE_TOKENS):
        kv.reserve(1)
        kv.commit(1)
        if start % PAGE_TOKENS == 0:
            world.sequence(1)
    pages = kv.pages
    shuffled = [*pages[::2], *pages[1::2]][::-1]
    kv.pages[:] = shuffled
    rows = world.pool.groups[0][:, :, kv.slot_list(0, kv.num_rows)].clone()
    assert len(page_runs(kv.pages)) > MAX_RUNS
    kv.reserve(1)
    plan_pass([SequencePass(kv, (1,))], CPU)
    assert len(page_runs(kv.pages)) <= MAX_RUNS
    assert torch.equal(world.pool.groups[0][:, :, kv.slot_list(0, kv.num_rows)], rows)
    world.pool.check_integrity()
