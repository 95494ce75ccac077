"""Which sequences make a batch, in an order that depends on the seed alone, and the batch itself.

Positions: at anchor t the target has been fed tokens [0, t] and token t + 1 is committed; a drafter proposes tokens
t + 2, t + 3, ... So draft i (from 0) is right where it equals token t + 2 + i. All trainers and all figures count so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.training.corpus import Corpus
from paceline.training.features import FeatureStore
from paceline.training.grouping import group_by_length

_SORT_BATCHES = 16
"""Sequences of about so many batches are sorted by length, so that little is padded."""


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Sequences padded at their ends.

    Attributes:
        tokens: # [batch, length] int64, 0 where padded
        lengths: # [batch] int64
        prompt_len: # [batch] int64
        features: hidden states, for each layer that the learner asked for # [batch, length, hidden_size]
    """

    tokens: torch.Tensor
    lengths: torch.Tensor
    prompt_len: torch.Tensor
    features: tuple[torch.Tensor, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """The same on a device."""
        return Batch(
            self.tokens.to(device),
            self.lengths.to(device),
            self.prompt_len.to(device),
            tuple(rows.to(device) for rows in self.features),
        )

    @property
    def num_answer_tokens(self) -> int:
        """Tokens of the answers."""
        return int((self.lengths - self.prompt_len).sum())

    def anchors(self, depth: int) -> torch.Tensor:
        """Where a chain of `depth` drafts can be held against the answer # [batch, length] bool."""
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        begins = position >= self.prompt_len[:, None] - 1
        return begins & (position + 1 + depth < self.lengths[:, None])

    @property
    def answer_states(self) -> torch.Tensor:
        """Places whose hidden state says a token that drafts are held against # [batch, length] bool."""
        position = torch.arange(self.tokens.shape[1], device=self.tokens.device)
        return (position >= self.prompt_len[:, None]) & (position + 1 < self.lengths[:, None])

    def shifted_tokens(self, by: int) -> torch.Tensor:
        """Token t + by at place t; 0 after the end # [batch, length]."""
        return shift(self.tokens, by)


def shift(rows: torch.Tensor, by: int) -> torch.Tensor:
    """Row t + by at place t of dimension 1; zeros after the end."""
    if by >= rows.shape[1]:
        return torch.zeros_like(rows)
    return torch.cat([rows[:, by:], torch.zeros_like(rows[:, :by])], dim=1)


class BatchSource:
    """Makes batches of a corpus's sequences.

    Args:
        corpus: the sequences.
        max_len: what is longer is cut.
        features: None where the learner needs none.
    """

    def __init__(self, corpus: Corpus, *, max_len: int, features: FeatureStore | None) -> None:
        self._corpus = corpus
        self._max_len = max_len
        self._features = features

    def length(self, index: int) -> int:
        """Tokens of a sequence as it is read."""
        return min(self._corpus.length(index), self._max_len)

    def make(self, indices: Sequence[int]) -> Batch:
        """A batch of these sequences, on the CPU."""
        lengths = torch.tensor([self.length(index) for index in indices])
        tokens = torch.zeros(len(indices), int(lengths.max()), dtype=torch.int64)
        for row, index, length in zip(tokens, indices, lengths.tolist(), strict=True):
            row[:length] = self._corpus.tokens(index)[:length]
        prompt_len = self._corpus.prompt_len[torch.tensor(indices)].to(torch.int64)
        features = tuple(self._features.read(indices)) if self._features is not None else ()
        return Batch(tokens, lengths, prompt_len, features)


class BatchOrder:
    """The endless list of batches: epoch after epoch, each sequence once per epoch.

    Args:
        indices: the sequences.
        source: knows their lengths.
        batch_tokens: most tokens of a batch, padding included; a longer sequence is a batch of its own.
        seed: of the order.
    """

    def __init__(self, indices: Sequence[int], source: BatchSource, *, batch_tokens: int, seed: int) -> None:
        self._indices = list(indices)
        self._lengths = {index: source.length(index) for index in indices}
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._ends: list[int] = []
        self._epoch: list[list[int]] = []

    def at(self, number: int) -> list[int]:
        """The sequences of a batch, counted from 0 over all epochs."""
        while not self._ends or number >= self._ends[-1]:
            self._plan(len(self._ends))
        if number < self._ends[-1] - len(self._epoch):
            # An earlier epoch than the last one planned: only after a restart of the count.
            self._ends.clear()
            return self.at(number)
        return self._epoch[number - self._ends[-1] + len(self._epoch)]

    def epoch_of(self, number: int) -> float:
        """How many times the sequences have been seen before this batch."""
        self.at(number)
        begin = self._ends[-1] - len(self._epoch)
        return len(self._ends) - 1 + (number - begin) / len(self._epoch)

    def _plan(self, epoch: int) -> None:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = [self._indices[place] for place in torch.randperm(len(self._indices), generator=generator).tolist()]
        mean = sum(self._lengths.values()) / len(self._lengths)
        window = max(int(_SORT_BATCHES * self._batch_tokens / mean), 1)
        batches: list[list[int]] = []
        for begin in range(0, len(order), window):
            batches += group_by_length(order[begin : begin + window], self._lengths, self._batch_tokens)
        shuffled = torch.randperm(len(batches), generator=generator).tolist()
        self._epoch = [batches[place] for place in shuffled]
        self._ends.append((self._ends[-1] if self._ends else 0) + len(self._epoch))
