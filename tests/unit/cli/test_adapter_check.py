"""`paceline doctor --drafter --target` on what `paceline train layerskip` writes: an adapter, or a whole model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from paceline.cli import drafter_loading
from paceline.cli.app import app
from paceline.drafting.checkpoints.draft_vocabulary import write_draft_vocabulary
from paceline.model_source import resolve
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.objectives.layerskip import LayerSkipLearner
from paceline.training.options import LayerSkipOptions
from paceline.training.target import TrainingTarget

NUM_LAYERS, EXIT_LAYER = 3, 2


@pytest.fixture(autouse=True)
def small_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Few prompts, little memory, and a cache of the test's own."""
    monkeypatch.setattr(drafter_loading, "PROMPTS", ("abc", "the rain", "go on"))
    monkeypatch.setattr(drafter_loading, "KV_BYTES", 4 << 20)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def adapter(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that takes the last layer out of the target's residual stream: the early exit is always right."""
    options = LayerSkipOptions(lora_rank=32, lora_alpha=32, max_steps=1)
    target = TrainingTarget(tiny_llama)
    vocabulary = DraftVocabulary(torch.arange(target.vocab_size), target.vocab_size, 1.0)
    learner = LayerSkipLearner(target, vocabulary, EXIT_LAYER, options)
    with torch.no_grad():
        for name, module in learner.model.named_modules():
            if f"layers.{NUM_LAYERS - 1}." in name and name.endswith(("o_proj", "down_proj")):
                _cancel(module)
    folder = tmp_path_factory.mktemp("out") / "adapter"
    learner.write(folder, "a base that no one finds")
    return folder


def _cancel(linear: Any) -> None:
    """Makes the product of an adapter's pair the negative of the weight that it is added to."""
    left, values, right = torch.linalg.svd(linear.base_layer.weight, full_matrices=False)
    linear.lora_A["default"].weight.copy_(right)
    linear.lora_B["default"].weight.copy_(-left * values)


def check(drafter: Path, target: Path, *more: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, ["doctor", "--drafter", str(drafter), "--target", str(target), "--json", *more])
    return result.exit_code, json.loads(result.stdout)


def test_an_adapter_is_added_to_the_target_whose_first_layers_draft(adapter: Path, tiny_llama: Path) -> None:
    code, report = check(adapter, tiny_llama)
    assert code == 0
    assert (report["layout"], report["method"]) == ("layerskip-adapter", "layerskip")
    assert report["sizes"] == "the first 2 of 3 layers, LoRA of rank 32 on 21 weights"
    assert report["judged"][0] > 10
    assert set(report["accepted_per_position"]) == {1.0}
    assert report["tokens_per_pass"] > 2
    assert report["weights_bytes"] == 0


def test_an_adapter_that_proposes_some_ids_only(adapter: Path, tiny_llama: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(adapter, tmp_path / "copy"))
    write_draft_vocabulary(copy, torch.arange(1, 33))  # the odd ids
    _, report = check(copy, tiny_llama)
    assert report["sizes"] == "the first 2 of 3 layers, LoRA of rank 32 on 21 weights, drafts of 32 ids"
    assert report["weights_bytes"] == 4 * 32 * TrainingTarget(tiny_llama).hidden_size
    assert 0 < report["accepted_per_position"][0] < 1


def test_the_target_may_be_the_adapter_with_its_base(adapter: Path, tiny_llama: Path, tmp_path: Path) -> None:
    copy = _with(adapter, tmp_path, "adapter_config.json", {"base_model_name_or_path": str(tiny_llama)})
    assert check(copy, resolve(str(copy))) == check(copy, tiny_llama)


def test_a_whole_model_drafts_with_its_own_first_layers(tiny_llama: Path, tmp_path: Path) -> None:
    whole = _with(tiny_llama, tmp_path, "config.json", {"exit_layer": EXIT_LAYER})
    weights = load_file(whole / "model.safetensors")
    for name, weight in weights.items():
        if f"layers.{NUM_LAYERS - 1}." in name and "proj" in name:
            weight.zero_()
    save_file(weights, whole / "model.safetensors", metadata={"format": "pt"})
    for target in (whole, tiny_llama):
        code, report = check(whole, target)
        assert (code, report["layout"], report["method"]) == (0, "causal-lm", "layerskip")
        assert report["sizes"] == "the first 2 of 3 layers"
        assert set(report["accepted_per_position"]) == {1.0}
        assert report["weights_bytes"] == 0


def test_without_training_the_early_exit_is_told_by_its_acceptance(
    adapter: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    copy = _with(adapter, tmp_path, "adapter_config.json", {"lora_alpha": 0.001})
    code, report = check(copy, tiny_llama, "--min-acceptance=0.9")
    assert (code, report["healthy"]) == (1, False)
    assert "was it trained on this very target, and long enough?" in report["advice"]


def _without_weights(folder: Path) -> None:
    (folder / "adapter_model.safetensors").unlink()


def _torn(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def _without_exit_layer(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def _exit_behind_the_last_layer(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"exit_layer": NUM_LAYERS}))


@pytest.mark.parametrize(
    ("damage", "code", "message"),
    [
        (_without_weights, "model_error", "adapter_model"),
        (_torn, "model_error", "adapter_model"),
        (_without_exit_layer, "configuration_error", "names no exit layer"),
        (_exit_behind_the_last_layer, "configuration_error", "outside [1, 3)"),
    ],
)
def test_a_broken_adapter_is_an_error_of_usage(
    damage: Callable[[Path], None], code: str, message: str, adapter: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(adapter, tmp_path / "broken"))
    damage(copy)
    exit_code, answer = check(copy, tiny_llama)
    assert exit_code == 2
    assert answer["error"]["code"] == code
    assert message in answer["error"]["message"]


def _with(adapter: Path, folder: Path, name: str, values: dict[str, Any]) -> Path:
    """A copy of an adapter in which a configuration says something else."""
    copy = Path(shutil.copytree(adapter, folder / "copy"))
    content = json.loads((copy / name).read_text())
    (copy / name).write_text(json.dumps(content | values))
    return copy
