"""GGUF files are converted by a process of its own, as services and the command line do it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file

from paceline.errors import ModelError
from paceline.model_source import CacheSettings, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CacheSettings().folder


HIDDEN, HEADS, KV_HEADS, INNER, LAYERS = 32, 4, 2, 64, 2


def write_gguf(path: Path) -> dict[str, np.ndarray]:
    """A tiny Llama with a byte-level tokenizer; returns its tensors by GGUF name."""
    generator = np.random.default_rng(0)
    alphabet = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]]
    tokens = [*alphabet, "he", "ll", "llo", "<|end|>"]
    writer = GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["h e", "l l", "ll o"])
    writer.add_bos_token_id(len(tokens) - 1)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        shapes |= {
            block + "attn_norm.weight": (HIDDEN,),
            block + "ffn_norm.weight": (HIDDEN,),
            block + "attn_q.weight": (HIDDEN, HIDDEN),
            block + "attn_k.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            block + "attn_v.weight": (HIDDEN * KV_HEADS // HEADS, HIDDEN),
            block + "attn_output.weight": (HIDDEN, HIDDEN),
            block + "ffn_gate.weight": (INNER, HIDDEN),
            block + "ffn_up.weight": (INNER, HIDDEN),
            block + "ffn_down.weight": (HIDDEN, INNER),
        }
    tensors = {name: generator.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def test_a_gguf_file_is_converted_once(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    tensors = write_gguf(path)
    lines: list[str] = []
    folder = resolve(str(path), progress=lines.append)
    assert folder.parent == cache / "models"
    assert folder.name.startswith("tiny-")
    assert any("converting tiny.gguf" in line for line in lines)
    names = {file.name for file in folder.iterdir()}
    assert names >= {"model.safetensors", "config.json", "generation_config.json", "tokenizer.json"}
    converted = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in converted, "the tied head is not stored twice"
    np.testing.assert_array_equal(converted["model.embed_tokens.weight"], tensors["token_embd.weight"])
    np.testing.assert_array_equal(converted["model.layers.1.mlp.down_proj.weight"], tensors["blk.1.ffn_down.weight"])
    again: list[str] = []
    assert resolve(str(path), progress=again.append) == folder
    assert again == []


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"no model")
    with pytest.raises(ModelError, match=r"broken\.gguf cannot be converted"):
        resolve(str(path))
    assert not any(folder.is_dir() for folder in (cache / "models").iterdir())
