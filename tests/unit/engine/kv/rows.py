"""Rows that can be told apart: what a test writes into a pool, and how it reads it back.

Every row carries two numbers: in the first group of planes what the row is of (a label), in the second who wrote it.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.kv.pool import KVPool, PlaneShape, SequenceKV

SHAPES = [PlaneShape(2, 2, 3), PlaneShape(1, 1, 4)]

TEXT = list(range(100, 120))
"""What sequences hold; rows are labelled by these numbers."""


def make_pool(num_pages: int = 8, page_tokens: int = 4, *, prefix_caching: bool = True) -> KVPool:
    pool = KVPool(SHAPES, num_pages, page_tokens, prefix_caching=prefix_caching)
    for group in pool.groups:
        group.zero_()  # fresh memory may hold NaN, which equals nothing
    return pool


def write(pool: KVPool, kv: SequenceKV, labels: Sequence[int], stamps: Sequence[int] | None = None) -> None:
    """Writes reserved rows as a pass does; fails if anyone else could read them."""
    for index, slot in enumerate(kv.slot_list(kv.num_rows, kv.num_rows + len(labels))):
        page = slot // pool.page_tokens
        assert pool.num_holders(page) == 1, f"page {page} is shared"
        assert pool.prefixes is None or pool.prefixes.key(page) is None, f"page {page} is published"
        pool.groups[0][:, :, slot] = float(labels[index])
        pool.groups[1][:, :, slot] = float((labels if stamps is None else stamps)[index])


def read(pool: KVPool, kv: SequenceKV) -> tuple[list[int], list[int]]:
    """Labels and stamps of rows [0, num_rows)."""
    columns: list[list[int]] = []
    for group in pool.groups:
        rows = group[:, :, kv.slot_list(0, kv.num_rows)]
        assert bool((rows == rows[:1, :1, :, :1]).all()), "planes of one slot hold different rows"
        columns.append([int(value) for value in rows[0, 0, :, 0]])
    return columns[0], columns[1]


def labels(pool: KVPool, kv: SequenceKV) -> list[int]:
    """Labels of rows that were written without stamps of their own."""
    of, by = read(pool, kv)
    assert of == by
    return of


def fill(pool: KVPool, kv: SequenceKV, labels: Sequence[int]) -> None:
    """One pass that adds rows and keeps them all."""
    kv.reserve(len(labels))
    write(pool, kv, labels)
    kv.commit(len(labels))


def published(pool: KVPool, tokens: Sequence[int]) -> SequenceKV:
    """A sequence whose rows are computed and published; rows are labelled by their tokens."""
    kv = pool.new_sequence()
    fill(pool, kv, tokens)
    kv.publish(tokens)
    return kv
