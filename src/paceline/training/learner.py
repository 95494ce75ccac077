"""What the training loop asks of a method: a loss to learn by, drafts to measure, a checkpoint to write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.training.batches import Batch


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps taken before this one.
        share: of the whole run, 0 to 1.
    """

    step: int
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class Loss:
    """The loss of a batch.

    Attributes:
        total: what is minimised; a mean over positions.
        parts: what it is made of, by name, for the history.
    """

    total: torch.Tensor
    parts: tuple[tuple[str, float], ...] = ()


STORED_DTYPE = torch.float16
"""Of written weights."""


def stored(weight: torch.Tensor) -> torch.Tensor:
    """A weight as it is written."""
    return weight.detach().to("cpu", STORED_DTYPE)


class Learner(nn.Module, ABC):
    """A drafter that learns. Its parameters that need gradients are trained, kept in checkpoints and written.

    Frozen tables of the target are buffers that are not saved. Chance comes from torch's default generators, which the
    loop seeds anew for each step.

    Attributes:
        depth: drafts per chain that are measured.
        layers: hidden states of the target that its batches carry, as `TrainingTarget.hidden_states` numbers them.
    """

    depth: int
    layers: tuple[int, ...] = ()

    @abstractmethod
    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """The loss of a batch."""

    @abstractmethod
    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether each draft of a chain is right at each anchor # [batch, length, depth] bool."""

    @abstractmethod
    def write(self, folder: Path, target_name: str) -> None:
        """Writes the checkpoint that drafting loads.

        Args:
            folder: made if it is not there.
            target_name: a reference to the target, which holds in any working directory.
        """

    def prepare_to_write(self, batches: list[Batch]) -> None:
        """Measures on held-out batches what only the written checkpoint needs; nothing for most."""

    def trained_state(self) -> dict[str, torch.Tensor]:
        """The trained parameters by name."""
        return {name: value.detach() for name, value in self.named_parameters() if value.requires_grad}

    def load_trained_state(self, state: dict[str, torch.Tensor]) -> None:
        """Puts trained parameters back."""
        parameters = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in state.items():
                parameters[name].copy_(value)
