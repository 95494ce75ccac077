"""Each trainer raises held-out acceptance on a tiny target, and what it writes is what drafting loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.adapted_model import base_reference
from paceline.checkpoint_files.lora import merge_lora
from paceline.drafting.checkpoints.draft_vocabulary import load_draft_vocabulary
from paceline.drafting.checkpoints.layerskip import load_layerskip
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.engine.loader import load_model, own_logits
from paceline.training.corpus import load_corpus
from paceline.training.options import (
    DraftModelOptions,
    Eagle3Options,
    EagleOptions,
    LayerSkipOptions,
    MedusaOptions,
    TrainOptions,
)
from paceline.training.run import TrainResult, train
from paceline.training.target import TrainingTarget
from tests.integration.training.drafting_check import drafted_acceptance, load_method

HELD_OUT = 0.2
SEQUENCES = 8
DEPTH = 4
STEPS = 80
GAIN = 0.25
"""Tokens per pass that training must add."""

Check = Callable[[Path, TrainingTarget, Path, TrainResult], bool]


@dataclass(frozen=True)
class Case:
    name: str
    options: type[TrainOptions]
    values: dict[str, Any]
    check: Check


def drafts_as_measured(name: str) -> Check:
    """The drafting method reaches what training measured on the same answers, from the files that were written."""

    def check(folder: Path, target: TrainingTarget, answers: Path, result: TrainResult) -> bool:
        corpus = load_corpus(answers)
        held_out = corpus.split(HELD_OUT).held_out[:SEQUENCES]
        reached = drafted_acceptance(load_method(name, folder, target), target, corpus, held_out, DEPTH)
        assert reached.positions == result.best.positions
        # Weights are written in half precision.
        assert reached.tokens_per_pass == pytest.approx(result.best.tokens_per_pass, rel=0.01)
        return True

    return check


def is_a_draft_model(folder: Path, target: TrainingTarget, answers: Path, _result: TrainResult) -> bool:
    """The engine runs it, and its ids are the answers' most frequent tokens."""
    d2t = load_draft_vocabulary(folder, target.vocab_size)
    assert d2t is not None
    ids = torch.arange(len(d2t)) + d2t
    loaded = load_model(folder)
    corpus = load_corpus(answers)
    drafted = own_logits(loaded.model, torch.searchsorted(ids, corpus.tokens(0).long()).tolist())
    # Every answer is greedy or nearly so, and the model has learnt it.
    right = ids[drafted.argmax(dim=-1)][:-1] == corpus.tokens(0)[1:]
    return float(right[int(corpus.prompt_len[0]) :].float().mean()) > 0.8


def is_an_early_exit(folder: Path, target: TrainingTarget, _answers: Path, _result: TrainResult) -> bool:
    """The adapter belongs to the target and finds it, and says where to exit and what to propose."""
    assert base_reference(folder) == str(target.folder.resolve())
    checkpoint = load_layerskip(folder, TargetFacts(target.hidden_size, target.num_layers, target.vocab_size))
    assert checkpoint.adapter is not None
    assert checkpoint.target_ids is not None
    assert len(checkpoint.target_ids) == 60
    before = target.model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    merge_lora(target.model, checkpoint.adapter)
    changed = not torch.equal(before, target.model.state_dict()["model.layers.0.mlp.up_proj.weight"])
    return checkpoint.exit_layer == 1 and changed


CASES = [
    Case("medusa", MedusaOptions, {"draft_vocab_size": 48}, drafts_as_measured("medusa")),
    Case("eagle", EagleOptions, {}, drafts_as_measured("eagle")),
    Case("eagle3", Eagle3Options, {"draft_vocab_size": 48}, drafts_as_measured("eagle3")),
    Case("draft_model", DraftModelOptions, {"draft_vocab_size": 48}, is_a_draft_model),
    Case(
        "layerskip",
        LayerSkipOptions,
        {"draft_vocab_size": 60, "lora_rank": 8, "exit_layer": 1, "rotation": 1, "exit_scale": 1.0},
        is_an_early_exit,
    ),
]


def run(case: Case, target: Path, answers: Path, out: Path, **values: Any) -> TrainResult:
    common: dict[str, Any] = {
        "target": str(target),
        "data": answers,
        "out": out,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "batch_tokens": 512,
        "held_out": HELD_OUT,
        "eval_every": STEPS,
        "cache_dir": out.parent / "features",
        "eval_sequences": SEQUENCES,
        "depth": DEPTH,
        "cpu": True,
    }
    result = train(case.options(**(common | case.values | values)))
    assert result is not None
    return result


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_raises_held_out_acceptance(case: Case, tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    result = run(case, tiny_target, answers, tmp_path / "out")
    assert result.best.tokens_per_pass > result.initial.tokens_per_pass + GAIN
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "provenance.json", "history.json", "loss.png", "acceptance.png"} <= files
    provenance = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert provenance["method"] == case.name
    assert provenance["steps"] == STEPS
    assert provenance["best"]["tokens_per_pass"] == result.best.tokens_per_pass
    assert str(tmp_path) not in json.dumps(provenance)
    assert case.check(tmp_path / "out", TrainingTarget(tiny_target), answers, result)
