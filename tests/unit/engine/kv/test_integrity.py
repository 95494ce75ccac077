"""The check of the pool finds whatever is wrong with it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from paceline.engine.kv.pool import KVPool, SequenceKV
from tests.unit.engine.kv.rows import TEXT, make_pool, published


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
