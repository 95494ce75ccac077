"""Every drafting method on a tiny target, in both placements and all shapes: a small `make verify-lossless`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench.lossless import Lossless
from bench.method_cases import Batch, MethodReport, Where, cases, placements, shapes
from bench.method_engines import MethodEngines
from bench.methods import Methods
from paceline.benchmark.prompts import Prompt
from paceline.method_names import HEAD_METHODS, METHOD_NAMES
from tests.fakes.tiny_models import SERVED, Architecture, write_model

NUM_LAYERS = 6
# Wider than there are rows to fit a head to, so that heads know all of them.
SIZES = {"num_hidden_layers": NUM_LAYERS, "hidden_size": 192}
TARGET = Architecture(SERVED["llama"].config_class, SERVED["llama"].arguments | SIZES)
TOKENS = 16
BATCHES = (Batch(1, 1, TOKENS), Batch(4, 4, TOKENS))
PROMPTS = tuple([Prompt(f"prompt {n}", "chat", f"{'na' * n} banana bananas", TOKENS) for n in range(4)])
METHODS = [name for name in METHOD_NAMES if name != "ngram"]
"""A random target does not repeat itself, so n-grams find nothing there."""


@dataclass(frozen=True)
class Proof:
    methods: Methods
    heads: dict[str, Path]


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = write_model(tmp_path_factory.mktemp("target"), TARGET)
    engines = MethodEngines(folder, draft_model=str(folder), kv_bytes=1 << 21, max_model_len=128)
    methods = Methods(Lossless(str(folder), max_tokens=TOKENS), PROMPTS, engines)
    yield Proof(methods, methods.heads(METHOD_NAMES, tmp_path_factory.mktemp("heads")))
    torch.set_num_threads(threads)


@pytest.mark.parametrize("method", METHODS)
def test_no_placement_shape_or_batch_changes_an_id(proof: Proof, method: str) -> None:
    reports = [
        proof.methods.check(case, proof.heads.get(method))
        for case in cases([method], NUM_LAYERS, heads=proof.heads, batches=BATCHES)
    ]
    assert proof.methods.lossless.tally.passed, proof.methods.lossless.tally
    assert len(reports) == 4 * len(placements(method)) * len(shapes(method, NUM_LAYERS, trained=False))
    assert all(report.ids_equal and report.num_tokens > 0 for report in reports)
    assert [line for report in reports for line in report.complaints] == []


def test_heads_made_on_the_spot_know_the_texts_that_they_were_fitted_to(proof: Proof) -> None:
    assert set(proof.heads) == set(HEAD_METHODS)
    (case, *_) = cases(["medusa"], NUM_LAYERS, heads=proof.heads, batches=BATCHES[1:])
    assert case.where is Where.POOL
    report = proof.methods.check(case, proof.heads["medusa"])
    assert report.accepted > 0.5 * report.drafted


def test_drafts_none_of_which_is_accepted_are_complained_about() -> None:
    report = MethodReport("eagle", "pool", "chain of 4", "greedy", 1, 1, 24, True, 92, 0, 1.0, ())
    assert report.complaints == ["eagle in the pool, chain of 4, greedy, 1 at once: none of 92 drafts was accepted"]
