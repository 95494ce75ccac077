"""Rules of sharing: what is published, what is found, who may write, what goes when room is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Never

import pytest

from paceline.engine.kv.pool import KVPool, PrefixStats, SequenceKV
from paceline.engine.kv.sequence import page_runs
from paceline.errors import CapacityExceeded
from tests.unit.engine.kv.rows import fill, labels, make_pool, write

TEXT = list(range(100, 120))


def published(pool: KVPool, tokens: Sequence[int]) -> SequenceKV:
    """A sequence whose rows are computed and published; rows are labelled by their tokens."""
    kv = pool.new_sequence()
    fill(pool, kv, tokens)
    kv.publish(tokens)
    return kv


def test_full_pages_are_found_and_one_token_is_left_to_compute() -> None:
    pool = make_pool()
    first = published(pool, TEXT[:10])  # pages of 4: two are full
    second, third = pool.new_sequence(), pool.new_sequence()
    assert second.adopt(TEXT[:10]) == 8
    assert labels(pool, second) == TEXT[:8]
    assert second.pages == first.pages[:2]
    assert third.adopt(TEXT[:8]) == 4, "the logits of the last token are wanted, so it is computed"
    assert pool.pages_in_use == 3
    assert pool.prefix_stats == PrefixStats(queried_tokens=18, hit_tokens=12)


def test_pages_beyond_the_committed_rows_are_not_published() -> None:
    pool = make_pool()
    kv = pool.new_sequence()
    fill(pool, kv, TEXT[:6])
    kv.reserve(6)
    write(pool, kv, TEXT[6:12])
    kv.publish(TEXT[:12])
    assert pool.new_sequence().adopt(TEXT[:12]) == 4


def test_equal_tokens_after_another_beginning_are_not_found() -> None:
    pool = make_pool()
    published(pool, [1, 2, 3, 4, 5, 6, 7, 8])
    assert pool.new_sequence().adopt([1, 2, 3, 9, 5, 6, 7, 8, 0]) == 0
    assert pool.new_sequence().adopt([5, 6, 7, 8, 0]) == 0


def test_a_sequence_with_rows_of_its_own_goes_on_with_found_ones_at_a_page_boundary() -> None:
    pool = make_pool()
    published(pool, TEXT[:12])
    kv = pool.new_sequence()
    fill(pool, kv, TEXT[:3])
    assert kv.adopt(TEXT) == 0, "rows end inside a page"
    fill(pool, kv, TEXT[3:4])
    assert kv.adopt(TEXT) == 8
    assert labels(pool, kv) == TEXT[:12]
    assert pool.pages_in_use == 3


def test_found_pages_take_the_place_of_reserved_ones() -> None:
    pool = make_pool()
    published(pool, TEXT[:8])
    kv = pool.new_sequence()
    kv.reserve(12)
    assert kv.adopt(TEXT[:9]) == 8
    assert labels(pool, kv) == TEXT[:8]
    assert pool.pages_in_use == 2


def test_a_sequence_that_is_freed_leaves_what_it_published() -> None:
    pool = make_pool()
    published(pool, TEXT[:10]).free()
    assert pool.pages_in_use == 0
    assert pool.usage.used_tokens == 0
    assert pool.pages_available == 8
    kv = pool.new_sequence()
    assert kv.adopt(TEXT[:10]) == 8
    assert labels(pool, kv) == TEXT[:8]


def test_an_equal_page_is_kept_once() -> None:
    pool = make_pool()
    first = published(pool, TEXT[:8])
    second = pool.new_sequence()
    fill(pool, second, TEXT[:9])
    assert pool.pages_in_use == 5
    second.publish(TEXT[:9])
    assert second.pages[:2] == first.pages
    assert labels(pool, second) == TEXT[:9]
    assert pool.pages_in_use == 3


class Unreadable(list[int]):
    """Tokens that nobody may look at."""

    def __getitem__(self, index: object) -> Never:
        raise AssertionError("read for nothing")


def test_publishing_reads_no_token_when_no_page_was_filled() -> None:
    pool = make_pool()
    kv = published(pool, TEXT[:4])
    fill(pool, kv, TEXT[4:7])
    kv.publish(Unreadable(TEXT[:7]))
    fill(pool, kv, TEXT[7:8])
    with pytest.raises(AssertionError, match="read for nothing"):
        kv.publish(Unreadable(TEXT[:8]))


def test_publishing_needs_a_token_for_every_row() -> None:
    pool = make_pool()
    kv = pool.new_sequence()
    fill(pool, kv, TEXT[:8])
    with pytest.raises(ValueError, match="7 tokens for 8 rows"):
        kv.publish(TEXT[:7])


def test_writing_after_a_rollback_into_a_shared_page_copies_its_rows() -> None:
    pool = make_pool()
    first = published(pool, TEXT[:8])
    second = pool.new_sequence()
    second.adopt(TEXT[:9])
    second.rollback(6)
    assert second.pages == first.pages, "nothing is copied before something is to be written"
    fill(pool, second, [1, 2, 3])
    assert labels(pool, second) == [*TEXT[:6], 1, 2, 3]
    assert labels(pool, first) == TEXT[:8]
    assert second.pages[0] == first.pages[0]
    second.publish([*TEXT[:6], 1, 2, 3])
    assert pool.new_sequence().adopt([*TEXT[:6], 1, 2, 3]) == 8


def test_a_shared_page_is_not_copied_when_the_pool_is_full() -> None:
    pool = make_pool(num_pages=2)
    first = published(pool, TEXT[:8])
    second = first.fork()
    second.rollback(6)
    with pytest.raises(CapacityExceeded, match=r"0 of 2 pages free .* 1 more are needed"):
        second.reserve(1)
    assert second.pages == first.pages
    pool.check_integrity()
    first.free()
    fill(pool, second, [1])
    assert labels(pool, second) == [*TEXT[:6], 1]


def test_the_only_holder_of_a_published_page_takes_it_back_and_needs_no_room() -> None:
    pool = make_pool(num_pages=3)
    kv = published(pool, TEXT[:12])
    kv.rollback(6)
    page = kv.pages[1]
    fill(pool, kv, [1, 2, 3, 4, 5, 6])
    assert kv.pages[1] == page
    assert labels(pool, kv) == [*TEXT[:6], 1, 2, 3, 4, 5, 6]
    pool.check_integrity()
    kv.free()
    assert pool.new_sequence().adopt(TEXT[:12]) == 4, "only what was not written again is found"


def test_compaction_after_a_shared_prefix_leaves_it_alone() -> None:
    pool = make_pool()
    first = published(pool, TEXT[:8])
    second = first.fork()
    second.rollback(7)
    second.reserve(2 + 4)
    write(pool, second, [10, 11, 1, 2, 3, 4])
    second.commit(2, (2, 4))
    assert labels(pool, second) == [*TEXT[:7], 10, 11, 2, 4]
    assert labels(pool, first) == TEXT[:8]


def test_discarded_rows_are_not_found_and_nothing_that_continues_them() -> None:
    pool = make_pool(num_pages=16)
    first = published(pool, TEXT[:8])
    second = pool.new_sequence()
    second.adopt(TEXT[:9])
    first.discard()
    assert first.pages == []
    fill(pool, second, TEXT[8:12])
    second.publish(TEXT[:12])
    assert second.adopt(TEXT) == 0
    assert pool.new_sequence().adopt(TEXT) == 0
    assert labels(pool, second) == TEXT[:12]
    again = published(pool, TEXT[:8])
    second.publish(TEXT[:12])
    assert second.pages[0] != again.pages[0]
    assert pool.new_sequence().adopt(TEXT) == 8, "what was computed anew is offered, not what continues the old rows"
    pool.check_integrity()


def test_the_pool_tells_what_a_reservation_takes_and_what_sequences_would_free() -> None:
    pool = make_pool()
    first = published(pool, TEXT[:8])
    second = pool.new_sequence()
    second.adopt(TEXT[:9])
    second.rollback(6)
    assert [second.pages_to_reserve(count) for count in (1, 2, 3)] == [1, 1, 2], "one for the copy"
    assert [first.pages_to_reserve(count) for count in (1, 4, 5)] == [1, 1, 2]
    fill(pool, second, [1])
    assert (pool.pages_of([first]), pool.pages_of([second]), pool.pages_of([first, second])) == (1, 1, 3)


def test_a_fork_shares_full_pages_and_copies_the_partial_one() -> None:
    pool = make_pool()
    first = pool.new_sequence()
    fill(pool, first, TEXT[:10])
    second = first.fork()
    assert second.pages[:2] == first.pages[:2]
    assert pool.pages_in_use == 4
    fill(pool, first, [1])
    fill(pool, second, [2])
    assert labels(pool, first) == [*TEXT[:10], 1]
    assert labels(pool, second) == [*TEXT[:10], 2]


def test_a_fork_without_room_is_refused() -> None:
    pool = make_pool(num_pages=2)
    kv = pool.new_sequence()
    fill(pool, kv, TEXT[:7])
    with pytest.raises(CapacityExceeded, match="0 of 2 pages free"):
        kv.fork()
    assert pool.num_sequences == 1
    pool.check_integrity()
    fill(pool, kv, TEXT[7:8])
    assert labels(pool, kv.fork()) == TEXT[:8]


def test_a_fork_is_found_again_after_its_predecessor_was_evicted() -> None:
    """A fork's first page is its own, the second one's predecessor in the table is another page, which may go."""
    pool = make_pool(num_pages=5)
    rival = pool.new_sequence()
    fill(pool, rival, TEXT[:4])
    first = pool.new_sequence()
    fill(pool, first, TEXT[:8])
    fork = first.fork()
    rival.publish(TEXT[:4])
    first.publish(TEXT[:8])  # swaps its first page for the rival's; the fork keeps the old one
    first.free()
    rival.free()
    assert pool.pages_in_use == 2
    other = pool.new_sequence()
    other.reserve(12)
    assert pool.prefix_stats.evicted_pages == 1
    pool.check_integrity()
    other.free()
    assert pool.new_sequence().adopt(TEXT[:9]) == 0
    fork.publish(TEXT[:8])
    assert pool.new_sequence().adopt(TEXT[:9]) == 8


def test_free_pages_are_taken_before_idle_ones() -> None:
    pool = make_pool(num_pages=4)
    published(pool, TEXT[:8]).free()
    kv = pool.new_sequence()
    kv.reserve(8)
    assert pool.prefix_stats.evicted_pages == 0
    kv.reserve(9)
    assert pool.prefix_stats.evicted_pages == 1
    assert pool.new_sequence().adopt(TEXT[:9]) == 4, "a chain's tail goes before its head"


def test_what_was_not_used_for_longest_goes_first() -> None:
    pool = make_pool(num_pages=6)
    for start in (0, 8, 16):
        published(pool, range(start, start + 8)).free()
    again = pool.new_sequence()
    again.adopt(range(9))
    again.free()
    kv = pool.new_sequence()
    kv.reserve(12)
    kv.free()
    found = [pool.new_sequence().adopt(range(start, start + 9)) for start in (0, 8, 16)]
    assert found == [8, 0, 4]


def test_pages_that_a_sequence_holds_are_never_evicted() -> None:
    pool = make_pool(num_pages=4)
    kv = published(pool, TEXT[:8])
    published(pool, TEXT[10:18]).free()
    assert pool.pages_available == 2
    other = pool.new_sequence()
    with pytest.raises(CapacityExceeded, match=r"2 of 4 pages free \(4 tokens each\), 3 more are needed"):
        other.reserve(9)
    assert other.pages == []
    assert pool.prefix_stats.evicted_pages == 0, "nothing is evicted for a request that is refused"
    other.reserve(8)
    assert labels(pool, kv) == TEXT[:8]
    pool.check_integrity()


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


def test_without_prefix_caching_nothing_is_kept_and_forks_still_share() -> None:
    pool = make_pool(prefix_caching=False)
    kv = published(pool, TEXT[:8])
    assert pool.new_sequence().adopt(TEXT[:9]) == 0
    fork = kv.fork()
    assert pool.pages_in_use == 2
    fork.rollback(6)
    fill(pool, fork, [1])
    assert labels(pool, kv) == TEXT[:8]
    kv.free()
    pool.check_integrity()
    fork.free()
    assert (pool.pages_in_use, pool.prefix_stats) == (0, PrefixStats())


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


def hold_twice(pool: KVPool, kv: SequenceKV) -> None:
    pool.hold(kv.pages[0])


def name_twice(pool: KVPool, kv: SequenceKV) -> None:
    kv.pages[2] = kv.pages[0]


def lose_a_page(pool: KVPool, kv: SequenceKV) -> None:
    pool.release([kv.pages.pop()])


def publish_a_partial_page(pool: KVPool, kv: SequenceKV) -> None:
    assert pool.prefixes is not None
    kv.reserve(8)
    pool.prefixes.publish(kv.pages[-1], b"key", pool.prefixes.root)


def publish_twice(pool: KVPool, kv: SequenceKV) -> None:
    assert pool.prefixes is not None
    pool.prefixes.publish(kv.pages[0], b"key", pool.prefixes.root)


def retire_a_held_page(pool: KVPool, kv: SequenceKV) -> None:
    assert pool.prefixes is not None
    pool.prefixes.retire(kv.pages[0])


def swap_two_pages(pool: KVPool, kv: SequenceKV) -> None:
    kv.pages[0], kv.pages[1] = kv.pages[1], kv.pages[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (hold_twice, "in 1 block tables, 2 counted"),
        (name_twice, "twice in block table"),
        (lose_a_page, "10 rows do not fit"),
        (publish_a_partial_page, "holds no committed row and is published"),
        (publish_twice, "published under"),
        (retire_a_held_page, "one of the three must hold"),
        (swap_two_pages, "key of other tokens"),
    ],
)
def test_integrity_check_finds_damage(damage: Callable[[KVPool, SequenceKV], None], message: str) -> None:
    pool = make_pool()
    kv = published(pool, TEXT[:10])
    pool.check_integrity()
    damage(pool, kv)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
