"""Holds the tensors of a checkpoint against its layout: none missing, none left over, all of the right shape."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from paceline.checkpoint_files.weight_files import FIELD
from paceline.errors import ModelError

_MOST_NAMES = 8


@dataclass(frozen=True, slots=True)
class TensorTable:
    """The tensors of a checkpoint.

    Attributes:
        title: what and where it is, for messages.
        tensors: by canonical name.
        stored_names: what the checkpoint calls each of them, for messages.
    """

    title: str
    tensors: Mapping[str, torch.Tensor]
    stored_names: Mapping[str, str]

    def check_names(self, needed: Collection[str], optional: Collection[str], stored_as: Mapping[str, str]) -> None:
        """Every needed name is there, and none that is neither needed nor optional.

        Args:
            needed: canonical names.
            optional: canonical names that may be there.
            stored_as: how the layout would store a canonical name, where that is another one.

        Raises:
            ModelError: lists what is missing and what is extra.
        """
        missing = sorted(stored_as.get(name, name) for name in set(needed) - self.tensors.keys())
        extra = sorted(self.stored_names[name] for name in self.tensors.keys() - set(needed) - set(optional))
        problems = []
        if missing:
            problems.append(
                f"missing {_listed(missing)} (the file is cut off or of another layout: copy or convert it again)"
            )
        if extra:
            problems.append(
                f"unexpected {_listed(extra)} (every tensor must have its place, or the head is another one than it "
                "seems: see docs/checkpoints.md for what each layout holds)"
            )
        if problems:
            raise ModelError(f"{self.title}: {'; '.join(problems)}", field=FIELD)

    def check_shapes(self, expected: Mapping[str, Sequence[int]], advice: str) -> None:
        """Every tensor that is there has the shape that is expected.

        Raises:
            ModelError: lists what has another shape.
        """
        wrong = [
            f"{self.stored_names[name]} is {list(self.tensors[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in self.tensors and tuple(self.tensors[name].shape) != tuple(shape)
        ]
        if wrong:
            raise ModelError(f"{self.title}: wrong shape: {'; '.join(wrong[:_MOST_NAMES])}; {advice}", field=FIELD)

    def rows(self, name: str) -> int | None:
        """Length of a tensor's first dimension; None where it has none or is not there."""
        tensor = self.tensors.get(name)
        return int(tensor.shape[0]) if tensor is not None and tensor.dim() else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more
