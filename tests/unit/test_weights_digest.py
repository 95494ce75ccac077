"""The digest of a model's weights."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.weights_digest import weights_digest


def model(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"rope_theta": 10000}')
    named = {f"layer{index}": torch.full((64, 64), float(index)) for index in range(8)}
    save_file({**named, **tensors}, folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def test_copies_have_the_same_under_any_name(tmp_path: Path) -> None:
    one = model(tmp_path / "one")
    other = Path(shutil.copytree(one, tmp_path / "other"))
    (other / "model.safetensors").rename(other / "renamed.safetensors")
    (other / "tokenizer.json").write_text("has a hash of its own")
    (other / "README.md").write_text("text")
    for name in ("pytorch_model.bin", "training_args.bin", "model.gguf"):
        (other / name).write_bytes(b"nothing that is loaded")
    assert weights_digest(one) == weights_digest(other)
    assert len(weights_digest(one)) == 16


CHANGES: dict[str, Callable[[Path], object]] = {
    "one matrix of eight": lambda folder: save_file(
        {f"layer{index}": torch.full((64, 64), float(index) + 0.5 * (index == 3)) for index in range(8)},
        folder / "model.safetensors",
    ),
    "another tensor's name": lambda folder: save_file(
        {f"layer{9 if index == 3 else index}": torch.full((64, 64), float(index)) for index in range(8)},
        folder / "model.safetensors",
    ),
    "the configuration": lambda folder: (folder / "config.json").write_text('{"rope_theta": 20000}'),
    "one more file": lambda folder: (folder / "more.safetensors").write_bytes(b"\x00" * 8),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_have_another(tmp_path: Path, change: str) -> None:
    folder = model(tmp_path / "model")
    before = weights_digest(folder)
    CHANGES[change](folder)
    assert weights_digest(folder) != before


def test_a_folder_without_weights_has_one(tmp_path: Path) -> None:
    assert weights_digest(tmp_path)
