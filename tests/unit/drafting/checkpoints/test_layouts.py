"""Every layout is recognised and loads to the same head."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from paceline.drafting.checkpoints.eagle import EagleCheckpoint
from paceline.drafting.checkpoints.layerskip import LayerSkipCheckpoint
from paceline.drafting.checkpoints.layouts import detect_layout
from paceline.drafting.checkpoints.medusa import MedusaCheckpoint
from paceline.errors import ConfigurationError, ModelError
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.checkpoints.samples import DRAFT_VOCAB, HIDDEN, INNER, TARGET, TARGET_IDS, VOCAB


@pytest.mark.parametrize("name", samples.ALL)
def test_the_layout_is_recognised(name: str, tmp_path: Path) -> None:
    sample = samples.ALL[name]()
    sample.write(tmp_path)
    if name == "draft_vocabulary":  # beside a whole model
        (tmp_path / "tokenizer.json").write_text("{}")
        save_file({"lm_head.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    assert detect_layout(tmp_path).value == sample.layout


def test_the_methods_of_the_layouts(tmp_path: Path) -> None:
    methods = {}
    for name, make in samples.ALL.items():
        if name != "draft_vocabulary":
            methods[name] = detect_layout(make().write(tmp_path / name)).method
    assert methods.pop("layerskip_adapter") == "layerskip"
    for name, method in methods.items():
        assert method == ("medusa" if "medusa" in name else "eagle3" if "eagle3" in name else "eagle")


def test_what_fits_no_layout_is_refused_with_the_names_it_has(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"proj.0.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"no checkpoint that is supported.*proj.0.weight"):
        detect_layout(tmp_path)
    with pytest.raises(ModelError, match="there is no folder"):
        detect_layout(tmp_path / "nothing")


def test_a_kind_of_speculators_that_is_not_supported_is_named(tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    sample.config["speculators_model_type"] = "dflash"
    with pytest.raises(ConfigurationError, match="'dflash': eagle and eagle3 are supported"):
        detect_layout(sample.write(tmp_path))


@pytest.mark.parametrize("make", [samples.eagle, samples.speculators_eagle])
def test_eagle(make: Callable[[], samples.Sample], tmp_path: Path) -> None:
    loaded: EagleCheckpoint = make().load_from(tmp_path)
    config = loaded.config
    assert (config.kind, config.hidden_size, config.num_heads, config.num_kv_heads) == ("eagle", HIDDEN, 2, 1)
    assert (config.head_dim, config.intermediate_size, config.max_model_len) == (4, INNER, 2048)
    assert config.fc_bias
    assert not config.input_layernorm
    assert config.aux_layers == ()
    assert torch.equal(loaded.weights["fc.weight"], samples.rows(HIDDEN, 2 * HIDDEN))
    assert torch.equal(loaded.weights["layer.mlp.down_proj.weight"], samples.rows(HIDDEN, INNER))
    assert loaded.num_bytes == sum(weight.nbytes for weight in loaded.weights.values())


@pytest.mark.parametrize("make", [samples.eagle3, samples.eagle3_nvidia, samples.speculators_eagle3, samples.eagle31])
def test_eagle3(make: Callable[[], samples.Sample], tmp_path: Path) -> None:
    loaded: EagleCheckpoint = make().load_from(tmp_path)
    config = loaded.config
    assert (config.kind, config.aux_layers, config.draft_vocab_size) == ("eagle3", (2, 6, 9), DRAFT_VOCAB)
    assert config.norm_before_fc == (make is samples.eagle3_nvidia)
    assert (config.fc_norm, config.norm_output) == ((make is samples.eagle31),) * 2
    assert config.norm_before_residual == (make in {samples.speculators_eagle3, samples.eagle31})
    assert loaded.d2t is not None
    assert loaded.t2d is not None
    assert (torch.arange(DRAFT_VOCAB) + loaded.d2t).tolist() == TARGET_IDS
    assert "layer.hidden_norm.weight" in loaded.weights
    assert not {"d2t", "t2d"} & loaded.weights.keys()


@pytest.mark.parametrize("make", [samples.medusa_v1, samples.medusa_v2, samples.medusa_vllm])
def test_medusa(make: Callable[[], samples.Sample], tmp_path: Path) -> None:
    loaded: MedusaCheckpoint = make().load_from(tmp_path)
    config = loaded.config
    assert config.num_heads == len(loaded.blocks) == 3, "counted, whatever the configuration says"
    assert config.num_layers == (2 if make is samples.medusa_vllm else 1)
    assert config.has_bias == (make is not samples.medusa_vllm)
    assert config.shared_head == (loaded.heads is None) == (make is samples.medusa_v2)
    assert config.vocab_size == (DRAFT_VOCAB if make is samples.medusa_vllm else VOCAB)
    if make is samples.medusa_vllm:
        assert loaded.token_map is not None
        assert loaded.token_map.tolist() == TARGET_IDS


def test_layerskip(tmp_path: Path) -> None:
    loaded: LayerSkipCheckpoint = samples.layerskip_adapter().load_from(tmp_path)
    assert loaded.exit_layer == 3
    assert loaded.adapter is not None
    assert loaded.adapter.scale == 2.0
    assert list(loaded.adapter.pairs) == [f"model.layers.{layer}.self_attn.q_proj" for layer in range(2)]


def test_draft_vocabulary(tmp_path: Path) -> None:
    d2t = samples.draft_vocabulary().load_from(tmp_path)
    assert (torch.arange(DRAFT_VOCAB) + d2t).tolist() == TARGET_IDS
    (tmp_path / "draft_vocabulary.safetensors").unlink()
    assert samples.ALL["draft_vocabulary"]().load(tmp_path, TARGET) is None


def test_shards_are_joined_and_must_be_complete(tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    save_file({"fc.weight": sample.tensors["fc.weight"]}, tmp_path / "outside.safetensors")
    tmp_path = sample.write(tmp_path / "head")
    whole = (tmp_path / "model.safetensors").rename(tmp_path / "whole.safetensors")
    names = sorted(sample.tensors)
    places = {name: f"model-{1 + (index % 2)}-of-2.safetensors" for index, name in enumerate(names)}
    for file in set(places.values()):
        save_file({name: sample.tensors[name] for name in names if places[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    whole.unlink()
    assert sample.load(tmp_path, TARGET)
    index.write_text(json.dumps({"weight_map": places | {"fc.weight": "../outside.safetensors"}}))
    with pytest.raises(ModelError, match=r"not beside it: \.\./outside.safetensors"):
        sample.load(tmp_path, TARGET)
    index.write_text(json.dumps({"weight_map": {name: file for name, file in places.items() if name != "fc.weight"}}))
    with pytest.raises(ModelError, match=r"do not hold the same tensors \(fc.weight\)"):
        sample.load(tmp_path, TARGET)
