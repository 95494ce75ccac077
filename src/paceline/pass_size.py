"""How much one pass of a model, or one step of a drafting method, did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PassSize:
    """Size of a pass.

    Attributes:
        num_sessions: sessions that shared it.
        num_tokens: tokens that the target was fed, or tokens that a drafter proposed.
    """

    num_sessions: int = 0
    num_tokens: int = 0
