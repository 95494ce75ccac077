"""The tokens that a drafter can propose: those most frequent in the answers. A small head is cheap, the rest is rare.

Two tables say which they are, as in EAGLE-3 checkpoints: `d2t` # [draft_vocab_size] int64, draft id i is target id
i + d2t[i], and `t2d` # [vocab_size] bool, whether a target id has a draft id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.errors import InvalidArgument
from paceline.training.corpus import Corpus


@dataclass(frozen=True, slots=True, eq=False)
class DraftVocabulary:
    """Target ids that have a draft id.

    Attributes:
        token_ids: the target id of each draft id, ascending # [draft_vocab_size] int64
        vocab_size: of the target.
        coverage: share of the answers' tokens that are among them.
    """

    token_ids: torch.Tensor
    vocab_size: int
    coverage: float

    def __len__(self) -> int:
        """Number of draft ids."""
        return len(self.token_ids)

    @property
    def is_full(self) -> bool:
        """Whether draft ids and target ids are the same."""
        return len(self) == self.vocab_size

    @property
    def d2t(self) -> torch.Tensor:
        """Offsets from draft ids to target ids # [draft_vocab_size] int64."""
        return self.token_ids - torch.arange(len(self))

    @property
    def t2d(self) -> torch.Tensor:
        """Which target ids have a draft id # [vocab_size] bool."""
        known = torch.zeros(self.vocab_size, dtype=torch.bool)
        known[self.token_ids] = True
        return known

    def draft_ids(self) -> torch.Tensor:
        """The draft id of each target id, -1 where there is none # [vocab_size] int64."""
        ids = torch.full((self.vocab_size,), -1)
        ids[self.token_ids] = torch.arange(len(self))
        return ids


def most_frequent(
    corpus: Corpus, indices: Sequence[int], vocab_size: int, size: int, *, always: Sequence[int] = ()
) -> DraftVocabulary:
    """The tokens that the answers use most.

    Args:
        corpus: where to count.
        indices: sequences to count in.
        vocab_size: of the target.
        size: how many; 0, or more than there are, for all.
        always: ids that are in it however rare they are.

    Raises:
        InvalidArgument: `size` is too small.
    """
    if 0 < size <= len(set(always)):
        raise InvalidArgument(
            f"draft_vocab_size is {size}: give 0 for the whole vocabulary, or {len(set(always)) + 1} or more",
            field="draft_vocab_size",
        )
    answers = [corpus.tokens(index)[int(corpus.prompt_len[index]) :] for index in indices]
    counts = torch.bincount(torch.cat(answers).long(), minlength=vocab_size)
    if not size or size >= vocab_size:
        return DraftVocabulary(torch.arange(vocab_size), vocab_size, 1.0)
    ranking = counts.clone()
    ranking[list(always)] = int(counts.sum()) + 1
    # Stable, so that ties are always broken the same way: by the lower id.
    chosen = torch.argsort(ranking, descending=True, stable=True)[:size].sort().values
    return DraftVocabulary(chosen, vocab_size, int(counts[chosen].sum()) / int(counts.sum()))
