"""A draft model that knows six of the target's sixteen tokens: what it is fed, and which ids its drafts have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from paceline.drafting.checkpoints.draft_vocabulary import write_draft_vocabulary
from paceline.drafting.draft_id_map import DraftIdMap
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.errors import ModelError
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.quantize import quantize
from tests.fakes.toy_runner import Law, ToyRunner, hash_law
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED, Target, draft, speculate

VOCAB = 16
KNOWN = (1, 3, 4, 9, 12, 15)
OTHER = 2
D2T = torch.tensor(KNOWN) - torch.arange(len(KNOWN))
ID_MAP = DraftIdMap.of(D2T, VOCAB, OTHER)
ORDER = 2


def target_law(seed: int = 5, *, leaves: float = -30.0) -> Law:
    """A law of the last tokens whose likely tokens are known ones; `leaves` is the logit of the others."""
    law = hash_law(VOCAB, seed, order=ORDER)

    def known_only(prefix: tuple[int, ...]) -> torch.Tensor:
        logits = law(prefix)
        unknown = torch.ones(VOCAB, dtype=torch.bool)
        unknown[list(KNOWN)] = False
        return torch.where(unknown, torch.full_like(logits, leaves), logits)

    return known_only


def draft_law(law: Law) -> Law:
    """The same law in the draft model's ids."""
    return lambda prefix: law(tuple(KNOWN[token] for token in prefix))[list(KNOWN)]


def drafter(law: Law) -> tuple[ToyRunner, DraftModelMethod]:
    toy = ToyRunner(draft_law(law), len(KNOWN))
    method = DraftModelMethod(TorchDraftRunner(toy), vocab_limit=VOCAB, id_map=ID_MAP)
    return toy, method


PROMPT = (3, 9, 15, 1)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HOT, SamplingParams(temperature=0.7, min_p=0.05, seed=3)])
def test_a_model_that_says_what_the_target_says_is_always_right(sampling: SamplingParams) -> None:
    law = target_law()
    target = Target(ToyRunner(law, VOCAB))
    outcome = speculate(target, drafter(law)[1], PROMPT, 40, 4, sampling)
    assert outcome.tokens == target.plain(PROMPT, 40, sampling)
    # The last round's drafts are cut short; all others are accepted whole, since target and drafter share the noise.
    assert outcome.accepted == outcome.drafted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, SamplingParams(repetition_penalty=1.3, seed=2)])
def test_tokens_that_it_does_not_know_change_no_output(sampling: SamplingParams) -> None:
    law = target_law(leaves=0.5)
    target = Target(ToyRunner(law, VOCAB))
    outcome = speculate(target, drafter(law)[1], (3, 0, 15, 7), 60, 4, sampling)
    assert outcome.tokens == target.plain((3, 0, 15, 7), 60, sampling)
    assert set(outcome.tokens) - set(KNOWN)
    assert sum(outcome.accepted) > 0


def test_what_it_does_not_know_is_fed_as_one_token() -> None:
    toy, method = drafter(target_law())
    method.open("s")
    draft(method, "s", (3, 0, 15, 7), 1)
    holder = next(iter(method._runner._holders.values()))  # type: ignore[attr-defined]
    assert toy.prefix(holder.kv) == (1, OTHER, 5, OTHER)
    assert method.fed_tokens("s") == (3, 0, 15, 7)


def test_drawn_drafts_come_with_the_targets_ids() -> None:
    _, method = drafter(target_law())
    method.open("s")
    job = DraftJob("s", PROMPT, 4, HOT, rule=AcceptanceRule.RATIO)
    while not job.done:
        method.advance([job])
    assert len(job.draft_probs) == 4
    for token, probs in zip(job.tokens, job.draft_probs, strict=True):
        assert token in probs.token_ids
        assert set(probs.token_ids) <= set(KNOWN)
        assert sum(probs.probs) == pytest.approx(1.0, abs=1e-6)


def test_it_offers_the_targets_vocabulary() -> None:
    assert drafter(target_law())[1].info.vocab_size == VOCAB


class TestFolder:
    def write(self, folder: Path, **config: object) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"vocab_size": len(KNOWN), **config}))
        write_draft_vocabulary(folder, D2T)
        return folder

    def test_is_loaded(self, tmp_path: Path) -> None:
        id_map = DraftIdMap.load(self.write(tmp_path, other_token_id=OTHER), VOCAB)
        assert id_map is not None
        assert id_map.target_ids.tolist() == list(KNOWN)
        assert id_map.draft_ids == ID_MAP.draft_ids

    def test_without_a_map_has_the_targets_ids(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert DraftIdMap.load(tmp_path, VOCAB) is None

    @pytest.mark.parametrize("config", [{}, {"other_token_id": len(KNOWN)}, {"other_token_id": "x"}])
    def test_names_the_token_that_stands_for_the_others(self, tmp_path: Path, config: dict[str, object]) -> None:
        with pytest.raises(ModelError, match="other_token_id"):
            DraftIdMap.load(self.write(tmp_path, **config), VOCAB)

    def test_is_not_quantised(self, tmp_path: Path) -> None:
        folder = self.write(tmp_path / "model", other_token_id=OTHER)
        for name in ("tokenizer.json", "model.safetensors"):
            (folder / name).touch()
        with pytest.raises(ModelError, match="trimmed vocabulary"):
            quantize(str(folder), tmp_path / "out")
