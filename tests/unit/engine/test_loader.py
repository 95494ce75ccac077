"""Loading a model folder, and what is said when it cannot serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, T5Config, T5ForConditionalGeneration

from paceline.engine.loader import ModelDtype, find_eos_token_ids, load_model
from paceline.errors import ConfigurationError, ModelError
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, write_model
from tests.fakes.tiny_tokenizer import write_letters


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path, SERVED["llama"])


def change_json(path: Path, **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}), encoding="utf-8")


def change_weights(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", list(ModelDtype))
def test_a_model_is_loaded_in_the_wanted_format_for_inference(folder: Path, dtype: ModelDtype) -> None:
    loaded = load_model(folder, dtype=dtype)
    parameters = list(loaded.model.parameters())
    assert {parameter.dtype for parameter in parameters} == {getattr(torch, dtype.value)}
    assert not any(parameter.requires_grad for parameter in parameters)
    assert not loaded.model.training
    assert (loaded.vocab_size, loaded.max_model_len, loaded.eos_token_ids) == (VOCAB_SIZE, 256, (VOCAB_SIZE - 1,))


def test_end_tokens_come_from_the_generation_config_first(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=[5, 9])
    assert find_eos_token_ids(folder) == (5, 9)
    (folder / "generation_config.json").unlink()
    assert find_eos_token_ids(folder) == (VOCAB_SIZE - 1,)


def test_a_model_without_an_end_token_is_refused(folder: Path) -> None:
    change_json(folder / "generation_config.json", eos_token_id=None)
    change_json(folder / "config.json", eos_token_id=None)
    with pytest.raises(ModelError, match=r"names no end-of-sequence token: set eos_token_id"):
        load_model(folder)


def test_a_model_without_a_tokenizer_is_refused(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_model(folder)


def test_a_model_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_model(folder)


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({UP: None}, {}, f"{UP} is missing"),
        ({"lm_head.weight": None}, {}, "lm_head.weight is missing"),
        ({UP: torch.ones(47, 32)}, {}, rf"{UP} is \[47, 32\], expected \[48, 32\]"),
        ({}, {"num_hidden_layers": 4}, "layers.3.* and 3 more"),
        ({}, {"attention_bias": True}, "q_proj.bias is missing"),
        ({}, {"num_key_value_heads": 4}, r"k_proj.weight is \[16, 32\], expected \[32, 32\]"),
    ],
)
def test_weights_that_would_be_made_up_are_refused(
    folder: Path, tensors: dict[str, torch.Tensor | None], changes: dict[str, Any], message: str
) -> None:
    change_weights(folder, tensors)
    change_json(folder / "config.json", **changes)
    with pytest.raises(ModelError, match=f"does not hold the model that its config.json describes.*{message}"):
        load_model(folder)


def test_weights_that_are_not_used_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    change_weights(folder, {"model.layers.1.self_attn.q_proj.bias": torch.ones(32)})
    load_model(folder)
    (record,) = [record for record in caplog.records if record.name == "paceline.engine.loader"]
    assert record.__dict__["tensors"] == "model.layers.1.self_attn.q_proj.bias"
    caplog.clear()
    load_model(folder, num_layers=2)
    assert not caplog.records


@pytest.mark.parametrize("content", [b"", b"\xff" * 64])
def test_a_damaged_file_of_weights_is_refused(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ModelError, match="cannot be loaded as a causal language model"):
        load_model(folder)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_generation_config_is_refused(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=r"generation_config\.json is no JSON object"):
        load_model(folder)


def test_a_configuration_that_contradicts_itself_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", num_attention_heads=3)
    with pytest.raises(ModelError, match=r"configuration of .* cannot be read: .*multiple of the number of attention"):
        load_model(folder)


def test_a_configuration_that_is_none_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match=r"configuration of .* cannot be read"):
        load_model(folder)


def test_a_context_that_is_not_named_is_refused(folder: Path) -> None:
    change_json(folder / "config.json", model_type="bloom", max_position_embeddings=None)
    with pytest.raises(ModelError, match="max_position_embeddings"):
        load_model(folder)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_a_position_encoding_that_depends_on_the_pass_limits_the_context(folder: Path, rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    change_json(folder / "config.json", rope_parameters=rope)
    assert load_model(folder).max_model_len == 64


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    write_letters(tmp_path)
    config = T5Config(vocab_size=16, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder model: give a decoder-only model"):
        load_model(tmp_path)


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    marker = folder / "ran"
    (folder / "modeling.py").write_text(f"open({str(marker)!r}, 'w')\n", encoding="utf-8")
    change_json(
        folder / "config.json",
        model_type="something-new",
        auto_map={"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"},
    )
    with pytest.raises(ModelError, match="cannot be read"):
        load_model(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("device", "message"),
    [("tpu", "use cpu or cuda:N"), ("cuda:99", "torch sees"), ("cuda:x", "use cpu or cuda:N")],
)
def test_a_device_that_is_not_there_is_a_configuration_error(folder: Path, device: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as caught:
        load_model(folder, device=device)
    assert caught.value.field == "device"


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    write_letters(tmp_path)
    BertConfig(vocab_size=16, hidden_size=8, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError):
        load_model(tmp_path)
