"""What the tormented fleet serves: a random target, a drafter that agrees with it now and then, and their settings."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, write_model

MODEL = "tiny"
MAX_MODEL_LEN = 256
LETTERS = VOCAB_SIZE - 2
"""Ids below this one are letters; the last two are for what is unknown and for the end."""
_NOISE = 0.02
_METHODS = ("draft_model", "ngram,draft_model")
_KV_BYTES = 3 * 2**20
"""Less than forty long sessions need on one verifier, so that some lose their rows to others."""


@dataclass(frozen=True, slots=True)
class ChaosModels:
    """Folders of the models.

    Attributes:
        target: what verifiers judge by.
        drafter: the target with some noise on its weights.
    """

    target: Path
    drafter: Path

    @classmethod
    def write(cls, folder: Path) -> ChaosModels:
        """Writes both."""
        target = write_model(folder / "target", SERVED["llama"])
        drafter = folder / "drafter"
        shutil.copytree(target, drafter)
        weights = drafter / "model.safetensors"
        generator = torch.Generator().manual_seed(1)
        noisy = {
            name: tensor + _NOISE * torch.randn(tensor.shape, generator=generator)
            for name, tensor in load_file(weights).items()
        }
        save_file(noisy, weights, metadata={"format": "pt"})
        return cls(target, drafter)

    def verifier_flags(self) -> dict[str, str]:
        """Settings of every verifier."""
        return {
            "model": str(self.target),
            "model-name": MODEL,
            "kv-cache-bytes": str(_KV_BYTES),
            "max-batch-tokens": "256",
        }

    def drafter_flags(self, index: int) -> dict[str, str]:
        """Settings of a drafter; they take turns in how they draft."""
        return {
            "method": _METHODS[index % len(_METHODS)],
            "model": str(self.drafter),
            "model-name": MODEL,
            "runner": "torch",
            "kv-cache-bytes": str(2 * _KV_BYTES),
        }
