from __future__ import annotations

from pathlib import Path

import pytest

from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.ngram import NgramMethod
from paceline.drafting.onnx_runner import OnnxDraftRunner
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.runner_options import Quantization
from paceline.errors import ConfigurationError, NotFound
from paceline.quantize import quantized_dir
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import BYTE_LEVEL_VOCAB_SIZE
from tests.unit.drafting.rounds import draft


def test_ngram_needs_no_model() -> None:
    method = build_method(MethodSettings(methods=("ngram",), prompt_lookup_min=1, prompt_lookup_max=2))
    assert isinstance(method, NgramMethod)
    method.open("s")
    assert draft(method, "s", (1, 2, 1), 1).tokens == [2]


def test_a_folder_of_safetensors_runs_on_torch(tiny_llama_dir: Path) -> None:
    method = build_method(MethodSettings(draft_model=str(tiny_llama_dir), kv_bytes=4 << 20, max_model_len=50))
    assert isinstance(method, DraftModelMethod)
    assert isinstance(method._runner, TorchDraftRunner)
    info = method.info
    assert (info.name, info.vocab_size, info.max_model_len) == ("draft_model", BYTE_LEVEL_VOCAB_SIZE, 50)
    assert info.tokenizer_hash == Tokenizer.load(tiny_llama_dir).fingerprint
    method.open("s")
    assert len(draft(method, "s", (1, 2, 3), 4).tokens) == 4
    method.close("s")


def test_a_folder_with_an_onnx_model_runs_on_onnx(tiny_llama_dir: Path, tiny_onnx_dir: Path) -> None:
    method = build_method(MethodSettings(draft_model=str(tiny_onnx_dir), max_sessions=2, max_model_len=50))
    assert isinstance(method, DraftModelMethod)
    assert isinstance(method._runner, OnnxDraftRunner)
    info = method.info
    assert (info.vocab_size, info.max_model_len, info.max_sessions) == (BYTE_LEVEL_VOCAB_SIZE, 50, 2)
    assert info.tokenizer_hash == Tokenizer.load(tiny_llama_dir).fingerprint  # so it fits its own source
    method.open("s")
    assert len(draft(method, "s", (1, 2, 3), 4).tokens) == 4


def test_onnx_quantises_a_model_that_is_not_yet(
    tiny_llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines: list[str] = []
    settings = MethodSettings(draft_model=str(tiny_llama_dir), runner=RunnerKind.ONNX, max_sessions=1)
    method = build_method(settings, lines.append)
    assert isinstance(method, DraftModelMethod)
    assert isinstance(method._runner, OnnxDraftRunner)
    assert quantized_dir(tiny_llama_dir).is_dir()
    assert lines
    lines.clear()
    build_method(settings, lines.append)
    assert lines == []


def test_the_general_runner_can_be_asked_for(tiny_llama_dir: Path) -> None:
    method = build_method(
        MethodSettings(draft_model=str(tiny_llama_dir), runner=RunnerKind.TRANSFORMERS, kv_bytes=4 << 20)
    )
    assert isinstance(method, DraftModelMethod)
    assert isinstance(method._runner, TorchDraftRunner)
    assert method._runner._runner.info.runner == "transformers"


def test_weights_of_onnx_models_are_quantised_by_another_setting(tiny_llama_dir: Path, tiny_onnx_dir: Path) -> None:
    for folder, runner in ((tiny_onnx_dir, RunnerKind.AUTO), (tiny_llama_dir, RunnerKind.ONNX)):
        settings = MethodSettings(draft_model=str(folder), runner=runner, quantization=Quantization.INT8)
        with pytest.raises(ConfigurationError, match="quantize_bits") as caught:
            build_method(settings)
        assert caught.value.field == "quantization"


def test_several_names_make_a_chain(tiny_onnx_dir: Path) -> None:
    method = build_method(MethodSettings(methods=("ngram", "draft_model"), draft_model=str(tiny_onnx_dir)))
    assert isinstance(method, FallbackMethod)
    method.open("s")
    assert draft(method, "s", (1, 2, 3, 9, 1, 2, 3), 2).method == "ngram"
    assert draft(method, "s", (1, 2, 3, 4), 2).method == "draft_model"


@pytest.mark.parametrize("methods", [(), ("nonsense",), ("ngram", "nonsense")])
def test_unknown_methods_are_named(methods: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError, match="draft_model, ngram") as caught:
        build_method(MethodSettings(methods=methods))
    assert caught.value.field == "methods"


def test_a_missing_model_is_named() -> None:
    with pytest.raises(ConfigurationError, match="set draft_model to") as caught:
        build_method(MethodSettings())
    assert caught.value.field == "draft_model"
    with pytest.raises(NotFound, match="/no/such/folder"):
        build_method(MethodSettings(draft_model="/no/such/folder"))


def test_torch_cannot_run_an_onnx_folder(tiny_onnx_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="set runner to onnx or auto"):
        build_method(MethodSettings(draft_model=str(tiny_onnx_dir), runner=RunnerKind.TORCH))
