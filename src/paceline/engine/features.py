"""Hidden states of the target that drafting methods build on.

| method | its features | width |
|---|---|---|
| `medusa`, `eagle` | the last layer's output after the final norm, from which the head makes logits | hidden size |
| `eagle3` | the residual stream entering three layers, side by side | three times the hidden size, or what `project` makes of it |

Row t belongs to the token at position t. The runner writes a pass's features to a plane of the pool beside the keys and
values, so that rollback, tree compaction and shared prefixes hold for them as for keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class FeatureTaps:
    """Which hidden states a runner keeps.

    Attributes:
        layers: keep the residual stream entering these layers, joined in this order; empty for the output of the final
            norm. A layer may be the number of layers: what enters the final norm.
        project: applied to the joined rows # [num_rows, in_width] -> [num_rows, width]; None to keep them as they are.
        width: numbers per row of what is kept; 0 for the hidden size times the number of layers.
    """

    layers: tuple[int, ...] = ()
    project: Callable[[torch.Tensor], torch.Tensor] | None = None
    width: int = 0


class FeatureRows(Protocol):
    """The features of one session, as a drafting method reads them."""

    @property
    def num_rows(self) -> int:
        """Rows [first_row, num_rows) can be read; all belong to committed tokens."""

    @property
    def first_row(self) -> int:
        """The first row that is there; above 0 where earlier ones were never received."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) # [stop - start, width] in the dtype of the target; valid until the next pass."""
