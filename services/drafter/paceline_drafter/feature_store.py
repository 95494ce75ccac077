"""Features of the target that the drafter holds, session by session, within a bound.

They follow one another: rows [first_row, num_rows) of a session. What would leave a gap is not taken, unless the
session is to start short: then the older rows go. Where the bound is reached, sessions that have not drafted for the
longest time lose theirs, and at last a session its own oldest ones. All of that costs speed only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from paceline.engine.feature_bytes import from_features
from paceline.errors import CapacityExceeded
from paceline.messages import FeatureFormat, Features

DEFAULT_FEATURE_BYTES = 256 * 2**20
_FIRST_ROWS = 64
_CPU = torch.device("cpu")


@dataclass(slots=True)
class SessionFeatures:
    """The features of one session: a `FeatureRows`.

    Attributes:
        first_row: the first row that is there.
        num_rows: rows [first_row, num_rows) are there.
        buffer: where they lie, from its beginning # [capacity, width]
    """

    buffer: torch.Tensor
    first_row: int = 0
    num_rows: int = 0

    def read(self, start: int, stop: int) -> torch.Tensor:  # [stop - start, width]
        """Rows [start, stop).

        Raises:
            IndexError: they are not there.
        """
        if not self.first_row <= start <= stop <= self.num_rows:
            raise IndexError(f"features of rows [{start}, {stop}) are wanted, [{self.first_row}, {self.num_rows}) held")
        return self.buffer[start - self.first_row : stop - self.first_row]

    @property
    def num_held(self) -> int:
        """Rows that are there."""
        return self.num_rows - self.first_row

    def crop(self, num_rows: int) -> None:
        """Forgets rows from there on."""
        self.num_rows = min(self.num_rows, max(num_rows, self.first_row))
        if num_rows <= self.first_row:
            self.clear(0)

    def clear(self, first_row: int) -> None:
        """Forgets all rows; the next one is to be `first_row`."""
        self.first_row = self.num_rows = first_row


class FeatureStore:
    """The features of all sessions.

    Args:
        wanted: what the method builds on.
        dtype: of the rows that it reads.
        device: where it reads them.
        max_bytes: of all sessions together.

    Attributes:
        wanted: what the method builds on.
        on_short_start: called when a session goes on without its earlier rows.
    """

    def __init__(
        self,
        wanted: FeatureFormat,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device = _CPU,
        max_bytes: int = DEFAULT_FEATURE_BYTES,
    ) -> None:
        self.wanted = wanted
        self.on_short_start: Callable[[], None] = lambda: None
        self._dtype = dtype
        self._device = device
        self._row_bytes = wanted.width * dtype.itemsize
        self._max_rows = max_bytes // self._row_bytes
        self._sessions: dict[str, SessionFeatures] = {}  # the one that was used longest ago comes first

    @property
    def num_bytes(self) -> int:
        """Memory of all sessions."""
        return sum(held.buffer.nbytes for held in self._sessions.values())

    def zeros(self, num_rows: int) -> torch.Tensor:  # [num_rows, width]
        """Rows of nobody, as a method reads them."""
        return torch.zeros(num_rows, self.wanted.width, dtype=self._dtype, device=self._device)

    def of(self, session: str) -> SessionFeatures:
        """What a session holds, perhaps nothing."""
        held = self._sessions.pop(session, None)
        if held is None:
            held = SessionFeatures(self.zeros(0))
        self._sessions[session] = held
        return held

    def rows(self, session: str, num_rows: int) -> SessionFeatures | None:
        """What a session holds if it goes to that row; else None: it cannot be drafted for."""
        held = self.of(session)
        return held if held.num_held and held.num_rows == num_rows else None

    def forget(self, session: str) -> None:
        """Frees what a session holds."""
        self._sessions.pop(session, None)

    def add(
        self, session: str, features: Features, *, starts_short: bool = False, busy: Collection[str] = ()
    ) -> SessionFeatures:
        """Takes rows in; those that are there already stay.

        Those that would leave a gap are not taken, nor those for which sessions that are busy leave no room.

        Args:
            session: whose.
            features: the rows.
            starts_short: earlier ones will not come: a gap loses what was there before it.
            busy: sessions whose rows must stay.

        Raises:
            InvalidArgument: they are of another width.
            CapacityExceeded: the bound has no room for them whatever goes.
        """
        rows = from_features(features, width=self.wanted.width, dtype=self._dtype, device=self._device)
        held = self.of(session)
        if self.wanted.only_last:
            held.clear(features.first_row)
        elif features.first_row > held.num_rows:
            if not starts_short:
                return held
            held.clear(features.first_row)
            self.on_short_start()
        new = rows[max(held.num_rows - features.first_row, 0) :]
        if not self._make_room(session, held, len(new), busy):
            return held
        held.buffer[held.num_held : held.num_held + len(new)] = new
        held.num_rows += len(new)
        return held

    def _make_room(self, session: str, held: SessionFeatures, num_new: int, busy: Collection[str]) -> bool:
        """Whether there is room for more rows now."""
        needed = held.num_held + num_new
        if needed <= len(held.buffer):
            return True
        if num_new > self._max_rows:
            raise CapacityExceeded(
                f"features of {num_new} rows need {num_new * self._row_bytes} bytes; all sessions together may hold "
                f"{self._max_rows * self._row_bytes}: raise feature_bytes"
            )
        others = sum(len(other.buffer) for other in self._sessions.values()) - len(held.buffer)
        for name in [name for name in self._sessions if name != session and name not in busy]:
            if others + needed <= self._max_rows:
                break
            others -= len(self._sessions.pop(name).buffer)
        room = self._max_rows - others
        if num_new > room:
            return False
        if needed > room:
            self._drop_oldest(held, room - num_new)
            needed = held.num_held + num_new
        capacity = max(needed, min(max(2 * len(held.buffer), _FIRST_ROWS), room))
        grown = self.zeros(capacity)
        grown[: held.num_held] = held.buffer[: held.num_held]
        held.buffer = grown
        return True

    def _drop_oldest(self, held: SessionFeatures, num_kept: int) -> None:
        kept = held.read(held.num_rows - num_kept, held.num_rows).clone()
        held.first_row = held.num_rows - num_kept
        held.buffer = kept
        self.on_short_start()
