"""A part of the target's ids, in a file of its own beside the checkpoint of a drafter that knows or proposes no others.

Beside a draft model with a trimmed vocabulary it says which of the target's ids each of the model's columns means;
beside a target trained for early exits, or its adapter, which ids the first layers propose. Folders stay ones that
`transformers` and `peft` read.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.adapted_model import EXIT_LAYER
from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.tensor_table import TensorTable
from paceline.checkpoint_files.weight_files import find_weights, read_tensors
from paceline.drafting.checkpoints.vocabulary_map import check_draft_map, target_ids_of
from paceline.drafting.checkpoints.writing import write_tensors
from paceline.model_source import DRAFT_VOCABULARY_FILE

_STEM = Path(DRAFT_VOCABULARY_FILE).stem
_NAME = "d2t"


def load_draft_vocabulary(folder: Path, target_vocab_size: int) -> torch.Tensor | None:
    """The offsets of a draft model's ids # [its vocab_size] int64, or None where it has the target's ids.

    Args:
        folder: of the draft model: `config.json` and, where the vocabulary is trimmed, `draft_vocabulary.safetensors`
            with `d2t`: id i of the draft model means id i + d2t[i] of the target. Where `config.json` names an exit
            layer the folder holds a whole target, which has its own ids in any case.
        target_vocab_size: ids of the target.

    Raises:
        ModelError: the file holds something else, or the map cannot be right for this model and target.
    """
    if find_weights(folder, (_STEM,)) is None:
        return None
    config = HeadConfig.read(folder / "config.json")
    if config.has(EXIT_LAYER):
        return None
    d2t = _read_offsets(folder)
    vocab_size = config.integer("vocab_size")
    if vocab_size is None:
        raise config.wrong("vocab_size", "is missing: it is the number of ids that the draft model has")
    return check_draft_map(_title(folder), d2t, None, vocab_size, target_vocab_size)


def load_exit_vocabulary(folder: Path, target_vocab_size: int) -> torch.Tensor | None:
    """The ids that a target's first layers propose # [any number] int64, or None for all.

    Args:
        folder: of the target, or of its adapter; `draft_vocabulary.safetensors` may be there, with `d2t`: the i-th of
            these ids is i + d2t[i].
        target_vocab_size: ids of the target.

    Raises:
        ModelError: the file holds something else, or names ids that the target does not have, or one twice.
    """
    if find_weights(folder, (_STEM,)) is None:
        return None
    d2t = _read_offsets(folder)
    offsets = check_draft_map(_title(folder), d2t, None, d2t.numel(), target_vocab_size)
    return None if offsets is None else target_ids_of(offsets)


def write_draft_vocabulary(folder: Path, d2t: torch.Tensor | None) -> None:
    """Puts the map beside a checkpoint, or takes away that of an earlier one.

    Args:
        folder: of the checkpoint.
        d2t: # [draft_vocab_size] int64 offsets; None where the vocabulary is whole.
    """
    path = folder / DRAFT_VOCABULARY_FILE
    if d2t is None:
        path.unlink(missing_ok=True)
    else:
        write_tensors(path, {_NAME: d2t.long()})


def _read_offsets(folder: Path) -> torch.Tensor:
    tensors = read_tensors(folder, (_STEM,))
    TensorTable(_title(folder), tensors, {name: name for name in tensors}).check_names({_NAME}, (), {})
    return tensors[_NAME]


def _title(folder: Path) -> str:
    return str(folder / DRAFT_VOCABULARY_FILE)
