"""The page pool against a model that keeps each sequence's rows in a list."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.kv.pool import KVPool, PlaneShape, SequenceKV
from paceline.errors import CapacityExceeded, ConfigurationError

SHAPES = [PlaneShape(2, 2, 3), PlaneShape(1, 1, 4)]


def make_pool(num_pages: int = 8, page_tokens: int = 4) -> KVPool:
    pool = KVPool(SHAPES, num_pages, page_tokens)
    for group in pool.groups:
        group.zero_()  # fresh memory may hold NaN, which equals nothing
    return pool


def write(pool: KVPool, kv: SequenceKV, first_row: int, labels: list[int]) -> None:
    for slot, label in zip(kv.slot_list(first_row, first_row + len(labels)), labels, strict=True):
        for group in pool.groups:
            group[:, :, slot] = float(label)


def read(pool: KVPool, kv: SequenceKV) -> list[int]:
    labels: list[list[int]] = []
    for group in pool.groups:
        rows = group[:, :, kv.slots(kv.num_rows)]
        assert bool((rows == rows[:1, :1, :, :1]).all()), "planes of one slot hold different rows"
        labels.append([int(value) for value in rows[0, 0, :, 0]])
    assert labels[0] == labels[1]
    return labels[0]


@dataclass
class Naive:
    kv: SequenceKV
    rows: list[int] = field(default_factory=list)


class PoolMachine(RuleBasedStateMachine):
    """Random passes, rollbacks and frees of several sequences; each row carries a label of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(num_pages=12, page_tokens=3)
        self.sequences: list[Naive] = []
        self.next_label = 1

    @precondition(lambda self: len(self.sequences) < 5)
    @rule()
    def new(self) -> None:
        self.sequences.append(Naive(self.pool.new_sequence()))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_chain=st.integers(1, 7), num_nodes=st.integers(0, 6))
    def run_pass(self, data: st.DataObject, num_chain: int, num_nodes: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        before = list(sequence.kv.pages)
        try:
            sequence.kv.reserve(num_chain + num_nodes)
        except CapacityExceeded:
            assert sequence.kv.pages == before
            free = self.pool.num_pages - self.pool.pages_in_use
            assert len(sequence.rows) + num_chain + num_nodes > (len(before) + free) * self.pool.page_tokens
            return
        labels = list(range(self.next_label, self.next_label + num_chain + num_nodes))
        self.next_label += len(labels)
        write(self.pool, sequence.kv, len(sequence.rows), labels)
        path = sorted(data.draw(st.sets(st.integers(1, num_nodes)))) if num_nodes else []
        kept = num_chain if path else data.draw(st.integers(0, num_chain))
        sequence.kv.commit(kept, path)
        sequence.rows += labels[:kept] + [labels[num_chain - 1 + node] for node in path]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_rows=st.integers(0, 30))
    def rollback(self, data: st.DataObject, num_rows: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        sequence.kv.rollback(num_rows)
        del sequence.rows[num_rows:]

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        self.sequences.remove(sequence)
        sequence.kv.free()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_sequences == len(self.sequences)
        for sequence in self.sequences:
            assert sequence.kv.num_rows == len(sequence.rows)
            assert read(self.pool, sequence.kv) == sequence.rows
        tokens_per_page = self.pool.page_tokens
        assert self.pool.pages_in_use == sum(-(-len(s.rows) // tokens_per_page) for s in self.sequences)

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.kv.free()
        assert self.pool.pages_in_use == 0
        self.pool.check_integrity()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_commit_of_a_path_moves_its_rows_together() -> None:
    pool = make_pool()
    kv = pool.new_sequence()
    kv.reserve(2 + 5)
    write(pool, kv, 0, [10, 11, 1, 2, 3, 4, 5])
    kv.commit(2, (2, 3, 5))
    assert read(pool, kv) == [10, 11, 2, 3, 5]


def test_commit_of_a_chain_moves_nothing() -> None:
    pool = make_pool()
    kv = pool.new_sequence()
    kv.reserve(4)
    write(pool, kv, 0, [10, 1, 2, 3])
    before = [group.clone() for group in pool.groups]
    kv.commit(1, (1, 2))
    assert read(pool, kv) == [10, 1, 2]
    assert all(torch.equal(left, right) for left, right in zip(before, pool.groups, strict=True))


def test_sequences_that_grow_in_turn_stay_in_one_range_each() -> None:
    pool = make_pool(num_pages=64)
    sequences = [pool.new_sequence() for _ in range(4)]
    for _ in range(30):
        for kv in sequences:
            kv.reserve(1)
            kv.commit(1)
    assert all(isinstance(kv.slots(kv.num_rows), slice) for kv in sequences)


def test_scattered_pages_are_gathered_in_order() -> None:
    pool = make_pool(num_pages=4, page_tokens=2)
    kv = pool.new_sequence()
    kv.pages = pool.take_pages(4, None)[::-1]
    kv.num_rows = 7
    assert kv.slot_list(0, 7) == [6, 7, 4, 5, 2, 3, 0]
    slots = kv.slots(7)
    assert isinstance(slots, torch.Tensor)
    assert slots.tolist() == kv.slot_list(0, 7)


def test_a_full_pool_says_how_much_is_missing() -> None:
    pool = make_pool(num_pages=2, page_tokens=4)
    kv = pool.new_sequence()
    with pytest.raises(CapacityExceeded, match=r"2 of 2 pages free \(4 tokens each\), 3 more are needed"):
        kv.reserve(9)
    assert kv.pages == []
    kv.reserve(8)


def test_capacity_follows_from_the_budget_to_the_byte() -> None:
    # 2 layers x (keys and values) x 3 heads x 8 numbers x 4 bytes
    shapes = [PlaneShape(4, 3, 8)]
    pool = KVPool.within_budget(shapes, budget_bytes=10_000, page_tokens=4)
    assert pool.bytes_per_token == 2 * 2 * 3 * 8 * 4
    assert pool.num_pages == 10_000 // (384 * 4)
    assert pool.num_bytes == sum(group.numel() * group.element_size() for group in pool.groups)


def test_a_budget_below_one_page_is_refused_with_the_least_budget() -> None:
    with pytest.raises(ConfigurationError, match="one page of 4 tokens takes 1536 bytes") as caught:
        KVPool.within_budget([PlaneShape(4, 3, 8)], budget_bytes=1000, page_tokens=4)
    assert caught.value.field == "kv_bytes"


def test_integrity_check_finds_a_page_in_one_more_table_than_counted() -> None:
    pool = make_pool()
    first, second = pool.new_sequence(), pool.new_sequence()
    first.reserve(4)
    second.reserve(4)
    second.pages[0] = first.pages[0]
    with pytest.raises(AssertionError, match="page 0 is in 2 block tables, 1 counted"):
        pool.check_integrity()
