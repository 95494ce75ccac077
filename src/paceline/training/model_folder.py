"""Writes a whole model as `transformers` reads it, with the tokenizer of the target that it came from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from transformers import PreTrainedModel

from paceline.drafting.checkpoints.writing import write_json, write_tensors
from paceline.model_source import TOKENIZER_FILES
from paceline.training.learner import STORED_DTYPE, stored

_TOKENIZER = "tokenizer.json"


def write_model(folder: Path, model: PreTrainedModel, target_folder: Path) -> None:
    """Writes weights, configuration and tokenizer.

    Args:
        folder: made if it is not there.
        model: its configuration's number format becomes that of the written weights.
        target_folder: where the tokenizer's files are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model.config.dtype = STORED_DTYPE
    keys = getattr(model, "_tied_weights_keys", None) or ()
    tied = set(keys) if model.config.get_text_config().tie_word_embeddings else set()
    weights = {name: stored(value) for name, value in model.state_dict().items() if name not in tied}
    write_tensors(folder / "model.safetensors", weights)
    model.config.save_pretrained(folder)
    for name in TOKENIZER_FILES:
        if name not in {"config.json", _TOKENIZER} and (target_folder / name).is_file():
            shutil.copyfile(target_folder / name, folder / name)
    # Half of the file would be white space, and a small model's folder is little more than this file.
    write_json(folder / _TOKENIZER, json.loads((target_folder / _TOKENIZER).read_text(encoding="utf-8")), compact=True)
