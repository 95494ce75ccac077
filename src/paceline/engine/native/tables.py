"""The table of token vectors: rows to look up at the start of a pass, and often the head's weight at its end.

Packed for the CPU's kernels a tied table would exist twice: the head multiplies by the packed copy, the embedding looks
up rows of the plain one. `TiedTable` is packed only, in blocks of tokens, and a block is unpacked when one of its rows
is needed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

from paceline.engine.native.weights import PlainWeight, Weight
from paceline.engine.packing import PackedWeight
from paceline.errors import ConfigurationError

_BLOCK_BYTES = 2 << 20
"""Size of a block. Measured with 49152 rows of 576: products of blocks of this size cost as much as one product, and
unpacking one takes 0.2 ms; with half of it the head is a fifth slower, with twice as much unpacking takes 1 ms."""

_ROWS_MULTIPLE = 64
_RECENT_ROWS = 2048
"""Rows that stay unpacked: texts repeat their tokens."""


class Embedding(Protocol):
    """Looks up the vectors of tokens."""

    def embed(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """A new tensor with a row for each token # [num_tokens] -> [num_tokens, hidden_size]."""


class PlainTable:
    """A table as it is.

    Args:
        table: # [vocab_size, hidden_size]; kept.
    """

    __slots__ = ("_table",)

    def __init__(self, table: torch.Tensor) -> None:
        self._table = table

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._table.nbytes

    def embed(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """The tokens' rows."""
        return functional.embedding(token_ids, self._table)


class TiedTable:
    """Embedding and head in one packed copy; its values and products are those of a plain table to the bit.

    Args:
        table: # [vocab_size, hidden_size]; not kept.
    """

    def __init__(self, table: torch.Tensor) -> None:
        row_bytes = table.shape[1] * table.element_size()
        self._block_rows = max(_BLOCK_BYTES // row_bytes // _ROWS_MULTIPLE, 1) * _ROWS_MULTIPLE
        self._blocks = [PackedWeight(rows) for rows in torch.split(table, self._block_rows)]
        self._recent: dict[int, torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return sum(block.num_bytes for block in self._blocks)

    def __call__(self, inputs: torch.Tensor, /) -> torch.Tensor:  # [num_rows, hidden_size] -> [num_rows, vocab_size]
        """As a head: the product of each row with every token's vector."""
        return torch.cat([block(inputs) for block in self._blocks], dim=1)

    def embed(self, token_ids: torch.Tensor, /) -> torch.Tensor:
        """The tokens' rows."""
        tokens: list[int] = token_ids.tolist()
        recent = self._recent
        missing: dict[int, list[int]] = {}
        for token in set(tokens) - recent.keys():
            missing.setdefault(token // self._block_rows, []).append(token)
        for index, wanted in missing.items():
            rows = self._blocks[index].plain()
            for token in wanted:
                recent[token] = rows[token % self._block_rows].clone()
        embedded = torch.stack([recent[token] for token in tokens])
        while len(recent) > _RECENT_ROWS:  # the oldest first
            del recent[next(iter(recent))]
        return embedded


def head_rows(head: Weight, token_ids: torch.Tensor) -> torch.Tensor:  # [n] int64 -> [n, hidden_size]
    """A copy of a head's rows for some tokens, for a smaller head.

    Raises:
        ConfigurationError: the head is quantised.
    """
    if isinstance(head, TiedTable):
        return head.embed(token_ids)
    if isinstance(head, PackedWeight):
        return head.plain()[token_ids]
    if isinstance(head, PlainWeight):
        return head.rows(token_ids)
    raise ConfigurationError(
        "rows of a quantised head cannot be copied: set quantization to none", field="quantization"
    )
