"""What loads elsewhere without a word and then drafts badly is either read rightly here or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint_files.weight_files import read_tensors
from paceline.drafting.checkpoints.eagle import EagleCheckpoint, load_eagle
from paceline.drafting.checkpoints.layerskip import load_layerskip
from paceline.drafting.checkpoints.medusa import MedusaCheckpoint, load_medusa
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.errors import ConfigurationError, ModelError
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.checkpoints.samples import DRAFT_VOCAB, HIDDEN, TARGET, VOCAB


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        (None, (2, 6, 9)),
        ([2, 6, 9], (2, 6, 9)),
        ([1, 5, 8], (2, 6, 9)),  # numbered by the layers they leave
        ([1, 5, 9], (1, 5, 9)),
        ([0, 11, 12], (0, 11, 12)),
    ],
)
def test_which_layers_are_meant(given: list[int] | None, layers: tuple[int, ...], tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    sample.config["eagle_aux_hidden_state_layer_ids"] = given
    assert sample.load_from(tmp_path).config.aux_layers == layers


def test_our_own_files_always_number_the_layers_that_are_entered(tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    sample.config |= {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "paceline_format": 1}
    assert sample.load_from(tmp_path).config.aux_layers == (1, 5, 8)


@pytest.mark.parametrize("given", [[2, 6, 13], [6, 2, 9], [2, 2, 9]])
def test_layers_that_the_target_has_not_are_refused(given: list[int], tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    sample.config["eagle_aux_hidden_state_layer_ids"] = given
    with pytest.raises(ConfigurationError, match="rising numbers from 0 to 12") as caught:
        sample.load_from(tmp_path)
    assert caught.value.field == "eagle_aux_hidden_state_layer_ids"


def test_five_layers_must_all_be_named(tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    sample.tensors["fc.weight"] = samples.rows(HIDDEN, 5 * HIDDEN)
    with pytest.raises(ModelError, match=r"fc.weight is \[8, 40\], expected \[8, 24\]"):
        sample.load_from(tmp_path)
    sample.config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5, 7, 9]
    assert len(sample.load_from(tmp_path).config.aux_layers) == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_scaling": {"rope_theta": 500000.0, "type": "default"}},
    ],
)
def test_rotary_settings_are_found_wherever_they_stand(changes: dict[str, Any], tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.config |= changes
    assert sample.load_from(tmp_path).config.rope == {"rope_type": "default", "rope_theta": 500000.0}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta is 500000"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be a number"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 8.0}}, "rope_type is 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ({"hidden_act": "gelu"}, "heads with silu"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"hidden_size": "8"}, "a whole number above 0 is needed"),
        ({"attention_bias": True}, "0 of 4 projections have a bias"),
        ({"eagle_config": {"norm_before_fc": True}, "norm_before_fc": False}, "keep the right one"),
        ({"eagle_config": {"use_last_layernorm": False}}, "only True is supported"),
        ({"eagle_config": {"use_magic": True}}, "use_magic in eagle_config is not known"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.config |= changes
    with pytest.raises(ConfigurationError, match=said):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("change", [{"verifier_accept_k": 3}, {"accept_tolerance": 0.1}])
@pytest.mark.parametrize("make", [samples.speculators_eagle, samples.speculators_eagle3])
def test_lossy_acceptance_is_refused(make: Any, change: dict[str, Any], tmp_path: Path) -> None:
    sample = make()
    sample.config["speculators_config"]["proposal_methods"][0] |= change
    with pytest.raises(ConfigurationError, match="tokens that the target would not choose") as caught:
        sample.load_from(tmp_path)
    assert caught.value.field == next(iter(change))


def test_the_residual_is_not_guessed(tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    del sample.config["norm_before_residual"]
    with pytest.raises(ConfigurationError, match="norm_before_residual is missing"):
        sample.load_from(tmp_path)


def test_sizes_that_speculators_leaves_out_come_from_the_tensors(tmp_path: Path) -> None:
    sample = samples.speculators_eagle3()
    layer = sample.config["transformer_layer_config"]
    for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "vocab_size", "rms_norm_eps", "rope_theta"):
        del layer[name]
    config = sample.load_from(tmp_path).config
    assert (config.hidden_size, config.intermediate_size, config.num_kv_heads) == (HIDDEN, samples.INNER, 1)
    assert (config.rms_norm_eps, config.rope["rope_theta"]) == (1e-6, 10000.0)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bias_of_eagle_is_as_the_tensors_say(bias: bool, tmp_path: Path) -> None:
    sample = samples.eagle()
    if not bias:
        del sample.tensors["fc.bias"]
    assert sample.load_from(tmp_path).config.fc_bias == bias
    sample.config["bias"] = not bias
    with pytest.raises((ConfigurationError, ModelError), match=r"bias is false, and there is a bias|missing fc.bias"):
        sample.load_from(tmp_path)


def test_extra_norms_of_speculators_eagle(tmp_path: Path) -> None:
    sample = samples.speculators_eagle()
    sample.config["layernorms"] = True
    with pytest.raises(ModelError, match=r"missing embedding_layernorm.weight, pre_lm_head_layernorm.weight, "):
        sample.load_from(tmp_path)
    for name in ("embedding_layernorm", "pre_lm_head_layernorm", "transformer.input_layernorm"):
        sample.tensors[f"{name}.weight"] = samples.rows(HIDDEN)
    loaded: EagleCheckpoint = sample.load_from(tmp_path)
    assert loaded.config.input_layernorm
    assert {"embed_norm.weight", "norm.weight", "layer.input_layernorm.weight"} <= loaded.weights.keys()


def test_biases_of_query_key_and_value_alone(tmp_path: Path) -> None:
    sample = samples.eagle()
    for part, rows in (("q", 8), ("k", 4), ("v", 4)):
        sample.tensors[f"layers.0.self_attn.{part}_proj.bias"] = samples.rows(rows)
    assert sample.load_from(tmp_path).config.attention_bias
    del sample.tensors["layers.0.self_attn.v_proj.bias"]
    with pytest.raises(ModelError, match=r"missing layers.0.self_attn.v_proj.bias"):
        sample.load_from(tmp_path)


def test_a_table_of_rotary_frequencies_must_be_that_of_the_settings(tmp_path: Path) -> None:
    sample = samples.eagle()
    name = "layers.0.self_attn.rotary_emb.inv_freq"
    sample.tensors[name] = 10000.0 ** -(torch.arange(0, 4, 2) / 4)
    assert name not in sample.load_from(tmp_path).weights
    sample.config["rope_theta"] = 500000.0
    with pytest.raises(ModelError, match="not those of rope_theta 500000"):
        sample.load_from(tmp_path)


def test_names_under_model_are_the_same(tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.tensors = {f"model.{name}": tensor for name, tensor in sample.tensors.items()}
    assert sample.load_from(tmp_path).config.kind == "eagle3"
    sample.tensors["fc.weight"] = sample.tensors["model.fc.weight"]
    with pytest.raises(ModelError, match=r"unexpected (model\.)?fc.weight"):
        sample.load_from(tmp_path)


@pytest.mark.parametrize(
    ("make", "target"),
    [
        (samples.eagle, TargetFacts(HIDDEN, 12, VOCAB + 1)),
        (samples.eagle3, TargetFacts(HIDDEN, 12, VOCAB - 1)),
        (samples.speculators_eagle, TargetFacts(2 * HIDDEN, 12, VOCAB)),
        (samples.medusa_v1, TargetFacts(HIDDEN, 12, VOCAB + 1)),
        (samples.medusa_v2, TargetFacts(HIDDEN + 1, 12, VOCAB)),
        (samples.medusa_vllm, TargetFacts(HIDDEN, 12, VOCAB + 1)),
    ],
)
def test_a_head_for_another_target_is_refused(make: Any, target: TargetFacts, tmp_path: Path) -> None:
    sample = make()
    with pytest.raises(ModelError, match=r"made for another target|trained for it"):
        sample.load(sample.write(tmp_path), target)


def test_maps_that_disagree_or_are_absent(tmp_path: Path) -> None:
    sample = samples.eagle3()
    t2d = sample.tensors["t2d"]
    t2d[1], t2d[3] = True, False
    with pytest.raises(ModelError, match=r"d2t and t2d do not name the same ids: .*and not those"):
        sample.load_from(tmp_path)
    del sample.tensors["t2d"]
    assert sample.load_from(tmp_path).t2d is None
    sample.tensors["d2t"].zero_()
    with pytest.raises(ModelError, match="d2t is all zeros"):
        sample.load_from(tmp_path)
    sample.tensors["d2t"] = torch.tensor(samples.TARGET_IDS)
    with pytest.raises(ModelError, match="it seems to hold target ids"):
        sample.load_from(tmp_path)
    del sample.tensors["d2t"]
    with pytest.raises(ModelError, match="no d2t says which ids"):
        sample.load_from(tmp_path)


def test_a_whole_vocabulary_needs_no_map(tmp_path: Path) -> None:
    sample = samples.eagle3()
    sample.tensors["lm_head.weight"] = samples.rows(VOCAB, HIDDEN)
    sample.config["draft_vocab_size"] = VOCAB
    del sample.tensors["d2t"], sample.tensors["t2d"]
    assert sample.load_from(tmp_path).d2t is None


def test_residual_layers_that_are_one_module(tmp_path: Path) -> None:
    """Version 1 repeats one module; a tool that stores shared tensors once leaves the later names out."""
    sample = samples.medusa_v1()
    sample.config["medusa_num_layers"] = 2
    for head in range(3):
        sample.tensors[f"{head}.2.weight"] = sample.tensors.pop(f"{head}.1.weight")
    loaded: MedusaCheckpoint = sample.load_from(tmp_path)
    assert loaded.config.num_layers == 2
    for first, second in loaded.blocks:
        assert first[0] is second[0]


def test_medusa_heads_that_are_named_and_not_there(tmp_path: Path) -> None:
    sample = samples.medusa_v2()
    sample.config["medusa_num_heads"] = 4
    with pytest.raises(ModelError, match=r"missing 3.0.linear.bias, 3.0.linear.weight"):
        sample.load_from(tmp_path)


def test_a_bias_that_vllm_would_overlook(tmp_path: Path) -> None:
    sample = samples.medusa_vllm()
    for head in range(3):
        for layer in range(2):
            sample.tensors[f"medusa_heads.blocks.{head}.layers.{layer}.bias"] = samples.rows(HIDDEN)
    with pytest.raises(ConfigurationError, match="set it to true"):
        sample.load_from(tmp_path)
    sample.config["medusa_fc_bias"] = True
    assert sample.load_from(tmp_path).config.has_bias


def test_whole_heads_beside_a_token_map_are_cut_to_it(tmp_path: Path) -> None:
    sample = samples.medusa_vllm()
    whole = samples.rows(VOCAB, HIDDEN)
    for head in range(3):
        sample.tensors[f"medusa_heads.lm_heads.{head}.weight"] = whole.clone()
    loaded: MedusaCheckpoint = sample.load_from(tmp_path)
    assert loaded.heads is not None
    assert torch.equal(loaded.heads[2], whole[samples.TARGET_IDS])
    assert loaded.config.vocab_size == DRAFT_VOCAB


def test_one_head_for_all_is_kept_once(tmp_path: Path) -> None:
    sample = samples.medusa_vllm()
    sample.config["original_lm_head"] = True
    for head in (1, 2):
        del sample.tensors[f"medusa_heads.lm_heads.{head}.weight"]
    loaded: MedusaCheckpoint = sample.load_from(tmp_path)
    assert loaded.heads is not None
    assert loaded.heads[0] is loaded.heads[2]
    assert loaded.num_bytes == 4 * (6 * HIDDEN * HIDDEN + DRAFT_VOCAB * HIDDEN)


def test_a_missing_or_needless_token_map(tmp_path: Path) -> None:
    sample = samples.medusa_vllm()
    token_map = sample.tensors.pop("token_map")
    with pytest.raises(ModelError, match="wrong vocabulary map: truncated_vocab_size is 6 of 20"):
        sample.load_from(tmp_path)
    sample.tensors["token_map"] = token_map
    del sample.config["truncated_vocab_size"]
    with pytest.raises(ConfigurationError, match="truncated_vocab_size is not below"):
        sample.load_from(tmp_path)


@pytest.mark.parametrize("exit_layer", [12, None])
def test_an_exit_layer_must_be_named_and_be_one(exit_layer: int | None, tmp_path: Path) -> None:
    sample = samples.layerskip_adapter()
    sample.config["exit_layer"] = exit_layer
    with pytest.raises(ConfigurationError, match=r"outside|names no exit layer") as caught:
        sample.load_from(tmp_path)
    assert caught.value.field == "exit_layer"
    assert load_layerskip(tmp_path, TARGET, exit_layer=4).exit_layer == 4
    sample.config["exit_layer"] = 3
    sample.others["adapter_config.json"]["exit_layer"] = 4
    with pytest.raises(ConfigurationError, match=r"3 in config.json, 4 in adapter_config.json"):
        sample.load_from(tmp_path)


def test_the_loader_of_another_method_says_what_it_misses(tmp_path: Path) -> None:
    eagle, medusa = samples.eagle().write(tmp_path / "eagle"), samples.medusa_v2().write(tmp_path / "medusa")
    (eagle / "pytorch_model.bin").rename(eagle / "medusa_lm_head.pt")
    (medusa / "medusa_lm_head.safetensors").rename(medusa / "model.safetensors")
    with pytest.raises(ModelError, match="no Medusa heads"):
        load_medusa(eagle, TARGET)
    with pytest.raises(ModelError, match="no EAGLE head"):
        load_eagle(medusa, TARGET)


class _Rogue:
    def __reduce__(self) -> tuple[Any, ...]:
        return (Path("rogue").touch, ())


def test_a_pickle_with_code_in_it_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"fc.weight": _Rogue()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="save it as safetensors"):
        read_tensors(tmp_path)
    assert not (tmp_path / "rogue").exists()


def test_files_that_hold_no_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"has no weights: looked for model.safetensors"):
        read_tensors(tmp_path)
    path = tmp_path / "pytorch_model.bin"
    path.write_bytes(b"no pickle")
    with pytest.raises(ModelError, match="not a table of tensors"):
        read_tensors(tmp_path)
    torch.save({"model": {"fc.weight": torch.ones(1)}}, path)
    with pytest.raises(ModelError, match="not a flat table"):
        read_tensors(tmp_path)
    torch.save({"fc.weight": torch.tensor([float("nan")])}, path)
    with pytest.raises(ModelError, match=r"fc.weight hold numbers that are not finite"):
        read_tensors(tmp_path)
    torch.save({"fc.weight": torch.ones(1, dtype=torch.int8)}, path)
    with pytest.raises(ModelError, match=r"fc.weight are int8"):
        read_tensors(tmp_path)
    monkeypatch.setattr("paceline.checkpoint_files.weight_files.SIZE_LIMIT_BYTES", 10)
    with pytest.raises(ModelError, match="give the head alone"):
        read_tensors(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(ModelError, match="cut off or damaged"):
        read_tensors(tmp_path)
