"""What a checkpoint of a drafting head is held against."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint_files.head_config import HeadConfig
from paceline.errors import ModelError


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


def read_target_facts(folder: Path) -> TargetFacts:
    """The facts of a model from its config.json, without loading it.

    Raises:
        ModelError: there is no such file, or it does not name them.
    """
    config = HeadConfig.read(folder / "config.json")
    config = config.inner("text_config") or config
    names = ("hidden_size", "num_hidden_layers", "vocab_size")
    found = [config.integer(name) for name in names]
    if missing := [name for name, value in zip(names, found, strict=True) if value is None]:
        raise ModelError(
            f"{config.path} names no {', '.join(missing)}: give the folder of a decoder language model", field="model"
        )
    hidden_size, num_layers, vocab_size = (value or 0 for value in found)
    return TargetFacts(hidden_size, num_layers, vocab_size)
