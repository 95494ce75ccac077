"""Pages that belong together lie side by side where that costs nothing, and idle ones make way."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.kv.pool import KVPool, SequenceKV
from paceline.engine.kv.sequence import page_runs
from tests.unit.engine.kv.rows import TEXT, fill, labels, make_pool, published


def full_of_idle_pages() -> KVPool:
    """64 pages of one row, all idle: sequence i of 4 had tokens from 100 * i on, in pages [16 * i, 16 * i + 16)."""
    pool = make_pool(num_pages=64, page_tokens=1)
    for index in range(4):
        kv = pool.new_sequence()
        kv.pages = pool.take_pages(16, 16 * index - 1)
        tokens = range(100 * index, 100 * index + 16)
        fill(pool, kv, tokens)
        kv.publish(tokens)
        kv.free()
    return pool


def test_a_run_that_begins_in_a_full_pool_finds_a_gap() -> None:
    pool = full_of_idle_pages()
    kv = pool.new_sequence()
    fill(pool, kv, [1])
    assert pool.prefix_stats.evicted_pages == 4, "a 16th of the pool, not a single page"
    assert pool.new_sequence().adopt(range(17)) == 12


def test_a_run_grows_into_the_idle_pages_beside_it() -> None:
    pool = full_of_idle_pages()
    kv = pool.new_sequence()
    for label in range(20):
        fill(pool, kv, [label])
    assert len(page_runs(kv.pages)) == 1
    assert labels(pool, kv) == list(range(20))
    pool.check_integrity()


def test_idle_pages_are_left_alone_while_many_are_free() -> None:
    pool = make_pool(num_pages=16, page_tokens=1)
    kv = pool.new_sequence()
    fill(pool, kv, range(6))
    other = published(pool, range(50, 56))
    kv.free()
    again = pool.new_sequence()
    again.pages = pool.take_pages(1, other.pages[0] - 2)
    assert again.pages == [other.pages[0] - 1], "beside the other's first page"
    other.free()
    fill(pool, again, range(5))
    assert pool.prefix_stats.evicted_pages == 0
    assert labels(pool, again) == list(range(5))


def scattered(pool: KVPool, tokens: Sequence[int]) -> SequenceKV:
    """A sequence whose pages lie in descending order."""
    kv = pool.new_sequence()
    kv.pages = pool.take_pages(-(-len(tokens) // pool.page_tokens), None)[::-1]
    fill(pool, kv, tokens)
    return kv


def test_straightened_pages_are_neighbours_and_still_found() -> None:
    pool = make_pool(num_pages=8)
    kv = scattered(pool, TEXT[:10])
    kv.publish(TEXT[:10])
    assert pool.straighten(kv)
    assert len(page_runs(kv.pages)) == 1
    assert labels(pool, kv) == TEXT[:10]
    pool.check_integrity()
    other = pool.new_sequence()
    assert other.adopt(TEXT[:10]) == 8
    assert labels(pool, other) == TEXT[:8]
    assert not pool.straighten(kv), "it is straight"


def test_straightening_leaves_shared_pages_where_they_are() -> None:
    pool = make_pool(num_pages=12)
    kv = scattered(pool, TEXT[:8])
    fork = kv.fork()
    shared = list(kv.pages)
    fork.pages += pool.take_pages(3, None)[::-1]
    fill(pool, fork, range(12))
    assert pool.straighten(fork)
    assert fork.pages[:2] == kv.pages == shared
    assert fork.pages[2:] == list(range(fork.pages[2], fork.pages[2] + 3))
    assert labels(pool, fork) == [*TEXT[:8], *range(12)]
    pool.check_integrity()


def test_nothing_is_straightened_without_a_gap() -> None:
    pool = make_pool(num_pages=5)
    kv = scattered(pool, TEXT[:12])
    pages = list(kv.pages)
    assert not pool.straighten(kv)
    assert kv.pages == pages


def test_idle_pages_make_way_where_the_fewest_must() -> None:
    pool = make_pool(num_pages=16)

    def sequence(after: int | None, tokens: Sequence[int]) -> SequenceKV:
        kv = pool.new_sequence()
        kv.pages = pool.take_pages(len(tokens) // pool.page_tokens, after)
        fill(pool, kv, tokens)
        return kv

    many, few = TEXT[:16], range(8)
    idle = {0: sequence(None, many), 11: sequence(10, few)}
    kv = sequence(3, range(100, 116))
    blockers = [sequence(7, range(12)), sequence(14, range(4))]
    for first, other in idle.items():
        assert other.pages[0] == first
        other.publish(many if first == 0 else few)
        other.free()
    kv.pages.reverse()
    expected = labels(pool, kv)
    assert pool.straighten(kv)  # to pages [11, 15), of which two are idle, and not to [0, 4), which all are
    assert kv.pages == [11, 12, 13, 14]
    assert labels(pool, kv) == expected
    assert pool.prefix_stats.evicted_pages == 2
    assert pool.new_sequence().adopt(many) == 12
    assert [len(blocker.pages) for blocker in blockers] == [3, 1]
    pool.check_integrity()
