"""What drafting heads borrow of the target: the same from a runner and from the files, and in memory once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from paceline.engine.loader import ModelDtype, load_model
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.shared_parts import SharedParts, load_shared_parts
from paceline.engine.transformers_runner import TransformersRunner
from paceline.errors import ModelError
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, Architecture, write_model

HIDDEN_SIZE = 32
OPTIONS = RunnerOptions(kv_bytes=1 << 20)
TOKENS = torch.tensor([3, 1, 4, 1, 5])


def write(folder: Path, *, tied: bool) -> LlamaForCausalLM:
    """A model whose norm is not all ones."""
    llama = SERVED["llama"]
    write_model(folder, Architecture(llama.config_class, {**llama.arguments, "tie_word_embeddings": tied}))
    model = cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


@torch.inference_mode()
def assert_parts_of(parts: SharedParts, model: LlamaForCausalLM) -> None:
    embedded = parts.embed(TOKENS)
    torch.testing.assert_close(embedded, model.model.embed_tokens(TOKENS), rtol=0, atol=0)
    normed = model.model.norm(embedded)
    torch.testing.assert_close(parts.norm(embedded), normed, rtol=0, atol=1e-6)
    for num_rows in (1, 5):
        torch.testing.assert_close(parts.head(normed[:num_rows]), model.lm_head(normed[:num_rows]), rtol=0, atol=1e-5)
    assert (parts.hidden_size, parts.num_layers, parts.vocab_size) == (HIDDEN_SIZE, 3, VOCAB_SIZE)
    assert (parts.dtype, parts.device) == (torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_the_target_s_own(tied: bool, tmp_path: Path) -> None:
    model = write(tmp_path, tied=tied)
    for runner in (NativeRunner(load_model(tmp_path), OPTIONS), TransformersRunner(load_model(tmp_path), OPTIONS)):
        assert_parts_of(runner.shared_parts(), model)
        assert runner.shared_parts().weights_bytes == 0
    numbers = VOCAB_SIZE * HIDDEN_SIZE * (1 if tied else 2) + HIDDEN_SIZE
    for pack in (True, False):
        parts = load_shared_parts(tmp_path, pack=pack)
        assert_parts_of(parts, model)
        assert parts.weights_bytes == 4 * numbers
    half = load_shared_parts(tmp_path, dtype=ModelDtype.BFLOAT16)
    assert half.head(half.norm(half.embed(TOKENS))).dtype == torch.bfloat16
    assert half.weights_bytes == 2 * numbers


def test_parts_are_found_in_shards(tmp_path: Path) -> None:
    model = write(tmp_path, tied=False)
    (tmp_path / "model.safetensors").unlink()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    assert_parts_of(load_shared_parts(tmp_path), model)


def test_files_without_the_parts_are_refused(tmp_path: Path) -> None:
    write_model(tmp_path / "phi3", SERVED["phi3"])
    with pytest.raises(ModelError, match="is none of LlamaForCausalLM"):
        load_shared_parts(tmp_path / "phi3")
    write(tmp_path, tied=True)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), "utf-8")
    with pytest.raises(ModelError, match=r"lm_head\.weight"):
        load_shared_parts(tmp_path)
    with pytest.raises(ModelError, match="cannot be read"):
        load_shared_parts(tmp_path / "nowhere")
