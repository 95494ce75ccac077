"""The pool of key/value rows: fixed-size pages, a block table per sequence, shared prefixes, rollback to any row.

Words and half-open ranges, for a sequence whose block table is `pages` and a page size of P:

| range | what | who may write it |
|---|---|---|
| rows [0, num_rows) | computed for the tokens at positions [0, num_rows) | nobody; the sequence may forget them |
| rows [num_rows, num_rows + n) | reserved: hold nothing before the running pass writes them | the running pass |
| rows ahead, among these | hold drafts, in the first layers only, until judged (`RowsAhead`) | drafting passes |
| row r | lies in slot pages[r // P] * P + r % P of every plane | |
| slots [p * P, (p + 1) * P) | page p | the one sequence that holds it, until it is published |

| a page is | held by | in the prefix table | it goes when |
|---|---|---|---|
| free | nobody | no | |
| private | one sequence | no | that sequence lets go |
| shared | several sequences | perhaps | the last one lets go and it is not published |
| published | any number of sequences | yes: full, of committed tokens only | it is idle and its room is needed |
| idle | nobody | yes | its room is needed, least recently used first |

A pass has three steps. `reserve(n)` makes room in private pages; the pass writes the reserved rows; `commit` makes the
rows of the accepted path part of the sequence (and moves them together if the path skipped nodes of a tree), so that
what was not accepted is forgotten. `rollback(num_rows)` forgets rows at the end. `publish` offers full pages to other
sequences, `adopt` takes them, `fork` shares all rows. Nothing is copied except in the `commit` of a path with gaps, in
`fork`, in the `reserve` that follows a rollback into a shared page, and in `straighten`. Not thread-safe: whoever runs
the passes owns the pool, and pages change hands between passes, never during one.

Pages of one sequence are neighbours where possible: then its rows are one range of slots and attention reads them in
place; scattered ones it copies together (`engine/pass_plan.py`). In a pool full of idle pages strict order of use would
hand out one scattered page after the other, so it holds where a run begins; a run that goes on takes the idle page
beside it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.kv.prefix import PrefixStats, PrefixTable
from paceline.engine.kv.sequence import SequenceKV, page_runs
from paceline.errors import CapacityExceeded, ConfigurationError
from paceline.kv_usage import KvUsage

__all__ = ["DEFAULT_PAGE_TOKENS", "KVPool", "PlaneShape", "PrefixStats", "SequenceKV"]

DEFAULT_PAGE_TOKENS = 16

_KEPT_FREE = 16
"""Whoever starts a run of pages has a 16th of the pool freed, if there are idle pages: single ones make no gap."""
_PLENTY_FREE = 4
"""Below a 4th of the pool free, a sequence grows into idle pages beside it, however lately they were used."""


@dataclass(frozen=True, slots=True)
class PlaneShape:
    """Shape of a group of equal planes; a plane is the keys or the values of one layer.

    Attributes:
        num_planes: planes in the group.
        num_heads: key/value heads.
        width: numbers per head and row.
    """

    num_planes: int
    num_heads: int
    width: int

    @property
    def numbers_per_row(self) -> int:
        """Numbers that one row takes in all planes of the group."""
        return self.num_planes * self.num_heads * self.width


class KVPool:
    """Pages for the key/value rows of many sequences.

    Args:
        shapes: groups of planes; a group is one tensor, so that moving rows costs one copy per group.
        num_pages: pages in the pool.
        page_tokens: rows per page.
        dtype: of the numbers.
        device: where they are.
        prefix_caching: whether full pages are shared by the tokens they hold; otherwise `publish` and `adopt` do
            nothing.
    """

    def __init__(
        self,
        shapes: Sequence[PlaneShape],
        num_pages: int,
        page_tokens: int = DEFAULT_PAGE_TOKENS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
    ) -> None:
        if num_pages < 1 or page_tokens < 1:
            raise ConfigurationError(f"a KV pool needs at least one page of one token, not {num_pages} x {page_tokens}")
        self.page_tokens = page_tokens
        self.num_pages = num_pages
        num_slots = num_pages * page_tokens
        # [num_planes, num_heads, num_slots, width] each; memory that is not written is not taken from the system yet,
        # and never read, since only rows of the sequence are
        self.groups = tuple(
            torch.empty(shape.num_planes, shape.num_heads, num_slots, shape.width, dtype=dtype, device=device)
            for shape in shapes
        )
        self.bytes_per_token = sum(shape.numbers_per_row for shape in shapes) * dtype.itemsize
        self._free = bytearray(b"\x01" * num_pages)  # 1 where the page is free
        self._num_free = num_pages
        self._holders = array("i", bytes(4 * num_pages))  # block tables that name the page
        self._num_held = 0
        self._sequences: set[SequenceKV] = set()
        self.prefixes = PrefixTable() if prefix_caching else None
        """Published pages; for `SequenceKV` only. None without prefix caching."""

    @classmethod
    def within_budget(
        cls,
        shapes: Sequence[PlaneShape],
        budget_bytes: int,
        page_tokens: int = DEFAULT_PAGE_TOKENS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        prefix_caching: bool = True,
    ) -> KVPool:
        """The largest pool that fits a memory budget.

        Raises:
            ConfigurationError: not even one page fits; names the least budget.
        """
        page_bytes = sum(shape.numbers_per_row for shape in shapes) * dtype.itemsize * page_tokens
        num_pages = budget_bytes // page_bytes
        if num_pages < 1:
            raise ConfigurationError(
                f"a KV budget of {budget_bytes} bytes holds no page; one page of {page_tokens} tokens takes "
                f"{page_bytes} bytes",
                field="kv_bytes",
            )
        return cls(shapes, num_pages, page_tokens, dtype=dtype, device=device, prefix_caching=prefix_caching)

    @property
    def num_bytes(self) -> int:
        """Memory of all pages."""
        return self.bytes_per_token * self.capacity_tokens

    @property
    def capacity_tokens(self) -> int:
        """Rows that fit in all pages together."""
        return self.num_pages * self.page_tokens

    @property
    def pages_in_use(self) -> int:
        """Different pages in block tables; idle pages are not in use."""
        return self._num_held

    @property
    def pages_available(self) -> int:
        """Pages that can be had: free ones and idle ones."""
        return self.num_pages - self._num_held

    @property
    def prefix_stats(self) -> PrefixStats:
        """What prefix sharing did so far; may be asked from any thread."""
        return PrefixStats() if self.prefixes is None else self.prefixes.stats

    @property
    def usage(self) -> KvUsage:
        """Room taken, in tokens of whole pages; may be asked from any thread."""
        return KvUsage(self.pages_in_use * self.page_tokens, self.capacity_tokens)

    @property
    def num_sequences(self) -> int:
        """Sequences that are not freed."""
        return len(self._sequences)

    def new_sequence(self) -> SequenceKV:
        """An empty sequence; it takes no page before rows are reserved."""
        sequence = SequenceKV(self)
        self._sequences.add(sequence)
        return sequence

    def take_pages(self, count: int, after: int | None) -> list[int]:
        """Takes pages, neighbours where possible, and evicts idle ones when free ones are few; for `SequenceKV` only.

        Args:
            count: how many.
            after: page that they should follow; None for a sequence without pages, which is put where it can grow.

        Raises:
            CapacityExceeded: fewer are available; nothing is taken or evicted.
        """
        if count > self.pages_available:
            raise CapacityExceeded(
                f"the KV pool has {self.pages_available} of {self.num_pages} pages free ({self.page_tokens} tokens "
                f"each), {count} more are needed; try again when other sessions have ended"
            )
        taken: list[int] = []
        page = self._find(count) if after is None else after + 1
        while len(taken) < count:
            if not self._may_take(page):
                page = self._find(count - len(taken))
            if not self._free[page]:
                self._evict(page)
            self._free[page] = 0
            self._num_free -= 1
            self._holders[page] = 1
            taken.append(page)
            page += 1
        self._num_held += count
        return taken

    def num_holders(self, page: int) -> int:
        """Block tables that name the page; for `SequenceKV` only."""
        return self._holders[page]

    def pages_of(self, sequences: Collection[SequenceKV]) -> int:
        """Pages that would become available if these sequences let go of all theirs."""
        tables = Counter(page for sequence in sequences for page in sequence.pages)
        return sum(self._holders[page] == count for page, count in tables.items())

    def hold(self, page: int) -> None:
        """Counts one more block table that names the page; for `SequenceKV` only."""
        if not self._holders[page]:
            if self.prefixes is not None:
                self.prefixes.revive(page)
            self._num_held += 1
        self._holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Counts one block table less for each page, the last page first; for `SequenceKV` only.

        A page that is in none any more becomes idle if it is published, else free.
        """
        for page in reversed(pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._num_held -= 1
                if self.prefixes is None or not self.prefixes.retire(page):
                    self._set_free(page)

    def unpublish(self, page: int) -> None:
        """Takes a page, and what continues it, out of the prefix table if it is there; for `SequenceKV` only."""
        if self.prefixes is not None and self.prefixes.key(page) is not None:
            for removed in self.prefixes.remove(page):
                if not self._holders[removed]:
                    self._set_free(removed)

    def copy_rows(self, source: int, target: int, num_rows: int) -> None:
        """Copies the first rows of a page to another one; for `SequenceKV` only."""
        self._copy_slots(source * self.page_tokens, target * self.page_tokens, num_rows)

    def straighten(self, sequence: SequenceKV) -> bool:
        """Moves a sequence's own pages into one gap of neighbouring pages, so that attention reads them in place.

        Costs one copy of these rows, and the idle pages that are in the gap; to be called between passes, for a
        sequence whose pages are in many runs. Pages that other sequences hold too stay where they are; published ones
        stay published.

        Returns:
            Whether anything moved: not if the runs would not become fewer, or held pages leave no gap wide enough.
        """
        first = len(sequence.pages)
        while first and self._holders[sequence.pages[first - 1]] == 1:
            first -= 1
        shared, moving = sequence.pages[:first], sequence.pages[first:]
        num_runs = len(page_runs(sequence.pages))
        if len(page_runs(shared)) + 1 >= num_runs:
            return False
        starts = [shared[-1] + 1] if shared else []
        starts.append(self._place(len(moving)))
        target = next((start for start in starts if self._is_gap(start, len(moving))), None)
        if target is None:
            target = self._clear_gap(len(moving))
        if target is None:
            return False
        pages = [*shared, *range(target, target + len(moving))]
        sequence.pages = pages
        for run in page_runs(moving):
            self._copy_slots(run.start * self.page_tokens, target * self.page_tokens, len(run) * self.page_tokens)
            for page in run:
                self._free[page], self._free[target] = 1, 0
                self._holders[page], self._holders[target] = 0, 1
                if self.prefixes is not None and self.prefixes.key(page) is not None:
                    self.prefixes.rename(page, target)
                target += 1
        return True

    def forget(self, sequence: SequenceKV) -> None:
        """Ends a sequence; for `SequenceKV` only."""
        self._sequences.discard(sequence)

    def _may_take(self, page: int) -> bool:
        """Whether a run may go on with this page: it is free, or idle while few pages are free."""
        if page >= self.num_pages or self._free[page]:
            return page < self.num_pages
        return (
            self.prefixes is not None
            and self.prefixes.is_idle(page)
            and self._num_free < self.num_pages // _PLENTY_FREE
        )

    def _find(self, count: int) -> int:
        """First page for a run of `count`, after evicting the least recently used idle pages if few are free."""
        wanted = max(count, self.num_pages // _KEPT_FREE)
        while self.prefixes is not None and self.prefixes.num_idle and self._num_free < wanted:
            self._evict(self.prefixes.least_recently_used())
        return self._place(count)

    def _evict(self, page: int) -> None:
        """Frees an idle page and the idle ones among those that continue it."""
        if self.prefixes is not None:
            before = self._num_free
            self.unpublish(page)
            self.prefixes.evicted_pages += self._num_free - before

    def _set_free(self, page: int) -> None:
        self._free[page] = 1
        self._num_free += 1

    def _is_gap(self, first: int, count: int) -> bool:
        """Whether the pages [first, first + count) exist and are free."""
        return self._free[first : first + count] == b"\x01" * count

    def _clear_gap(self, count: int) -> int | None:
        """Makes a gap of neighbouring pages where the fewest idle ones must go; None where held pages leave none."""
        if count > self.num_pages:
            return None
        held = _in_windows(np.frombuffer(self._holders, dtype=np.int32) > 0, count)
        free = _in_windows(np.frombuffer(self._free, dtype=np.uint8), count)
        start = int(np.where(held == 0, free, -1).argmax())
        if held[start]:
            return None
        for page in range(start, start + count):
            if not self._free[page]:
                self._evict(page)
        return start

    def _copy_slots(self, source: int, target: int, count: int) -> None:
        for group in self.groups:
            group[:, :, target : target + count] = group[:, :, source : source + count]

    def _place(self, count: int) -> int:
        """First page for a run of `count`: in the middle of the widest gap, so that both neighbours can grow.

        At the gap's start if the gap starts the pool or half of it is too small.
        """
        best_start, best_length, start = 0, 0, 0
        for run in self._free.split(b"\x00"):
            if len(run) > best_length:
                best_start, best_length = start, len(run)
            start += len(run) + 1
        if best_start == 0 or best_length < 2 * count:
            return best_start
        return best_start + best_length // 2

    def check_integrity(self) -> None:
        """Checks that every page is free, idle or in as many block tables as counted, and that tables hold their rows.

        Raises:
            AssertionError: says what is wrong.
        """
        tables = Counter(page for sequence in self._sequences for page in sequence.pages)
        for sequence in self._sequences:
            sequence.check_integrity()
        if self.prefixes is not None:
            self.prefixes.check_integrity()
        for page in range(self.num_pages):
            idle = self.prefixes is not None and self.prefixes.is_idle(page)
            if tables[page] != self._holders[page]:
                raise AssertionError(f"page {page} is in {tables[page]} block tables, {self._holders[page]} counted")
            if bool(tables[page]) + idle + self._free[page] != 1:
                raise AssertionError(
                    f"page {page}: in {tables[page]} block tables, idle {idle}, free {bool(self._free[page])}; "
                    "one of the three must hold"
                )
        if len(tables) != self._num_held or sum(self._free) != self._num_free:
            raise AssertionError(
                f"{len(tables)} pages in block tables and {sum(self._free)} free, but {self._num_held} and "
                f"{self._num_free} counted, of {self.num_pages} in all"
            )


def _in_windows(marks: NDArray[np.generic], width: int) -> NDArray[np.int64]:
    """How many marks each window of neighbours has # [len(marks) - width + 1]."""
    sums = np.zeros(len(marks) + 1, dtype=np.int64)
    np.cumsum(marks, out=sums[1:])
    return sums[width:] - sums[:-width]
