"""The pool of key/value rows: fixed-size pages, a block table per sequence, rollback to any row.

Words and half-open ranges, for a sequence whose block table is `pages` and a page size of P:

| range | what | owner |
|---|---|---|
| rows [0, num_rows) | computed for the tokens at positions [0, num_rows) | the sequence |
| rows [num_rows, num_rows + n) | reserved: the running pass writes them, they hold nothing before | the running pass |
| row r | lies in slot pages[r // P] * P + r % P of every plane | |
| slots [p * P, (p + 1) * P) | page p | one sequence, or free |

A pass has three steps. `reserve(n)` makes room and moves nothing; the pass writes the reserved rows; `commit` makes the
rows of the accepted path part of the sequence (and moves them together if the path skipped nodes of a tree), so that
what was not accepted is forgotten. `rollback(num_rows)` forgets rows at the end. Nothing is copied except in the
`commit` of a path with gaps. Not thread-safe: whoever runs the passes owns the pool, and pages are freed between
passes, never during one.

Pages of one sequence are neighbours where possible: then its rows are one range of slots and attention reads them in
place (`slots` gives a slice); otherwise it gathers them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import CapacityExceeded, ConfigurationError
from paceline.kv_usage import KvUsage

DEFAULT_PAGE_TOKENS = 16


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
    """

    def __init__(
        self,
        shapes: Sequence[PlaneShape],
        num_pages: int,
        page_tokens: int = DEFAULT_PAGE_TOKENS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
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
        self._sequences: set[SequenceKV] = set()

    @classmethod
    def within_budget(
        cls,
        shapes: Sequence[PlaneShape],
        budget_bytes: int,
        page_tokens: int = DEFAULT_PAGE_TOKENS,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
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
        return cls(shapes, num_pages, page_tokens, dtype=dtype, device=device)

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
        """Pages that belong to a sequence."""
        return self.num_pages - self._num_free

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
        """Takes free pages, neighbours where possible; for `SequenceKV` only.

        Args:
            count: how many.
            after: page that they should follow; None for a sequence without pages, which is put where it can grow.

        Raises:
            CapacityExceeded: fewer are free; nothing is taken.
        """
        if count > self._num_free:
            raise CapacityExceeded(
                f"the KV pool has {self._num_free} of {self.num_pages} pages free ({self.page_tokens} tokens each), "
                f"{count} more are needed; try again when other sessions have ended"
            )
        taken: list[int] = []
        page = self._place(count) if after is None else after + 1
        while len(taken) < count:
            if page >= self.num_pages or not self._free[page]:
                page = self._place(count - len(taken))
            self._free[page] = 0
            taken.append(page)
            page += 1
        self._num_free -= count
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Frees pages; for `SequenceKV` only."""
        for page in pages:
            self._free[page] = 1
        self._num_free += len(pages)

    def forget(self, sequence: SequenceKV) -> None:
        """Ends a sequence; for `SequenceKV` only."""
        self._sequences.discard(sequence)

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
        """Checks that every page is free or in exactly one block table, and that tables hold their rows.

        Raises:
            AssertionError: says what is wrong.
        """
        owner: dict[int, SequenceKV] = {}
        for sequence in self._sequences:
            if sequence.num_rows > len(sequence.pages) * self.page_tokens:
                raise AssertionError(f"{sequence.num_rows} rows do not fit in pages {sequence.pages}")
            for page in sequence.pages:
                if page in owner:
                    raise AssertionError(f"page {page} is in two block tables")
                if self._free[page]:
                    raise AssertionError(f"page {page} is free and in a block table")
                owner[page] = sequence
        if len(owner) != self.num_pages - self._num_free or sum(self._free) != self._num_free:
            raise AssertionError(
                f"{len(owner)} pages in block tables, {self._num_free} counted and {sum(self._free)} marked free, "
                f"{self.num_pages} in all"
            )


class SequenceKV:
    """The rows of one sequence. Made by `KVPool.new_sequence`."""

    __slots__ = ("_pool", "num_rows", "pages")

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self.num_rows = 0
        """Rows [0, num_rows) are computed."""
        self.pages: list[int] = []
        """Block table: page of rows [i * P, (i + 1) * P)."""

    def reserve(self, num_rows: int) -> None:
        """Makes room for rows [self.num_rows, self.num_rows + num_rows); moves nothing.

        Raises:
            CapacityExceeded: the pool has too few free pages; the sequence is unchanged.
        """
        missing = self._num_pages(self.num_rows + num_rows) - len(self.pages)
        if missing > 0:
            self.pages += self._pool.take_pages(missing, self.pages[-1] if self.pages else None)

    def commit(self, num_chain: int, path: Sequence[int] = ()) -> None:
        """Makes rows of the finished pass part of the sequence and forgets the others.

        The pass wrote its chain at rows [num_rows, num_rows + num_chain) and node i of the tree under the chain's last
        token (node 0) at row num_rows + num_chain - 1 + i.

        Args:
            num_chain: rows of the chain to keep, at least 1 if there is a path.
            path: accepted nodes from the root down, root excluded; each is greater than the one before.
        """
        first = self.num_rows + num_chain
        moved = [(first - 1 + node, first + index) for index, node in enumerate(path) if node != index + 1]
        if moved:
            sources = self._slot_tensor([source for source, _ in moved])
            targets = self._slot_tensor([target for _, target in moved])
            for group in self._pool.groups:
                # Gathered before it is scattered: a source may be another node's target.
                group[:, :, targets] = group[:, :, sources]
        self.num_rows = first + len(path)
        self._trim()

    def rollback(self, num_rows: int) -> None:
        """Forgets rows [num_rows, self.num_rows); a length at or above the present one changes nothing."""
        self.num_rows = min(self.num_rows, num_rows)
        self._trim()

    def free(self) -> None:
        """Gives all pages back; the sequence is not to be used again."""
        self.rollback(0)
        self._pool.forget(self)

    def slot_list(self, start: int, stop: int) -> list[int]:
        """Slots of rows [start, stop), which must be reserved."""
        size = self._pool.page_tokens
        return [self.pages[row // size] * size + row % size for row in range(start, stop)]

    def slots(self, stop: int) -> slice | torch.Tensor:
        """Slots of rows [0, stop): a slice if they are neighbours, else a tensor # [stop] on the pool's device."""
        size = self._pool.page_tokens
        pages = self.pages[: self._num_pages(stop)]
        if not pages:
            return slice(0, 0)
        first = pages[0]
        if pages[-1] - first == len(pages) - 1 and pages == list(range(first, first + len(pages))):
            return slice(first * size, first * size + stop)
        table = torch.tensor(pages, device=self._device).unsqueeze(1) * size
        return (table + torch.arange(size, device=self._device)).flatten()[:stop]

    def _num_pages(self, num_rows: int) -> int:
        return -(-num_rows // self._pool.page_tokens)

    def _slot_tensor(self, rows: Sequence[int]) -> torch.Tensor:
        size = self._pool.page_tokens
        return torch.tensor([self.pages[row // size] * size + row % size for row in rows], device=self._device)

    def _trim(self) -> None:
        """Frees the pages that hold no row."""
        needed = self._num_pages(self.num_rows)
        if needed < len(self.pages):
            self._pool.give_back(self.pages[needed:])
            del self.pages[needed:]

    @property
    def _device(self) -> torch.device:
        return self._pool.groups[0].device
