"""Hidden states of the target on disk, so that each is computed once however many epochs and methods use it.

One folder per corpus and target, in it two files per layer:

| file | contents |
|---|---|
| `{layer}.rows` | # [corpus.num_tokens, hidden_size], row t of token t of the corpus; as many as there is room for |
| `{layer}.have` | # [num_sequences] uint8, 1 where the sequence's rows are written |

A sequence is computed when it is first needed. Rows are written before their mark, so a run that is killed leaves a
cache that the next one goes on with, and several processes may use one cache at once: they write the same numbers.
Rows are rounded to 16 bits whether they come from the disk or not, so that a resumed run sees what the first one saw:
float16 for the output of the final norm, bfloat16 for the residual stream, whose outliers float16 cannot hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.training.corpus import Corpus
from paceline.training.grouping import group_by_length
from paceline.training.target import FINAL, TrainingTarget

_COMPUTE_TOKENS = 2048
"""Tokens of one pass of the target."""


@dataclass(frozen=True, slots=True)
class _Plane:
    rows: torch.Tensor  # [num_tokens or fewer, hidden_size], on disk
    have: torch.Tensor  # [num_sequences] uint8, on disk


class FeatureStore:
    """Reads hidden states of the corpus's sequences, computing what is not there.

    Args:
        folder: where caches are kept.
        corpus: the sequences.
        target: computes.
        layers: which hidden states, as `TrainingTarget.hidden_states` numbers them.
        max_bytes: room on disk; sequences that do not fit are computed each time.
        max_len: sequences are read up to this many tokens.

    Attributes:
        layers: as given.
    """

    def __init__(
        self,
        folder: Path,
        corpus: Corpus,
        target: TrainingTarget,
        layers: Sequence[int],
        *,
        max_bytes: int,
        max_len: int,
    ) -> None:
        self.layers = tuple(layers)
        self._corpus = corpus
        self._target = target
        self._max_len = max_len
        self._num_computed = 0
        place = folder / f"{corpus.digest[:16]}-{target.digest[:16]}"
        place.mkdir(parents=True, exist_ok=True)
        row_bytes = 2 * target.hidden_size
        room = max_bytes // (row_bytes * max(len(self.layers), 1))
        # Sequences [0, stored) have a place on disk.
        self._stored = int(torch.searchsorted(corpus.offsets, room, right=True)) - 1
        num_rows = int(corpus.offsets[self._stored])
        self._planes = {layer: self._open(place, layer, num_rows) for layer in self.layers} if num_rows else {}

    @property
    def num_computed(self) -> int:
        """Tokens that this process has run through the target."""
        return self._num_computed

    def read(self, indices: Sequence[int]) -> list[torch.Tensor]:
        """Hidden states of some sequences.

        Returns:
            For each layer # [len(indices), longest, hidden_size] float32, zero after a sequence's end.
        """
        missing = [index for index in indices if not self._has(index)]
        fresh: dict[int, list[torch.Tensor]] = {}
        lengths = {index: self._corpus.length(index) for index in missing}
        for group in group_by_length(missing, lengths, _COMPUTE_TOKENS):
            fresh.update(self._compute(group))
        longest = max(self._length(index) for index in indices)
        padded = [torch.zeros(len(indices), longest, self._target.hidden_size) for _ in self.layers]
        for place, index in enumerate(indices):
            rows = fresh[index] if index in fresh else self._load(index)
            for plane, part in zip(padded, rows, strict=True):
                plane[place, : len(part)] = part
        return padded

    def _length(self, index: int) -> int:
        return min(self._corpus.length(index), self._max_len)

    def _has(self, index: int) -> bool:
        return index < self._stored and all(bool(plane.have[index]) for plane in self._planes.values())

    def _load(self, index: int) -> list[torch.Tensor]:
        begin = int(self._corpus.offsets[index])
        return [self._planes[layer].rows[begin : begin + self._length(index)] for layer in self.layers]

    def _compute(self, group: Sequence[int]) -> dict[int, list[torch.Tensor]]:
        # Whole sequences, so that a cache does not depend on how much of them was asked for.
        whole = [self._corpus.tokens(index) for index in group]
        tokens = torch.zeros(len(group), max(len(part) for part in whole), dtype=torch.int64)
        for row, part in zip(tokens, whole, strict=True):
            row[: len(part)] = part
        states = self._target.hidden_states(tokens, self.layers)
        rounded = [state.to(_dtype(layer)).cpu() for layer, state in zip(self.layers, states, strict=True)]
        self._num_computed += sum(len(part) for part in whole)
        found: dict[int, list[torch.Tensor]] = {}
        for place, (index, part) in enumerate(zip(group, whole, strict=True)):
            rows = [state[place, : len(part)] for state in rounded]
            if index < self._stored:
                self._write(index, rows)
            found[index] = [state[: self._length(index)] for state in rows]
        return found

    def _write(self, index: int, rows: Sequence[torch.Tensor]) -> None:
        begin, end = int(self._corpus.offsets[index]), int(self._corpus.offsets[index + 1])
        for layer, part in zip(self.layers, rows, strict=True):
            plane = self._planes[layer]
            plane.rows[begin:end] = part
            plane.have[index] = 1

    def _open(self, place: Path, layer: int, num_rows: int) -> _Plane:
        name = "final" if layer == FINAL else f"layer_{layer}"
        width, dtype = self._target.hidden_size, _dtype(layer)
        rows = torch.from_file(str(place / f"{name}.rows"), shared=True, size=num_rows * width, dtype=dtype)
        have = torch.from_file(str(place / f"{name}.have"), shared=True, size=len(self._corpus), dtype=torch.uint8)
        return _Plane(rows.view(num_rows, width), have)


def _dtype(layer: int) -> torch.dtype:
    return torch.float16 if layer == FINAL else torch.bfloat16
