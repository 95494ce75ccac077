"""Hidden states of the target that drafting methods build on.

| method | its features | width |
|---|---|---|
| `medusa`, `eagle` | the last layer's output after the final norm, from which the head makes logits | hidden size |
| `eagle3` | the residual stream entering three layers, side by side | 3 x hidden size, or what `project` leaves |

Row t belongs to the token at position t. The runner writes a pass's features to a plane of the pool beside the keys and
values, so that rollback, tree compaction and shared prefixes hold for them as for keys and values. A row is the same
for every token fed, whether its logits were wanted or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from paceline.engine.kv.sequence import SequenceKV, page_runs
from paceline.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class FeatureTaps:
    """Which hidden states a runner keeps.

    Attributes:
        layers: keep the residual stream entering these layers, joined in this order; empty for the output of the final
            norm. A layer may be the number of layers: what enters the final norm.
        project: applied to the joined rows # [num_rows, in_width] -> [num_rows, width]; None to keep them as they are.
        width: numbers per row of what is kept; 0 for the hidden size times the number of layers.
        fingerprint: of the weights of `project`, so that two processes know that theirs do the same.
        only_last: the method reads the newest row only.
    """

    layers: tuple[int, ...] = ()
    project: Callable[[torch.Tensor], torch.Tensor] | None = None
    width: int = 0
    fingerprint: str = ""
    only_last: bool = False

    def needs_layers(self, num_layers: int) -> bool:
        """Whether some of what is kept is to be seen in layers [0, num_layers) only."""
        return any(layer < num_layers for layer in self.layers)

    @property
    def kind(self) -> str:
        """Name of what is kept: the same for the same rows."""
        layers = ",".join([str(layer) for layer in self.layers])
        return "/".join([f"layers {layers}" if layers else "final_norm", *filter(None, [self.fingerprint])])


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


def feature_width(
    taps: FeatureTaps, *, hidden_size: int, num_layers: int, dtype: torch.dtype, device: torch.device
) -> int:
    """Numbers per row that a runner keeps.

    Args:
        taps: what is kept.
        hidden_size: of the model.
        num_layers: of the model.
        dtype: of its rows.
        device: where they are.

    Raises:
        ConfigurationError: the model has no such layers, or the width is not what comes out.
    """
    wrong = [layer for layer in taps.layers if not 0 <= layer <= num_layers]
    if wrong:
        raise ConfigurationError(
            f"hidden states are wanted of layers {list(taps.layers)}, but this model has {num_layers} layers: give a "
            "drafter that was trained for this target",
            field="taps",
        )
    in_width = width = hidden_size * max(len(taps.layers), 1)
    if taps.project is not None:
        with torch.inference_mode():
            width = taps.project(torch.zeros(1, in_width, dtype=dtype, device=device)).shape[-1]
    if taps.width not in (0, width):
        raise ConfigurationError(
            f"features of {taps.width} numbers per row are wanted, but {width} come out of this model's {in_width}: "
            "give a drafter that was trained for this target",
            field="taps",
        )
    return width


class FeaturePlane:
    """The plane of a pool in which a runner keeps features.

    Args:
        taps: what is kept.
        plane: # [num_slots, width]
    """

    __slots__ = ("_plane", "taps")

    def __init__(self, taps: FeatureTaps, plane: torch.Tensor) -> None:
        self.taps = taps
        self._plane = plane

    def write(self, slots: slice | torch.Tensor, streams: Sequence[torch.Tensor]) -> None:
        """Keeps the rows of a pass.

        Args:
            slots: where its rows lie.
            streams: the hidden states of all its tokens, in the order of the taps # [num_tokens, hidden_size] each
        """
        joined = streams[0] if len(streams) == 1 else torch.cat(list(streams), dim=-1)
        self._plane[slots] = joined if self.taps.project is None else self.taps.project(joined)

    def of(self, kv: SequenceKV) -> SequenceFeatures:
        """The features of one sequence, as long as it lives."""
        return SequenceFeatures(self._plane, kv)


class SequenceFeatures:
    """The features of one sequence's rows: a `FeatureRows`. Made by `FeaturePlane.of`."""

    __slots__ = ("_kv", "_plane")

    def __init__(self, plane: torch.Tensor, kv: SequenceKV) -> None:
        self._plane = plane
        self._kv = kv

    @property
    def num_rows(self) -> int:
        """Rows of the sequence."""
        return self._kv.num_rows

    @property
    def first_row(self) -> int:
        """Always 0: every row of a sequence has its features."""
        return 0

    def read(self, start: int, stop: int) -> torch.Tensor:  # [stop - start, width]
        """Rows [start, stop): a view of the pool where they are neighbours, else a copy.

        Raises:
            IndexError: the sequence has no such rows.
        """
        if not 0 <= start <= stop <= self.num_rows:
            raise IndexError(f"features of rows [{start}, {stop}) are wanted, there are {self.num_rows}")
        size = self._kv.page_tokens
        first_page = start // size
        runs = page_runs(self._kv.pages[first_page : -(-stop // size)])
        if not runs:
            return self._plane[:0]
        pieces = [self._plane[run.start * size : run.stop * size] for run in runs]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        return rows[start - first_page * size : stop - first_page * size]
