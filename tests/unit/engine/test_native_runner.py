"""The native runner on tiny random models of every shape that it knows, against the stock model of `transformers`."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, Qwen2Config, Qwen3Config

from paceline.engine import load_runner as load_runner_module
from paceline.engine.load_runner import load_runner
from paceline.engine.loader import ModelDtype, load_model
from paceline.engine.native.family import native_obstacle
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.errors import ConfigurationError, ModelError
from paceline.speculation.tree import DraftTree
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, WINDOW, Architecture, write_model

OPTIONS = RunnerOptions(kv_bytes=1 << 20, page_tokens=4)
TOKENS = tuple((7 * index + 3) % VOCAB_SIZE for index in range(40))
OTHER = tuple((5 * index + 2) % VOCAB_SIZE for index in range(12))

LLAMA = SERVED["llama"].arguments


def rope(rope_type: str, **arguments: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0, **arguments}}


SHAPES = {
    "llama_many_heads": Architecture(LlamaConfig, {**LLAMA, "num_key_value_heads": 4}),
    "llama_one_kv_head": Architecture(LlamaConfig, {**LLAMA, "num_key_value_heads": 1, "head_dim": 10}),
    "llama_tied": Architecture(LlamaConfig, {**LLAMA, "tie_word_embeddings": True}),
    "llama_biases": Architecture(LlamaConfig, {**LLAMA, "attention_bias": True, "mlp_bias": True}),
    "llama_linear": Architecture(LlamaConfig, {**LLAMA, **rope("linear")}),
    "llama_dynamic": Architecture(LlamaConfig, {**LLAMA, **rope("dynamic", original_max_position_embeddings=64)}),
    "llama_yarn": Architecture(LlamaConfig, {**LLAMA, **rope("yarn", original_max_position_embeddings=64)}),
    "llama_3": Architecture(
        LlamaConfig,
        {
            **LLAMA,
            **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
        },
    ),
    "mistral": Architecture(MistralConfig, {**LLAMA, "sliding_window": None}),
    "mistral_window": Architecture(MistralConfig, {**LLAMA, "sliding_window": WINDOW, "head_dim": 12}),
    "qwen2": Architecture(Qwen2Config, LLAMA),
    "qwen2_upper_window": Architecture(
        Qwen2Config, {**LLAMA, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen2_layer_types": Architecture(
        Qwen2Config,
        {
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": Architecture(Qwen3Config, {**LLAMA, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_bias_window": Architecture(
        Qwen3Config,
        {
            **LLAMA,
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "max_window_layers": 2,
        },
    ),
}


def write_shape(folder: Path, architecture: Architecture) -> Path:
    """A model whose norms differ from one another, so that a mixed-up one shows."""
    write_model(folder, architecture, seed=3)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return folder


def stock_model(folder: Path) -> LlamaForCausalLM:
    """Of any architecture; typed as one of them, because the auto class has no type."""
    return cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"))


@torch.inference_mode()
def fresh_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits


def assert_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Logits agree to 1e-5 of the largest."""
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", SHAPES)
def test_logits_are_the_stock_model_s_over_ragged_passes_with_chunks_trees_and_rollback(
    name: str, tmp_path: Path
) -> None:
    folder = write_shape(tmp_path, SHAPES[name])
    stock = stock_model(folder)
    expected, expected_other = fresh_logits(stock, TOKENS), fresh_logits(stock, OTHER)
    runner = NativeRunner(load_model(folder), OPTIONS)
    kv, other = runner.new_sequence(), runner.new_sequence()

    # A chunk beside a shorter one; a chunk beside a single token.
    for chunk, beside in ((TOKENS[:13], OTHER[:5]), (TOKENS[13:20], OTHER[5:6])):
        kv.reserve(len(chunk))
        other.reserve(len(beside))
        first, first_beside = kv.num_rows, other.num_rows
        logits, logits_beside = runner.forward(
            [SequencePass(kv, chunk, num_logits=len(chunk)), SequencePass(other, beside, num_logits=1)]
        )
        kv.commit(len(chunk))
        other.commit(len(beside))
        assert_equal(logits, expected[first : kv.num_rows])
        assert_equal(logits_beside, expected_other[first_beside + len(beside) - 1 :][:1])

    # A wrong chain is rolled back; then a tree whose right nodes are not neighbours.
    kv.reserve(3)
    runner.forward([SequencePass(kv, (TOKENS[20],), DraftTree.chain((1, 1)), num_logits=3)])
    kv.commit(3)
    kv.rollback(18)
    wrong = (TOKENS[20] + 1) % VOCAB_SIZE
    tree = DraftTree((wrong, TOKENS[20], wrong, TOKENS[21]), (0, 0, 2, 2))
    kv.reserve(6)
    logits = runner.forward([SequencePass(kv, TOKENS[18:20], tree, num_logits=6)])[0]
    assert_equal(logits[[0, 1, 3, 5]], expected[18:22])
    assert_equal(logits[2:3], fresh_logits(stock, [*TOKENS[:20], wrong])[-1:])
    kv.commit(2, (2, 4))

    # The last rows, one, two and the rest at a time: what is padded, and what is not.
    for stop in (23, 25, 40):
        chunk = TOKENS[kv.num_rows : stop]
        kv.reserve(len(chunk))
        logits = runner.forward([SequencePass(kv, chunk, num_logits=1)])[0]
        kv.commit(len(chunk))
        assert_equal(logits, expected[stop - 1 : stop])
    kv.free()
    other.free()
    runner.pool.check_integrity()


def test_a_tied_table_is_in_memory_once(tmp_path: Path) -> None:
    runner = NativeRunner(load_model(write_shape(tmp_path, SHAPES["llama_tied"])), OPTIONS)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert runner.packing.reason == ""
    assert runner.packing.duplicated_bytes == 0
    assert runner.info.weights_bytes == sum(parameter.nbytes for parameter in stock.parameters())


def test_the_loaded_model_keeps_no_weights(tmp_path: Path) -> None:
    loaded = load_model(write_shape(tmp_path, SHAPES["qwen3"]))
    NativeRunner(loaded, OPTIONS)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 0


@pytest.mark.parametrize("name", ["llama_tied", "qwen3_bias_window"])
def test_unpacked_weights_give_the_same_logits(name: str, tmp_path: Path) -> None:
    folder = write_shape(tmp_path, SHAPES[name])
    plain = NativeRunner(load_model(folder), RunnerOptions(kv_bytes=1 << 20, pack=False))
    assert plain.packing.reason == "switched off"
    kv = plain.new_sequence()
    kv.reserve(len(TOKENS))
    logits = plain.forward([SequencePass(kv, TOKENS, num_logits=len(TOKENS))])[0]
    assert_equal(logits, fresh_logits(stock_model(folder), TOKENS))


@pytest.mark.parametrize("dtype", [ModelDtype.BFLOAT16, ModelDtype.FLOAT16])
def test_half_precision_is_served_within_its_own_rounding(dtype: ModelDtype, tmp_path: Path) -> None:
    # The check at load time compares with the stock model in the same format.
    runner = NativeRunner(load_model(write_model(tmp_path, SERVED["qwen3"], spread=0.1), dtype=dtype), OPTIONS)
    assert runner.info.dtype == dtype.value
    assert dtype.value in runner.packing.reason


def test_a_pass_without_wanted_logits_only_fills_rows(tmp_path: Path) -> None:
    runner = NativeRunner(load_model(write_model(tmp_path, SERVED["llama"])), OPTIONS)
    kv = runner.new_sequence()
    kv.reserve(4)
    assert runner.forward([SequencePass(kv, TOKENS[:4])])[0].shape == (0, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "activation is gelu"),
        (rope("linear", partial_rotary_factor=0.5), "rotates only a part"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types"),
    ],
)
def test_a_setting_that_is_not_known_is_an_obstacle(changes: dict[str, Any], reason: str) -> None:
    model = LlamaForCausalLM(LlamaConfig(**{**LLAMA, **changes}))
    assert reason in native_obstacle(model)
    assert native_obstacle(LlamaForCausalLM(LlamaConfig(**LLAMA))) == ""


def test_weights_that_are_not_known_are_an_obstacle() -> None:
    class Adapted(nn.Linear):
        """A linear layer that does more."""

    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[1].self_attn.q_proj = Adapted(32, 32)
    assert native_obstacle(model) == "layer 1 has a Adapted as self_attn.q_proj"
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[2].extra = nn.Linear(4, 4)
    assert native_obstacle(model) == "layer 2 has other weights than expected (extra)"
    model = LlamaForCausalLM(LlamaConfig(**LLAMA))
    model.model.layers[0].self_attn.q_norm = nn.LayerNorm(8)
    assert native_obstacle(model) == "layer 0 has other weights than expected (self_attn.q_norm)"


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3", "gemma2_window", "phi3"])
def test_auto_takes_the_native_runner_for_the_models_it_knows(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_model(tmp_path, SERVED[name])
    with caplog.at_level(logging.INFO):
        runner = load_runner(folder, options=OPTIONS)
    known = name not in {"gemma2_window", "phi3"}
    assert runner.info.runner == ("native" if known else "transformers")
    reasons = [record.__dict__["reason"] for record in caplog.records if "transformers runner" in record.message]
    assert len(reasons) == (0 if known else 1)
    assert all("ForCausalLM is none of" in reason for reason in reasons)


def test_the_choice_is_heeded(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "llama", SERVED["llama"])
    for choice in (RunnerChoice.NATIVE, RunnerChoice.TRANSFORMERS):
        options = RunnerOptions(kv_bytes=1 << 20, runner=choice)
        assert load_runner(folder, options=options).info.runner == choice.value


def test_native_on_an_unknown_model_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SERVED["phi3"])
    with pytest.raises(ConfigurationError, match=r"Phi3ForCausalLM is none of.*set runner to auto") as caught:
        load_runner(folder, options=RunnerOptions(kv_bytes=1 << 20, runner=RunnerChoice.NATIVE))
    assert caught.value.field == "runner"


def test_a_model_that_fails_the_check_is_served_by_the_other_runner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(NativeRunner):
        """Adds one to every logit."""

        def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
            return [logits + 1.0 for logits in super().forward(batch)]

    monkeypatch.setattr(load_runner_module, "NativeRunner", Wrong)
    folder = write_model(tmp_path, SERVED["llama"])
    assert load_runner(folder, options=OPTIONS).info.runner == "transformers"
    with pytest.raises(ConfigurationError, match="gives other logits"):
        load_runner(folder, options=RunnerOptions(kv_bytes=1 << 20, runner=RunnerChoice.NATIVE))


def test_the_runner_itself_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    folder = write_model(tmp_path, SERVED["llama"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"hidden_act": "relu"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(ModelError, match=r"activation is relu.*transformers runner"):
        NativeRunner(load_model(folder), OPTIONS)
