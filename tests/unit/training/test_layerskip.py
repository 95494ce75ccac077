"""What training measures for layerskip: drafts as drafting makes them, of the ids that it may propose."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.drafting.checkpoints.draft_vocabulary import load_exit_vocabulary
from paceline.training.batches import Batch
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.learner import Progress
from paceline.training.objectives.layerskip import LayerSkipLearner
from paceline.training.options import LayerSkipOptions
from paceline.training.target import TrainingTarget
from tests.fakes.tiny_models import VOCAB_SIZE

EXIT_LAYER, LENGTH, PROMPT = 2, 30, 4
SOME_IDS = torch.arange(0, VOCAB_SIZE, 2)
ALL_IDS = torch.arange(VOCAB_SIZE)


@pytest.fixture
def batch() -> Batch:
    tokens = torch.randint(VOCAB_SIZE, (2, LENGTH), generator=torch.Generator().manual_seed(4))
    return Batch(tokens, torch.tensor([LENGTH, LENGTH - 7]), torch.tensor([PROMPT, PROMPT + 2]))


def learner_of(folder: Path, ids: torch.Tensor, rank: int = 0) -> LayerSkipLearner:
    target = TrainingTarget(folder)
    # Layers that say little, so that the early exit is often right.
    for name, weight in target.model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.data *= 0.1
    vocabulary = DraftVocabulary(ids, VOCAB_SIZE, 1.0)
    return LayerSkipLearner(
        target, vocabulary, EXIT_LAYER, LayerSkipOptions(max_steps=1, depth=2, lora_rank=rank)
    ).eval()


@torch.no_grad()
def test_a_draft_is_right_if_the_best_of_its_ids_is_the_whole_model_s_token(tiny_llama: Path, batch: Batch) -> None:
    found = {}
    for ids in (SOME_IDS, ALL_IDS):
        learner = learner_of(tiny_llama, ids)
        model = cast("LlamaForCausalLM", learner.model)
        states = model(input_ids=batch.tokens, output_hidden_states=True).hidden_states
        drafts = ids[model.lm_head(model.model.norm(states[EXIT_LAYER]))[..., ids].argmax(-1)]
        right = drafts == model.lm_head(states[-1]).argmax(-1)
        matches = learner.matches(batch)
        chains = batch.anchors(2)
        for index in range(2):
            assert torch.equal(matches[..., index][chains], right.roll(-1 - index, dims=1)[chains])
        found[len(ids)] = int(right[chains].sum())
    assert 0 < found[len(SOME_IDS)] < found[VOCAB_SIZE]


@torch.no_grad()
def test_the_loss_is_over_all_ids(tiny_llama: Path, batch: Batch) -> None:
    some, every = (learner_of(tiny_llama, ids)(batch, Progress(1, 0.5)) for ids in (SOME_IDS, ALL_IDS))
    assert some.total == every.total


@pytest.mark.parametrize("rank", [0, 4], ids=["whole", "adapter"])
def test_its_ids_are_written_beside_it(rank: int, tiny_llama: Path, tmp_path: Path) -> None:
    learner_of(tiny_llama, SOME_IDS, rank).write(tmp_path, "base")
    written = load_exit_vocabulary(tmp_path, VOCAB_SIZE)
    assert written is not None
    assert torch.equal(written, SOME_IDS)
    learner_of(tiny_llama, ALL_IDS, rank).write(tmp_path, "base")
    assert load_exit_vocabulary(tmp_path, VOCAB_SIZE) is None
