"""Hidden states are the target's own, computed once, kept on disk as far as there is room."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.training.corpus import Corpus, load_corpus
from paceline.training.features import FeatureStore
from paceline.training.target import FINAL, TrainingTarget

_LAYERS = (0, 2, 3, FINAL)
_ROOM = 1 << 30


@pytest.fixture(scope="module")
def target(tiny_target: Path) -> TrainingTarget:
    return TrainingTarget(tiny_target)


@pytest.fixture(scope="module")
def corpus(answers: Path) -> Corpus:
    return load_corpus(answers)


def store(folder: Path, corpus: Corpus, target: TrainingTarget, max_bytes: int = _ROOM) -> FeatureStore:
    return FeatureStore(folder, corpus, target, _LAYERS, max_bytes=max_bytes, max_len=30)


def test_states_are_those_of_transformers(tmp_path: Path, corpus: Corpus, target: TrainingTarget) -> None:
    rows = store(tmp_path, corpus, target).read((5, 1))
    for place, index in enumerate((5, 1)):
        tokens = corpus.tokens(index)[:30]
        output = target.model(input_ids=tokens[None].long(), output_hidden_states=True, use_cache=False)
        # transformers has the embedding first and the output of the final norm last, in place of what enters it.
        wanted = [output.hidden_states[layer][0] for layer in (0, 2)]
        for plane, states in zip((rows[0], rows[1]), wanted, strict=True):
            torch.testing.assert_close(plane[place, : len(tokens)], states, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(rows[3][place, : len(tokens)], output.hidden_states[-1][0], rtol=1e-3, atol=1e-3)
        normed = target.final_norm(rows[2][place, : len(tokens)])
        torch.testing.assert_close(normed, output.hidden_states[-1][0], rtol=2e-2, atol=2e-2)
        assert not rows[0][place, len(tokens) :].any()


def test_each_is_computed_once(tmp_path: Path, corpus: Corpus, target: TrainingTarget) -> None:
    first = store(tmp_path, corpus, target)
    rows = first.read((0, 3))
    assert first.num_computed == corpus.length(0) + corpus.length(3)
    again = store(tmp_path, corpus, target)
    both = again.read((3, 0))
    assert again.num_computed == 0
    for plane, same in zip(rows, both, strict=True):
        assert torch.equal(plane[0], same[1])
    again.read((0, 4))
    assert again.num_computed == corpus.length(4)


def test_what_does_not_fit_is_computed_each_time(tmp_path: Path, corpus: Corpus, target: TrainingTarget) -> None:
    row_bytes = 2 * target.hidden_size * len(_LAYERS)
    room = int(corpus.offsets[2]) * row_bytes
    small = store(tmp_path, corpus, target, room)
    rows = small.read((1, 2))
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.rows")) <= room
    before = small.num_computed
    again = small.read((1, 2))
    assert small.num_computed == before + corpus.length(2)
    for plane, same in zip(rows, again, strict=True):
        assert torch.equal(plane, same)
    nothing = store(tmp_path / "none", corpus, target, 0)
    for plane, same in zip(rows, nothing.read((1, 2)), strict=True):
        assert torch.equal(plane, same)
