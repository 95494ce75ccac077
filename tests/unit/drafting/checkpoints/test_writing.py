"""What is written loads again as it was, and a file appears whole or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.drafting.checkpoints.draft_vocabulary import load_draft_vocabulary, write_draft_vocabulary
from paceline.drafting.checkpoints.eagle import EagleCheckpoint, load_eagle
from paceline.drafting.checkpoints.layouts import detect_layout
from paceline.drafting.checkpoints.medusa import MedusaCheckpoint, load_medusa
from paceline.drafting.checkpoints.writing import write_eagle, write_eagle3, write_json, write_medusa, write_tensors
from paceline.errors import ConfigurationError
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.checkpoints.samples import TARGET, VOCAB


def _same(first: EagleCheckpoint, second: EagleCheckpoint) -> None:
    assert first.config == second.config
    assert first.weights.keys() == second.weights.keys()
    assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
    for ours, theirs in ((first.d2t, second.d2t), (first.t2d, second.t2d)):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


def test_eagle_comes_back(tmp_path: Path) -> None:
    loaded = samples.eagle().load_from(tmp_path / "first")
    write_eagle(tmp_path / "second", loaded)
    assert detect_layout(tmp_path / "second").value == "safeailab-eagle"
    _same(loaded, load_eagle(tmp_path / "second", TARGET))


@pytest.mark.parametrize("make", [samples.eagle3, samples.eagle3_nvidia, samples.speculators_eagle3, samples.eagle31])
def test_eagle3_comes_back(make: Any, tmp_path: Path) -> None:
    loaded = make().load_from(tmp_path / "first")
    write_eagle3(tmp_path / "second", loaded, verifier="a/target", architecture="LlamaForCausalLM")
    assert detect_layout(tmp_path / "second").value == "speculators-eagle3"
    _same(loaded, load_eagle(tmp_path / "second", TARGET))


def test_layers_and_scaled_rotary_settings_come_back(tmp_path: Path) -> None:
    loaded = samples.speculators_eagle3().load_from(tmp_path / "first")
    rope = {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0}
    loaded = replace(loaded, config=replace(loaded.config, aux_layers=(1, 5, 8), rope=rope))
    write_eagle3(tmp_path / "second", loaded)
    _same(loaded, load_eagle(tmp_path / "second", TARGET))


@pytest.mark.parametrize("make", [samples.medusa_v1, samples.medusa_v2, samples.medusa_vllm])
def test_medusa_comes_back(make: Any, tmp_path: Path) -> None:
    loaded: MedusaCheckpoint = replace(make().load_from(tmp_path / "first"), head_accuracies=((0.5, 0.25),) * 3)
    write_medusa(tmp_path / "second", loaded, target_vocab_size=VOCAB)
    again = load_medusa(tmp_path / "second", TARGET)
    assert again.config == loaded.config
    assert again.head_accuracies == loaded.head_accuracies
    for one, other in zip(again.blocks, loaded.blocks, strict=True):
        for (weight, bias), (other_weight, other_bias) in zip(one, other, strict=True):
            assert torch.equal(weight, other_weight)
            assert bias is None or (other_bias is not None and torch.equal(bias, other_bias))
    for head, other_head in zip(again.heads or (), loaded.heads or (), strict=True):
        assert torch.equal(head, other_head)


def test_one_head_for_all_comes_back_as_one(tmp_path: Path) -> None:
    loaded: MedusaCheckpoint = samples.medusa_v1().load_from(tmp_path / "first")
    assert loaded.heads is not None
    loaded = replace(loaded, heads=(loaded.heads[0],) * 3)
    write_medusa(tmp_path / "second", loaded, target_vocab_size=VOCAB)
    again = load_medusa(tmp_path / "second", TARGET)
    assert again.heads is not None
    assert again.heads[0] is again.heads[2]


def test_a_head_without_a_place_in_the_layout_is_refused(tmp_path: Path) -> None:
    eagle, eagle3 = samples.eagle().load_from(tmp_path / "1"), samples.eagle3().load_from(tmp_path / "3")
    with pytest.raises(ConfigurationError, match="write_eagle writes"):
        write_eagle(tmp_path / "out", eagle3)
    with pytest.raises(ConfigurationError, match="write_eagle3 writes"):
        write_eagle3(tmp_path / "out", eagle)
    assert not (tmp_path / "out").exists()


def test_a_draft_vocabulary_comes_back(tmp_path: Path) -> None:
    d2t = samples.vocabulary_maps()["d2t"]
    write_json(tmp_path / "config.json", {"vocab_size": len(d2t)})
    write_draft_vocabulary(tmp_path, d2t)
    again = load_draft_vocabulary(tmp_path, VOCAB)
    assert again is not None
    assert torch.equal(again, d2t)


def test_who_reads_while_a_file_is_replaced_reads_the_old_one_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"old": True})
    with path.open() as reader:
        write_json(path, {"new": True})
        assert "old" in reader.read()
    assert "new" in path.read_text()


def test_what_fails_leaves_the_old_file_and_no_scraps(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    write_json(path, {"kept": True})
    write_tensors(tmp_path / "model.safetensors", {"kept": torch.ones(1)})
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(TypeError):
        write_json(path, {"lost": object()})
    with pytest.raises(RuntimeError):
        write_tensors(tmp_path / "model.safetensors", {"lost": torch.ones(1).to_sparse()})
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
