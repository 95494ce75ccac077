"""The ids of a draft model with a trimmed vocabulary: which of the target's each of its columns means.

It lies beside the model, in a file of its own, so that the folder stays one that `transformers` reads.
"""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoint_files.head_config import HeadConfig
from paceline.checkpoint_files.tensor_table import TensorTable
from paceline.checkpoint_files.weight_files import find_weights, read_tensors
from paceline.drafting.checkpoints.vocabulary_map import check_draft_map
from paceline.drafting.checkpoints.writing import write_tensors
from paceline.model_source import DRAFT_VOCABULARY_FILE

_STEM = Path(DRAFT_VOCABULARY_FILE).stem
_NAME = "d2t"


def load_draft_vocabulary(folder: Path, target_vocab_size: int) -> torch.Tensor | None:
    """The offsets of a draft model's ids # [its vocab_size] int64, or None where it has the target's ids.

    Args:
        folder: of the draft model: `config.json` and, where the vocabulary is trimmed, `draft_vocabulary.safetensors`
            with `d2t`: id i of the draft model means id i + d2t[i] of the target.
        target_vocab_size: ids of the target.

    Raises:
        ModelError: the file holds something else, or the map cannot be right for this model and target.
    """
    if find_weights(folder, (_STEM,)) is None:
        return None
    tensors = read_tensors(folder, (_STEM,))
    title = str(folder / DRAFT_VOCABULARY_FILE)
    TensorTable(title, tensors, {name: name for name in tensors}).check_names({_NAME}, (), {})
    config = HeadConfig.read(folder / "config.json")
    vocab_size = config.integer("vocab_size")
    if vocab_size is None:
        raise config.wrong("vocab_size", "is missing: it is the number of ids that the draft model has")
    return check_draft_map(title, tensors[_NAME], None, vocab_size, target_vocab_size)


def write_draft_vocabulary(folder: Path, d2t: torch.Tensor) -> None:
    """Puts the map beside a draft model.

    Args:
        folder: of the draft model.
        d2t: # [vocab_size of the draft model] int64 offsets.
    """
    write_tensors(folder / DRAFT_VOCABULARY_FILE, {_NAME: d2t.long()})
