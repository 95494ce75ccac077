"""A whole model as trainers write it: small, and with the target's tokenizer in every respect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.cli.drafter_loading import load_drafter
from paceline.drafting.checkpoints.target_facts import read_target_facts
from paceline.text.tokenizer import Tokenizer
from paceline.training.model_folder import write_model
from tests.fakes.tiny_tokenizer import write_byte_level

TEXTS = ("Hello, world!", " the rain in\n\tand on", "größer €5 – 日本 🙂", "<|im_start|>user\n<|im_end|>", "")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose tokenizer is written with much white space, and with letters that are no ASCII."""
    folder = write_byte_level(tmp_path_factory.mktemp("target"))
    content = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=4, ensure_ascii=False), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def written(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "model"
    write_model(folder, LlamaForCausalLM(LlamaConfig(**json.loads((target / "config.json").read_text()))), target)
    return folder


def test_the_tokenizer_is_written_without_white_space(target: Path, written: Path) -> None:
    there, here = (folder / "tokenizer.json" for folder in (target, written))
    assert json.loads(here.read_text(encoding="utf-8")) == json.loads(there.read_text(encoding="utf-8"))
    text = here.read_text(encoding="utf-8")
    assert not any(mark in text for mark in ("\n", '": ', '", ', "\\u"))
    assert here.stat().st_size < 0.5 * there.stat().st_size


def test_it_is_the_same_tokenizer_to_everyone_who_compares(target: Path, written: Path) -> None:
    there, here = Tokenizer.load(target), Tokenizer.load(written)
    assert here.fingerprint == there.fingerprint
    assert here.first_difference(there.vocabulary) is None
    assert (here.eos_token_ids, here.special_tokens) == (there.eos_token_ids, there.special_tokens)
    for text in TEXTS:
        ids = there.encode(text)
        assert here.encode(text) == ids
        assert here.decode(ids) == there.decode(ids)


def test_it_is_a_draft_model_that_can_be_checked(target: Path, written: Path) -> None:
    found = load_drafter(written, read_target_facts(target))
    assert (found.layout.value, found.method) == ("causal-lm", "draft_model")
    assert found.sizes == "2 layers of 16, 300 ids"
