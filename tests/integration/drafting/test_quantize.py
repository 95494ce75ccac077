from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import quantize as quantize_module
from paceline.errors import ConfigurationError, ModelError
from paceline.quantize import Bits, Provenance, builder_options, quantize, quantized_dir, read_provenance
from paceline.text.tokenizer import Tokenizer
from tests.integration.drafting.conftest import write_tiny_llama


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def no_builder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> None:
        raise AssertionError("the builder must not run")

    monkeypatch.setattr(quantize_module, "_run_builder", refuse)


def test_a_copy_is_complete_and_says_where_it_comes_from(tiny_llama_dir: Path, tiny_onnx_dir: Path) -> None:
    assert {"genai_config.json", "model.onnx", "tokenizer.json", "config.json"} <= set(os.listdir(tiny_onnx_dir))
    assert Tokenizer.load(tiny_onnx_dir).fingerprint == Tokenizer.load(tiny_llama_dir).fingerprint
    provenance = read_provenance(tiny_onnx_dir)
    assert provenance is not None
    assert provenance.source_dir == str(tiny_llama_dir.resolve())
    assert provenance.bits == "int8"
    assert provenance.options == builder_options(Bits.INT8)
    assert any(text.startswith("onnxruntime-genai==") for text in provenance.versions)
    assert provenance.seconds > 0
    assert provenance.weights_bytes == sum(file.stat().st_size for file in tiny_onnx_dir.glob("*.onnx*"))


def test_nothing_is_left_beside_a_copy(tiny_onnx_dir: Path) -> None:
    beside = [name for name in os.listdir(tiny_onnx_dir.parent) if name != tiny_onnx_dir.name]
    assert [name for name in beside if not name.endswith(".lock")] == []


@pytest.mark.usefixtures("no_builder")
def test_a_second_call_finds_the_first_one_s_copy(tiny_llama_dir: Path, tiny_onnx_dir: Path) -> None:
    lines: list[str] = []
    assert quantize(str(tiny_llama_dir), tiny_onnx_dir, progress=lines.append) == tiny_onnx_dir
    assert lines == []


def test_the_cache_s_folder_follows_the_weights_and_the_width(tiny_llama_dir: Path, cache: Path) -> None:
    int8 = quantized_dir(tiny_llama_dir)
    assert int8 == quantized_dir(tiny_llama_dir, Bits.INT8)
    assert int8.parent == cache / "paceline" / "models"
    assert "int8" in int8.name
    assert quantized_dir(tiny_llama_dir, Bits.INT4) != int8
    other = write_tiny_llama(cache / "other" / tiny_llama_dir.name, seed=1)
    assert quantized_dir(other) != int8
    before = quantized_dir(other)
    os.utime(other / "model.safetensors", ns=(1, 1))
    assert quantized_dir(other) != before


def test_int4_goes_into_the_cache(tiny_llama_dir: Path, cache: Path) -> None:
    lines: list[str] = []
    folder = quantize(str(tiny_llama_dir), bits=Bits.INT4, progress=lines.append)
    assert folder == quantized_dir(tiny_llama_dir, Bits.INT4)
    provenance = read_provenance(folder)
    assert provenance is not None
    assert "algo_config=k_quant_mixed" in provenance.options
    assert len(lines) == 2
    assert "int4" in lines[0]


@pytest.mark.usefixtures("no_builder")
def test_a_folder_with_something_else_is_left_alone(tiny_llama_dir: Path, tiny_onnx_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="remove it or name another folder"):
        quantize(str(tiny_llama_dir), tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(ConfigurationError, match="not the int4 copy"):
        quantize(str(tiny_llama_dir), tiny_onnx_dir, Bits.INT4)


def test_a_model_that_the_builder_does_not_know_is_refused_with_its_words(tiny_llama_dir: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_llama_dir, source)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "architectures": ["NobodysForCausalLM"]}))
    with pytest.raises(ModelError, match=r"cannot be quantised(.|\n)*NotImplementedError"):
        quantize(str(source), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert [name for name in os.listdir(tmp_path) if not name.endswith(".lock")] == ["source"]


def test_missing_packages_are_named_with_the_remedy(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantize_module, "_REQUIRED_PACKAGES", ("torch", "no-such-package"))
    with pytest.raises(ConfigurationError, match=r"needs no-such-package: run `pip install 'paceline\[engine,onnx\]'`"):
        quantize(str(tiny_llama_dir), tmp_path / "out")


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"source": 1}'])
def test_a_broken_note_is_no_provenance(content: str, tmp_path: Path) -> None:
    (tmp_path / "paceline_quantized.json").write_text(content)
    assert read_provenance(tmp_path) is None
    assert read_provenance(tmp_path / "missing") is None


def test_provenance_survives_json(tiny_onnx_dir: Path) -> None:
    assert isinstance(read_provenance(tiny_onnx_dir), Provenance)


def test_the_module_imports_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import paceline.quantize"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
