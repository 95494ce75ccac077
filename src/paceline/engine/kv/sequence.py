"""The rows of one sequence in the pool: its block table, and every way in which rows come and go.

It does not know which pages of the pool are free; `pool.py` does, and says who may write where.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from paceline.engine.kv.pool import KVPool


def page_runs(pages: Sequence[int]) -> list[range]:
    """Splits a list of pages into runs of neighbours in ascending order."""
    runs: list[range] = []
    for page in pages:
        if runs and page == runs[-1].stop:
            runs[-1] = range(runs[-1].start, page + 1)
        else:
            runs.append(range(page, page + 1))
    return runs


@dataclass(slots=True)
class RowsAhead:
    """Rows that were written after those of a sequence, by passes through the model's first layers only.

    Attributes:
        num_layers: layers [0, num_layers) have keys and values of these rows.
        tokens: of rows [num_rows, num_rows + len(tokens)), each seeing all rows before it.
        hidden: what leaves these layers for each token # [1, hidden_size] each
    """

    num_layers: int
    tokens: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)


class SequenceKV:
    """The rows of one sequence. Made by `KVPool.new_sequence`."""

    __slots__ = ("_keys", "_pool", "ahead", "num_rows", "pages")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.num_rows = 0
        """Rows [0, num_rows) are computed."""
        self.pages: list[int] = []
        """Block table: page of rows [i * P, (i + 1) * P)."""
        self.ahead: RowsAhead | None = None
        """What reserved rows hold already; None as soon as rows have come, gone, or been written over."""
        self._keys: list[bytes] = []  # of the first pages, as far as they were adopted or published

    def reserve(self, num_rows: int) -> None:
        """Makes room for rows [self.num_rows, self.num_rows + num_rows) in pages that are this sequence's alone.

        Moves nothing, unless a rollback ended inside a page that other sequences hold too: its rows are copied. If only
        the prefix table holds it besides, it is taken out of there.

        Raises:
            CapacityExceeded: the pool has too few pages; the sequence is unchanged.
        """
        if num_rows < 1:
            return
        num_full, partial_rows = divmod(self.num_rows, self._pool.page_tokens)
        kept = self._num_kept()
        missing = max(self._num_pages(self.num_rows + num_rows) - kept, 0)
        taken = self._pool.take_pages(missing, self.pages[kept - 1] if kept else None) if missing else []
        if kept < len(self.pages):
            self._pool.copy_rows(self.pages[kept], taken[0], partial_rows)
            self._pool.release(self.pages[kept:])
            del self.pages[kept:]
            self.ahead = None
        elif partial_rows:
            self._pool.unpublish(self.pages[num_full])
        self.pages += taken

    def pages_to_reserve(self, num_rows: int) -> int:
        """Pages that `reserve(num_rows)` would take from the pool."""
        return max(self._num_pages(self.num_rows + num_rows) - self._num_kept(), 0)

    def commit(self, num_chain: int, path: Sequence[int] = ()) -> None:
        """Makes rows of the finished pass part of the sequence and forgets the others.

        The pass wrote its chain at rows [num_rows, num_rows + num_chain) and node i of the tree under the chain's last
        token (node 0) at row num_rows + num_chain - 1 + i. Rows move between reserved rows only, so never in a page
        that anyone else reads.

        Args:
            num_chain: rows of the chain to keep, at least 1 if there is a path.
            path: accepted nodes from the root down, root excluded; each is greater than the one before.
        """
        first = self.num_rows + num_chain
        moved = [(first - 1 + node, first + index) for index, node in enumerate(path) if node != index + 1]
        if moved:
            device = self._pool.groups[0].device
            sources = torch.tensor(self._slots([source for source, _ in moved]), device=device)
            targets = torch.tensor(self._slots([target for _, target in moved]), device=device)
            for group in self._pool.groups:
                # Gathered before it is scattered: a source may be another node's target.
                group[:, :, targets] = group[:, :, sources]
        self.num_rows = first + len(path)
        self._trim()

    def rollback(self, num_rows: int) -> None:
        """Forgets rows [num_rows, self.num_rows); a length at or above the present one changes nothing."""
        if self.ahead is None or num_rows < max(self.num_rows, 1):
            self.num_rows = min(self.num_rows, num_rows)
            self._trim()

    def drop_ahead(self) -> None:
        """Forgets the rows ahead, if there are any, and gives their pages back; to be called between passes."""
        if self.ahead is not None:
            self._trim()

    def discard(self) -> None:
        """Forgets all rows and takes them out of the prefix table: to be called when nobody can vouch for them.

        Sequences that hold some of these pages keep them, and publish nothing that continues them.
        """
        for page in self.pages:
            self._pool.unpublish(page)
        self.rollback(0)

    def free(self) -> None:
        """Gives all pages back; the sequence is not to be used again. What it published stays until room is needed."""
        self.rollback(0)
        self._pool.forget(self)

    def fork(self) -> SequenceKV:
        """Another sequence with the same rows: full pages are shared, the rows of the last, partial one are copied.

        Raises:
            CapacityExceeded: the pool has no page for the copy.
        """
        num_full, partial_rows = divmod(self.num_rows, self._pool.page_tokens)
        copy = self._pool.take_pages(1, None) if partial_rows else []
        for page in copy:
            self._pool.copy_rows(self.pages[num_full], page, partial_rows)
        other = self._pool.new_sequence()
        other.num_rows = self.num_rows
        other.pages = self.pages[:num_full]
        for page in other.pages:
            self._pool.hold(page)
        other.pages += copy
        other._keys = list(self._keys)
        return other

    def publish(self, tokens: Sequence[int]) -> None:
        """Lets other sequences find the full pages of rows [0, num_rows); to be called between passes.

        Where an equal page is published already the sequence uses that one and gives its own back. Cheap when no page
        has been filled since the last call.

        Args:
            tokens: the sequence's tokens from the first on, for which the rows were computed; all must be committed.
        """
        table, size = self._pool.prefixes, self._pool.page_tokens
        num_full = self.num_rows // size
        if table is None or num_full == len(self._keys):
            return
        self._check_tokens(tokens)
        first = len(self._keys)
        if first and table.page(self._keys[-1]) != self.pages[first - 1]:
            return  # taken out of the table by another holder's `discard`: what continues it is not offered either
        while len(self._keys) < num_full:
            start = len(self._keys) * size
            self._keys.append(table.chain(self._last_key(table.root), tokens[start : start + size]))
        for index in range(first, num_full):
            key = self._keys[index]
            published = table.page(key)
            if published is None:
                table.publish(self.pages[index], key, self._keys[index - 1] if index else table.root)
            elif published != self.pages[index]:
                self._pool.hold(published)
                self._pool.release([self.pages[index]])
                self.pages[index] = published

    def adopt(self, tokens: Sequence[int]) -> int:
        """Attaches published pages that continue this sequence's rows; to be called between passes.

        Nothing is attached when rows end inside a page: a shared page begins where another one ends. At least one token
        is left to compute, since its logits are wanted.

        Args:
            tokens: the sequence's tokens from the first on, beginning with those of its rows; all must be committed.

        Returns:
            Rows gained.
        """
        table, size = self._pool.prefixes, self._pool.page_tokens
        first, partial_rows = divmod(self.num_rows, size)
        if table is None or partial_rows:
            return 0
        self._trim()
        self.publish(tokens)
        if len(self._keys) != first:
            return 0
        for index in range(first, (len(tokens) - 1) // size):
            key = table.chain(self._last_key(table.root), tokens[index * size : (index + 1) * size])
            page = table.page(key)
            if page is None:
                break
            self._pool.hold(page)
            self.pages.append(page)
            self._keys.append(key)
        gained = (len(self.pages) - first) * size
        self.num_rows += gained
        table.queried_tokens += max(len(tokens) - first * size, 0)
        table.hit_tokens += gained
        return gained

    @property
    def page_tokens(self) -> int:
        """Rows per page."""
        return self._pool.page_tokens

    def straighten(self) -> bool:
        """Moves own pages next to one another where that is possible; see `KVPool.straighten`."""
        return self._pool.straighten(self)

    def slot_list(self, start: int, stop: int) -> list[int]:
        """Slots of rows [start, stop), which must be reserved."""
        return self._slots(range(start, stop))

    def check_integrity(self) -> None:
        """Checks that the block table holds the rows and that published pages are where their keys say.

        Raises:
            AssertionError: says what is wrong.
        """
        size, table = self._pool.page_tokens, self._pool.prefixes
        if self.num_rows > len(self.pages) * size:
            raise AssertionError(f"{self.num_rows} rows do not fit in pages {self.pages}")
        if len(set(self.pages)) < len(self.pages):
            raise AssertionError(f"a page is twice in block table {self.pages}")
        if len(self._keys) > self.num_rows // size:
            raise AssertionError(f"{len(self._keys)} keys for {self.num_rows} rows in pages of {size}")
        self._check_ahead()
        if table is None:
            return
        for page, key in zip(self.pages, self._keys, strict=False):
            if table.key(page) not in (key, None):
                raise AssertionError(f"page {page} is published under the key of other tokens")
        for index in range(self._num_pages(self.num_rows), len(self.pages)):
            if table.key(self.pages[index]) is not None:
                raise AssertionError(f"page {self.pages[index]} holds no committed row and is published")

    def _check_ahead(self) -> None:
        if self.ahead is None:
            return
        size, table, num_ahead = self._pool.page_tokens, self._pool.prefixes, len(self.ahead.tokens)
        if len(self.ahead.hidden) != num_ahead or self.num_rows + num_ahead > len(self.pages) * size:
            raise AssertionError(f"{num_ahead} rows ahead of {self.num_rows} do not fit in pages {self.pages}")
        for page in self.pages[self.num_rows // size : self._num_pages(self.num_rows + num_ahead)]:
            if self._pool.num_holders(page) > 1 or (table is not None and table.key(page) is not None):
                raise AssertionError(f"page {page} holds rows ahead and may be read by others")

    def _last_key(self, root: bytes) -> bytes:
        return self._keys[-1] if self._keys else root

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if len(tokens) < self.num_rows:
            raise ValueError(f"{len(tokens)} tokens for {self.num_rows} rows: give the sequence's tokens from 0 on")

    def _num_kept(self) -> int:
        """Pages of the block table that stay when rows are reserved: not a partial one that others hold too."""
        num_full, partial_rows = divmod(self.num_rows, self._pool.page_tokens)
        if partial_rows and self._pool.num_holders(self.pages[num_full]) > 1:
            return num_full
        return len(self.pages)

    def _num_pages(self, num_rows: int) -> int:
        return -(-num_rows // self._pool.page_tokens)

    def _slots(self, rows: Sequence[int]) -> list[int]:
        size = self._pool.page_tokens
        return [self.pages[row // size] * size + row % size for row in rows]

    def _trim(self) -> None:
        """Lets go of the pages that hold no row, of rows ahead, and of the keys of pages that are not full any more."""
        self.ahead = None
        needed = self._num_pages(self.num_rows)
        if needed < len(self.pages):
            self._pool.release(self.pages[needed:])
            del self.pages[needed:]
        del self._keys[self.num_rows // self._pool.page_tokens :]
