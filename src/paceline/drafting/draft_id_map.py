"""What a draft model with a trimmed vocabulary calls the tokens of the target that it was trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.drafting.checkpoints.draft_vocabulary import load_draft_vocabulary
from paceline.drafting.checkpoints.vocabulary_map import target_ids_of
from paceline.errors import ModelError


@dataclass(frozen=True, slots=True)
class DraftIdMap:
    """The map between the target's ids and a draft model's own.

    Attributes:
        target_ids: the target's id of each of the draft model's ids # [draft vocabulary] int64
        draft_ids: the draft model's id of each of the target's; for a token that it does not know, the one that stands
            for all of those.
    """

    target_ids: torch.Tensor
    draft_ids: tuple[int, ...]

    @classmethod
    def of(cls, d2t: torch.Tensor, target_vocab_size: int, other: int) -> DraftIdMap:
        """The map that a checkpoint gives.

        Args:
            d2t: id i of the draft model is id i + d2t[i] of the target # [draft vocabulary] int64
            target_vocab_size: ids of the target.
            other: the draft model's id for tokens that it does not know.
        """
        target_ids = target_ids_of(d2t)
        draft_ids = [other] * target_vocab_size
        for draft_id, target_id in enumerate(target_ids.tolist()):
            draft_ids[target_id] = draft_id
        return cls(target_ids, tuple(draft_ids))

    @classmethod
    def load(cls, folder: Path, target_vocab_size: int) -> DraftIdMap | None:
        """The map beside a draft model; None where the model has the target's ids.

        Raises:
            ModelError: the map does not fit the model or the target.
        """
        d2t = load_draft_vocabulary(folder, target_vocab_size)
        if d2t is None:
            return None
        other = json.loads((folder / "config.json").read_text()).get("other_token_id")
        if not isinstance(other, int) or not 0 <= other < len(d2t):
            raise ModelError(
                f"{folder / 'config.json'}: other_token_id is {other!r}; a draft model with a vocabulary of {len(d2t)} "
                "ids names one of them, by which it is fed tokens that it does not know: write the folder with "
                "`paceline train draft_model`",
                field="draft_model",
            )
        return cls.of(d2t, target_vocab_size, other)

    @property
    def target_vocab_size(self) -> int:
        """Ids of the target."""
        return len(self.draft_ids)

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's ids for the target's, all below `target_vocab_size`."""
        return [self.draft_ids[token] for token in tokens]
