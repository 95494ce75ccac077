"""Every layout refuses each way of being spoilt with an error of its own that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.errors import ConfigurationError, ModelError
from tests.unit.drafting.checkpoints import samples

_SPOILT_KEYS = {
    "eagle": "layers.0.mlp.up_proj.weight",
    "eagle3": "midlayer.hidden_norm.weight",
    "eagle3_nvidia": "input_norm.weight",
    "speculators_eagle": "transformer.self_attn.k_proj.weight",
    "speculators_eagle3": "lm_head.weight",
    "eagle31": "fc_norm.1.weight",
    "medusa_v1": "1.1.weight",
    "medusa_v2": "2.0.linear.bias",
    "medusa_vllm": "blocks.1.layers.1.weight",
    "layerskip_adapter": "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight",
    "draft_vocabulary": "d2t",
}
"""A tensor of each layout, named as the error must name it."""

_MAPS = {
    "eagle3": "d2t",
    "eagle3_nvidia": "d2t",
    "speculators_eagle3": "d2t",
    "eagle31": "d2t",
    "medusa_vllm": "token_map",
    "draft_vocabulary": "d2t",
}

_NESTED_OPTIONS = {
    "eagle": ("config.json", "rms_norm_eps", "model"),
    "eagle3": ("config.json", "draft_vocab_size", "head"),
    "eagle3_nvidia": ("config.json", "draft_vocab_size", "head"),
    "speculators_eagle": ("config.json", "layernorms", "transformer_layer_config"),
    "speculators_eagle3": ("config.json", "norm_before_residual", "transformer_layer_config"),
    "eagle31": ("config.json", "norm_output", "transformer_layer_config"),
    "medusa_v1": ("config.json", "medusa_num_heads", "medusa"),
    "medusa_v2": ("config.json", "medusa_num_layers", "medusa"),
    "medusa_vllm": ("config.json", "truncated_vocab_size", "speculator"),
    "layerskip_adapter": ("config.json", "exit_layer", "layerskip"),
}


def _stored(sample: samples.Sample, name: str) -> str:
    return next(stored for stored in sample.tensors if stored.removeprefix("medusa_heads.") == name)


@pytest.mark.parametrize("name", samples.ALL)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    sample = samples.ALL[name]()
    key = _SPOILT_KEYS[name]
    del sample.tensors[_stored(sample, key)]
    sample.tensors.setdefault("spare.weight", torch.ones(1))  # a file of safetensors is not empty
    with pytest.raises(ModelError, match=rf"missing (.*, )?{key} ") as caught:
        sample.load_from(tmp_path)
    assert caught.value.field == "draft_model"


@pytest.mark.parametrize("name", samples.ALL)
def test_an_extra_tensor_is_named(name: str, tmp_path: Path) -> None:
    sample = samples.ALL[name]()
    sample.tensors["layers.1.self_attn.q_norm.weight"] = torch.ones(4)
    with pytest.raises(ModelError, match=r"unexpected layers.1.self_attn.q_norm.weight ") as caught:
        sample.load_from(tmp_path)
    assert "missing" not in caught.value.message


@pytest.mark.parametrize("name", samples.ALL)
def test_a_tensor_of_another_shape_is_named_with_both_shapes(name: str, tmp_path: Path) -> None:
    sample = samples.ALL[name]()
    stored = _stored(sample, _SPOILT_KEYS[name])
    good = sample.tensors[stored]
    sample.tensors[stored] = good[..., :-1].contiguous()
    expected = rf"(wrong shape: {stored} is|d2t is int64) \[.*\], expected (integers )?\[.*\]"
    with pytest.raises(ModelError, match=expected):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("name", _MAPS)
@pytest.mark.parametrize(("place", "value"), [(-1, samples.VOCAB), (1, -1)], ids=["outside", "negative or twice"])
def test_a_wrong_vocabulary_map_is_refused(name: str, place: int, value: int, tmp_path: Path) -> None:
    sample = samples.ALL[name]()
    sample.tensors[_MAPS[name]][place] = value
    with pytest.raises(ModelError, match=rf"wrong vocabulary map: {_MAPS[name]} reaches 1 ids (outside|twice)"):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("name", _NESTED_OPTIONS)
def test_an_option_where_nobody_reads_it_is_refused(name: str, tmp_path: Path) -> None:
    sample = samples.ALL[name]()
    _file, option, block = _NESTED_OPTIONS[name]
    sample.config.setdefault(block, {})[option] = sample.config.pop(option)
    with pytest.raises(ConfigurationError, match=rf"the option {option} is nested in {block}") as caught:
        sample.load_from(tmp_path)
    assert caught.value.field == option


def test_options_are_found_however_deep_they_are_nested(tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.config["tools"] = [{"head": {"options": {"norm_output": True}}}]
    with pytest.raises(ConfigurationError, match=r"norm_output is nested in tools\[0\].head.options,"):
        sample.load_from(tmp_path)


def test_every_layout_is_in_the_tables() -> None:
    assert _SPOILT_KEYS.keys() == samples.ALL.keys()
    without_options = {"draft_vocabulary"}
    assert _NESTED_OPTIONS.keys() | without_options == samples.ALL.keys()
