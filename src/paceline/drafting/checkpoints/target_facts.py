"""What a checkpoint of a drafting head is held against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Sizes of the target.

    Attributes:
        hidden_size: numbers per row of its hidden states.
        num_layers: decoder layers.
        vocab_size: columns of its head, padding included.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
