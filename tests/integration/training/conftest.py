"""A tiny target with answers of its own to learn from, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.training.collect import collect
from paceline.training.options import CollectOptions
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, write_model

PROMPTS = [f"{first}{second}{third}" for first in "abcdefgh" for second in "ijklmno" for third in "pq"]


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with a habit that can be learnt: as a rule each token has one successor, whatever comes before."""
    folder = write_model(tmp_path_factory.mktemp("training") / "tiny", SERVED["llama"], seed=3)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight *= 0.04
    successors = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    weights["lm_head.weight"][successors] = 3 * weights["model.embed_tokens.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def answers(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a collection."""
    folder = tmp_path_factory.mktemp("corpus")
    prompts = folder / "prompts.txt"
    prompts.write_text("\n".join(PROMPTS))
    out = folder / "answers"
    collect(collect_options(tiny_target, prompts, out))
    return out


def collect_options(target: Path, prompts: Path, out: Path) -> CollectOptions:
    return CollectOptions(
        target=str(target),
        prompts=prompts,
        out=out,
        max_new_tokens=40,
        shard_size=16,
        kv_mb=8,
        temperatures="0.5",
        greedy_share=0.8,
    )
