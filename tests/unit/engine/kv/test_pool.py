"""The page pool: room for rows, commit, where pages lie, budgets."""

from __future__ import annotations

import pytest
import torch

from paceline.engine.kv.pool import KVPool, PlaneShape
from paceline.engine.kv.sequence import page_runs
from paceline.errors import CapacityExceeded, ConfigurationError
from tests.unit.engine.kv.rows import labels, make_pool, write


def test_commit_of_a_path_moves_its_rows_together() -> None:
    pool = make_pool()
    kv = pool.new_sequence()
    kv.reserve(2 + 5)
    write(pool, kv, [10, 11, 1, 2, 3, 4, 5])
    kv.commit(2, (2, 3, 5))
    assert labels(pool, kv) == [10, 11, 2, 3, 5]


def test_commit_of_a_chain_moves_nothing() -> None:
    pool = make_pool()
    kv = pool.new_sequence()
    kv.reserve(4)
    write(pool, kv, [10, 1, 2, 3])
    before = [group.clone() for group in pool.groups]
    kv.commit(1, (1, 2))
    assert labels(pool, kv) == [10, 1, 2]
    assert all(torch.equal(left, right) for left, right in zip(before, pool.groups, strict=True))


def test_sequences_that_grow_in_turn_stay_in_one_range_each() -> None:
    pool = make_pool(num_pages=64)
    sequences = [pool.new_sequence() for _ in range(4)]
    for _ in range(30):
        for kv in sequences:
            kv.reserve(1)
            kv.commit(1)
    assert all(len(page_runs(kv.pages)) == 1 for kv in sequences)


def test_slots_of_scattered_pages_are_in_the_order_of_the_rows() -> None:
    pool = make_pool(num_pages=4, page_tokens=2)
    kv = pool.new_sequence()
    kv.pages = pool.take_pages(4, None)[::-1]
    kv.num_rows = 7
    assert kv.slot_list(0, 7) == [6, 7, 4, 5, 2, 3, 0]


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
