"""The ids that a target's first layers propose: beside its adapter, or beside the whole target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.adapted_model import ADAPTER_FOLDER
from paceline.drafting.checkpoints.draft_vocabulary import load_draft_vocabulary, write_draft_vocabulary
from paceline.drafting.checkpoints.layerskip import load_layerskip
from paceline.errors import ModelError
from paceline.model_source import DRAFT_VOCABULARY_FILE, is_trimmed
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.checkpoints.samples import TARGET, TARGET_IDS, VOCAB

D2T = samples.vocabulary_maps()["d2t"]


def proposed(folder: Path) -> list[int] | None:
    ids = load_layerskip(folder, TARGET).target_ids
    return None if ids is None else ids.tolist()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = samples.layerskip_adapter().write(tmp_path / "adapter")
    write_draft_vocabulary(folder, D2T)
    return folder


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    folder = tmp_path / "whole"
    folder.mkdir()
    config = {**samples.LLAMA, "num_hidden_layers": TARGET.num_layers, "exit_layer": 3}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    write_draft_vocabulary(folder, D2T)
    return folder


def test_ids_lie_beside_an_adapter_or_a_whole_target(adapter: Path, whole: Path) -> None:
    for folder in (adapter, whole):
        assert proposed(folder) == TARGET_IDS
        write_draft_vocabulary(folder, None)
        assert proposed(folder) is None


def test_of_an_adapter_on_such_a_target_the_adapter_s_count(adapter: Path, whole: Path) -> None:
    (whole / ADAPTER_FOLDER).symlink_to(adapter)
    write_draft_vocabulary(adapter, D2T[:2])
    assert proposed(whole) == TARGET_IDS[:2]
    write_draft_vocabulary(adapter, None)
    assert proposed(whole) is None


def test_a_whole_target_has_all_of_its_own_ids_whatever_it_proposes(whole: Path) -> None:
    assert not is_trimmed(whole)
    assert load_draft_vocabulary(whole, VOCAB) is None
    config = json.loads((whole / "config.json").read_text())
    del config["exit_layer"]
    (whole / "config.json").write_text(json.dumps(config | {"vocab_size": len(D2T)}))
    assert is_trimmed(whole)
    assert load_draft_vocabulary(whole, VOCAB) is not None


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"t2d": D2T}, "missing d2t .*unexpected t2d"),
        ({"d2t": D2T, "head.weight": torch.ones(2)}, "unexpected head.weight"),
        ({"d2t": D2T + VOCAB}, rf"reaches 6 ids outside \[0, {VOCAB}\)"),
        ({"d2t": D2T - 1}, "reaches 1 ids outside"),
        ({"d2t": torch.tensor([5, 4])}, "reaches 1 ids twice"),
        ({"d2t": torch.zeros(6, dtype=torch.int64)}, "all zeros"),
        ({"d2t": torch.zeros(0, dtype=torch.int64)}, "all zeros"),
        ({"d2t": D2T.float()}, r"d2t is float32 \[6\], expected integers"),
        ({"d2t": D2T.unsqueeze(0)}, r"d2t is int64 \[1, 6\], expected integers \[6\]"),
        ({"d2t": D2T.sum()}, r"d2t is int64 \[\], expected integers \[1\]"),
    ],
)
def test_a_file_that_cannot_be_right_is_refused(tensors: dict[str, torch.Tensor], said: str, adapter: Path) -> None:
    save_file(tensors, adapter / DRAFT_VOCABULARY_FILE)
    with pytest.raises(ModelError, match=said) as caught:
        load_layerskip(adapter, TARGET)
    assert DRAFT_VOCABULARY_FILE in caught.value.message


def test_a_torn_file_is_refused(adapter: Path) -> None:
    path = adapter / DRAFT_VOCABULARY_FILE
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ModelError, match="cut off or damaged"):
        load_layerskip(adapter, TARGET)
