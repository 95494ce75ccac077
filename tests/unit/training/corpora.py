"""Small corpora for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from paceline.training.corpus import Corpus, load_corpus


def tensors(sequences: Sequence[Sequence[int]], prompt_len: Sequence[int]) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([0, *(len(sequence) for sequence in sequences)])
    return {
        "token_ids": torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.int32),
        "offsets": lengths.cumsum(0),
        "prompt_len": torch.tensor(prompt_len, dtype=torch.int32),
    }


def corpus(folder: Path, sequences: Sequence[Sequence[int]], prompt_len: Sequence[int]) -> Corpus:
    path = folder / "corpus.safetensors"
    save_file(tensors(sequences, prompt_len), path)
    return load_corpus(path)
