"""Rules of sharing: what is published, what is found, who may write, what goes when room is needed."""

from __future__ import annotations

from typing import Never

import pytest

from paceline.engine.kv.pool import PrefixStats
from paceline.errors import CapacityExceeded
from tests.unit.engine.kv.rows import TEXT, fill, labels, make_pool, published, write


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
