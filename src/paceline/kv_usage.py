"""How much of the room for key/value rows is taken. Said by whoever owns the rows, shown by the metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True)
class KvUsage:
    """Room for key/value rows, in tokens.

    Attributes:
        used_tokens: room that is taken; a page or a session's share counts as a whole, however much of it is filled.
        capacity_tokens: room in all; 0 where no rows are kept.
    """

    used_tokens: int = 0
    capacity_tokens: int = 0

    @property
    def share(self) -> float:
        """Part of the room that is taken, from 0 to 1; 0 where no rows are kept."""
        return self.used_tokens / self.capacity_tokens if self.capacity_tokens else 0.0


@runtime_checkable
class HoldsRows(Protocol):
    """Something that keeps key/value rows."""

    def kv_usage(self) -> KvUsage:
        """Room taken now; may be asked from any thread, at any time."""
