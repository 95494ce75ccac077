"""The model folder of a simulated fleet: a tokenizer of small words and nothing to load."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def write_simulated_model(folder: Path, max_model_len: int) -> Path:
    """Writes tokenizer and configuration; returns the folder.

    Args:
        folder: made if it is not there.
        max_model_len: most tokens of a session.
    """
    syllables = [" " + first + second + last for first in _CONSONANTS for second in _VOWELS for last in ("", *"nrst")]
    vocab = {syllable: token for token, syllable in enumerate(syllables)}
    vocab["<end>"] = len(vocab)
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=syllables[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True, normalized=False)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    configurations = {
        "tokenizer_config.json": {"eos_token": "<end>"},
        "generation_config.json": {"eos_token_id": vocab["<end>"]},
        "config.json": {
            "model_type": "simulated",
            "vocab_size": len(vocab),
            "max_position_embeddings": max_model_len,
            "eos_token_id": vocab["<end>"],
        },
    }
    for name, content in configurations.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder
