"""What a pass looks like to the attention: which columns belong to whom, where rows lie, and who sees which.

All sequences of a pass lie side by side in one row of tokens. A plan is made once per pass and shared by all layers.
A sequence's rows are read in pieces, in the order of the rows:

| piece | is | read |
|---|---|---|
| run | neighbouring pages, or short enough not to matter which | in place, as one slice of slots |
| scattered pages | short runs, one after another | copied together, page by page, for the time of one layer |

A sequence alone in its part of the pool is one run; behind a shared prefix it is two. Every row of a sequence stays in
the pool and a sliding window is a mask, so a model with a window rolls back exactly; rows that no token of the pass
sees any more are not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from paceline.engine.kv.sequence import SequenceKV, page_runs
from paceline.engine.runner import SequencePass

MAX_RUNS = 2
"""A sequence in more runs than this is moved together before the pass, where the pool has room for it."""

_MIN_RUN_ROWS = 64
"""Shorter runs are copied together: each piece is a call more in every layer, as long as copying 200 rows."""

Slots = slice | torch.Tensor


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive rows of one sequence, and who sees them in layers with one window.

    Attributes:
        num_rows: how many.
        run: their slots, where these are neighbours.
        pages: else the pages that hold them, the first one from its beginning on. # [num_pages] int64
        page_tokens: rows per page.
        mask: 0 where a new token sees a row, else -inf, repeated for each query head of a key/value head; None if all
            see all. # [repeats * num_new, num_rows]
        blind: who sees none of the rows # [repeats * num_new] bool; None if there is nobody, or no other piece.
    """

    num_rows: int
    run: slice | None
    pages: torch.Tensor | None
    page_tokens: int
    mask: torch.Tensor | None = None
    blind: torch.Tensor | None = None

    def rows(self, plane: torch.Tensor) -> torch.Tensor:  # [1, num_heads, num_slots, width]
        """The rows # [1, num_heads, num_rows, width]; a view of the plane where they are neighbours."""
        if self.pages is None:
            return plane[:, :, self.run]
        _, num_heads, num_slots, width = plane.shape
        pages = plane.view(1, num_heads, num_slots // self.page_tokens, self.page_tokens * width)
        rows = pages.index_select(2, self.pages).view(1, num_heads, -1, width)
        return rows[:, :, : self.num_rows]


@dataclass(slots=True)
class SequencePlan:
    """One sequence in a pass.

    Attributes:
        start, stop: its columns [start, stop) among the pass's tokens.
        num_rows: rows that exist after the pass, old and new.
        pages: its block table up to there.
        page_tokens: rows per page.
        visible: which rows each new token sees without a window; None when all see all rows (a single token).
            # [stop - start, num_rows]
        positions: of the new tokens.
        seen_by_all: without a window all new tokens see all rows before this one.
    """

    start: int
    stop: int
    num_rows: int
    pages: Sequence[int]
    page_tokens: int
    visible: torch.Tensor | None
    positions: torch.Tensor
    seen_by_all: int
    _pieces: dict[tuple[int | None, int], tuple[Piece, ...]] = field(default_factory=dict)

    def pieces(self, window: int | None, repeats: int, dtype: torch.dtype) -> tuple[Piece, ...]:
        """The rows that the new tokens see, in order; the same for all layers with one window.

        Args:
            window: how many positions a token looks back, itself included; None for all.
            repeats: query heads per key/value head.
            dtype: of the masks.
        """
        if window is not None and window >= self.num_rows:
            window = None
        key = (window, repeats)
        if key not in self._pieces:
            self._pieces[key] = self._make_pieces(window, repeats, dtype)
        return self._pieces[key]

    def _make_pieces(self, window: int | None, repeats: int, dtype: torch.dtype) -> tuple[Piece, ...]:
        first_page = 0
        if window is not None:
            oldest = int(self.positions.min()) - window + 1
            first_page = max(oldest, 0) // self.page_tokens
        pieces = self._cut(first_page)
        mask = self._mask(window, repeats, dtype, first_page * self.page_tokens)
        if mask is None:
            return pieces
        if len(pieces) == 1:
            return (replace(pieces[0], mask=mask),)
        seen_by_all = self.seen_by_all if window is None else 0
        masked = []
        start = 0
        for piece in pieces:
            stop = start + piece.num_rows
            masked.append(piece if stop <= seen_by_all else _behind(piece, mask[:, start:stop]))
            start = stop
        return tuple(masked)

    def _cut(self, first_page: int) -> tuple[Piece, ...]:
        size, device = self.page_tokens, self.positions.device
        left = self.num_rows - first_page * size
        runs = page_runs(self.pages[first_page:])
        # On a GPU starting a kernel costs more than copying rows: there whatever is not one run is copied.
        least = _MIN_RUN_ROWS if device.type == "cpu" else left
        groups: list[list[range]] = []
        for run in runs:
            short = len(run) * size < least
            if short and groups and len(groups[-1][-1]) * size < least:
                groups[-1].append(run)
            else:
                groups.append([run])
        pieces: list[Piece] = []
        for group in groups:
            num_rows = min(sum(len(run) for run in group) * size, left)
            if len(group) == 1:
                slot = group[0].start * size
                pieces.append(Piece(num_rows, slice(slot, slot + num_rows), None, size))
            else:
                pages = _on(device, [page for run in group for page in run])
                pieces.append(Piece(num_rows, None, pages, size))
            left -= num_rows
        return tuple(pieces)

    def _mask(self, window: int | None, repeats: int, dtype: torch.dtype, first_row: int) -> torch.Tensor | None:
        if self.visible is None and window is None:
            return None
        num_new = self.stop - self.start
        device = self.positions.device
        visible = self.visible
        if visible is None:
            visible = torch.ones(num_new, self.num_rows, dtype=torch.bool, device=device)
        if window is not None:
            # Rows of older tokens lie at their positions; the new ones may share a position (siblings of a tree).
            rows = torch.cat([torch.arange(self.num_rows - num_new, device=device), self.positions])
            visible = visible & (self.positions[:, None] - rows[None, :] < window)
        visible = visible[:, first_row:]
        mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        return mask.repeat(repeats, 1)


def _behind(piece: Piece, mask: torch.Tensor) -> Piece:
    """One of several pieces, of which not all new tokens see all."""
    blind = mask.isneginf().all(-1)
    return replace(piece, mask=mask, blind=blind if blind.any() else None)


@dataclass(frozen=True, slots=True)
class PassPlan:
    """All sequences of a pass and the inputs of the model.

    Attributes:
        sequences: in order of their columns.
        token_ids: # [1, num_tokens]
        positions: # [1, num_tokens]
        wanted: columns whose logits are wanted # [num_wanted]
        num_wanted: how many of `wanted` belong to each sequence.
        write: slots of all new rows.
    """

    sequences: tuple[SequencePlan, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    wanted: torch.Tensor
    num_wanted: tuple[int, ...]
    write: Slots

    def skipping(self, num_skipped: Sequence[int]) -> PassPlan | None:
        """The plan for layers that have seen the first columns of each sequence; None if they have seen all columns.

        No logits are wanted of it.

        Args:
            num_skipped: columns of each sequence, a chain.
        """
        columns: list[int] = []
        slots: list[int] = []
        sequences: list[SequencePlan] = []
        for plan, skipped in zip(self.sequences, num_skipped, strict=True):
            left = range(plan.start + skipped, plan.stop)
            if not left:
                continue
            rows = range(plan.num_rows - len(left), plan.num_rows)
            slots += [plan.pages[row // plan.page_tokens] * plan.page_tokens + row % plan.page_tokens for row in rows]
            start, visible = len(columns), None if plan.visible is None else plan.visible[skipped:]
            stop, positions = start + len(left), plan.positions[skipped:]
            sequences.append(replace(plan, start=start, stop=stop, visible=visible, positions=positions, _pieces={}))
            columns += left
        if not columns:
            return None
        index = torch.tensor(columns, device=self.token_ids.device)
        return PassPlan(
            sequences=tuple(sequences),
            token_ids=self.token_ids[:, index],
            positions=self.positions[:, index],
            wanted=index[:0],
            num_wanted=(0,) * len(sequences),
            write=_as_slots(slots, index.device),
        )


@dataclass(frozen=True, slots=True)
class NewRows:
    """What one sequence feeds in a pass: one token per new row. The rows are reserved.

    Attributes:
        kv: the sequence.
        first_row: the first new row; the rows before it are there.
        token_ids: one per new row.
        positions: of the tokens.
        num_wanted: of how many of the last tokens the result is wanted.
        visible: which rows each token sees # [num_new, first_row + num_new] bool, on the device of the pass; None if a
            single token sees all.
        seen_by_all: all tokens see all rows before this one.
    """

    kv: SequenceKV
    first_row: int
    token_ids: Sequence[int]
    positions: Sequence[int]
    num_wanted: int
    visible: torch.Tensor | None
    seen_by_all: int


def plan_pass(batch: Sequence[SequencePass], device: torch.device) -> PassPlan:
    """Lays the parts of a pass side by side.

    The rows that the parts write must be reserved. A sequence whose pages are badly scattered is moved together first.
    """
    plan = join_rows([_new_rows(part, device) for part in batch], device)
    for part, rows in zip(batch, plan.sequences, strict=True):
        if part.last_on_device is not None:
            column = rows.start + len(part.tokens) - 1
            plan.token_ids[0, column : column + 1] = part.last_on_device
    return plan


def join_rows(parts: Sequence[NewRows], device: torch.device) -> PassPlan:
    """Lays the new rows of several sequences side by side; one whose pages are badly scattered is moved together."""
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    write: list[int] = []
    plans: list[SequencePlan] = []
    for part in parts:
        kv, start = part.kv, len(tokens)
        if len(page_runs(kv.pages)) > MAX_RUNS:
            kv.straighten()
        tokens += part.token_ids
        positions += part.positions
        stop = len(tokens)
        num_rows = part.first_row + stop - start
        wanted += range(stop - part.num_wanted, stop)
        write += kv.slot_list(part.first_row, num_rows)
        plans.append(
            SequencePlan(
                start=start,
                stop=stop,
                num_rows=num_rows,
                pages=kv.pages[: -(-num_rows // kv.page_tokens)],
                page_tokens=kv.page_tokens,
                visible=part.visible,
                positions=_on(device, part.positions),
                seen_by_all=part.seen_by_all,
            )
        )
    return PassPlan(
        sequences=tuple(plans),
        token_ids=_on(device, tokens)[None],
        positions=_on(device, positions)[None],
        wanted=_on(device, wanted),
        num_wanted=tuple(part.num_wanted for part in parts),
        write=_as_slots(write, device),
    )


def seen_in_order(num_new: int, num_rows: int) -> torch.Tensor | None:
    """Each new row sees the ones before it and itself # [num_new, num_rows] bool; None for a single one."""
    return None if num_new == 1 else torch.ones(num_new, num_rows, dtype=torch.bool).tril_(num_rows - num_new)


def _new_rows(part: SequencePass, device: torch.device) -> NewRows:
    first = part.kv.num_rows + part.num_ahead
    root = first + len(part.tokens) - 1
    return NewRows(
        kv=part.kv,
        first_row=first,
        token_ids=[*part.tokens, *part.tree.tokens],
        positions=[*range(first, root + 1), *(root + depth for depth in part.tree.depths[1:])],
        num_wanted=part.num_logits,
        visible=_visible(part, first + part.num_tokens, device),
        seen_by_all=first,
    )


def _on(device: torch.device, values: Sequence[int]) -> torch.Tensor:
    """Numbers on a device # [n] int64; out of pinned memory, so that the host does not wait for earlier passes."""
    is_cuda = device.type == "cuda"
    return torch.tensor(values, dtype=torch.int64, pin_memory=is_cuda).to(device, non_blocking=is_cuda)


def _as_slots(slots: list[int], device: torch.device) -> Slots:
    """Neighbouring slots as a slice, which is written faster."""
    first = slots[0]
    if slots[-1] - first == len(slots) - 1 and slots == list(range(first, first + len(slots))):
        return slice(first, first + len(slots))
    return _on(device, slots)


def _visible(part: SequencePass, num_rows: int, device: torch.device) -> torch.Tensor | None:
    """Which rows each new token sees # [num_tokens, num_rows]; None for a single token, which sees all."""
    num_new = part.num_tokens
    visible = seen_in_order(num_new, num_rows)
    if visible is None:
        return None
    if not part.tree.is_chain:
        root = len(part.tokens) - 1
        nodes = torch.eye(part.tree.num_draft_tokens + 1, dtype=torch.bool)
        for index, parent in enumerate(part.tree.parents):
            nodes[index + 1] |= nodes[parent]
        visible[root:, num_rows - num_new + root :] = nodes
    return visible.to(device)
