"""How many of a method's drafts would be accepted along given answers, counted draft by draft as in service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from paceline.drafting.checkpoints.eagle import load_eagle
from paceline.drafting.checkpoints.medusa import load_medusa
from paceline.drafting.checkpoints.target_facts import TargetFacts
from paceline.drafting.eagle import EagleMethod
from paceline.drafting.medusa import MedusaMethod
from paceline.drafting.method import DraftJob, DraftMethod
from paceline.drafting.tree_shape import TreeShape
from paceline.engine.shared_parts import SharedParts, load_shared_parts
from paceline.messages import SamplingParams
from paceline.training.acceptance import Acceptance, acceptance_of
from paceline.training.corpus import Corpus
from paceline.training.target import FINAL, TrainingTarget

GREEDY = SamplingParams(temperature=0.0)


def load_method(name: str, folder: Path, target: TrainingTarget) -> DraftMethod:
    """The method that drafts with a written checkpoint."""
    parts: SharedParts = load_shared_parts(target.folder)
    facts = TargetFacts(target.hidden_size, target.num_layers, target.vocab_size)
    if name == "medusa":
        checkpoint = load_medusa(folder, facts)
        return MedusaMethod(checkpoint, parts, tree=TreeShape.chain(checkpoint.config.num_heads))
    return EagleMethod(load_eagle(folder, facts), parts, kv_bytes=1 << 20)


@dataclass(frozen=True)
class Rows:
    """Features of tokens [0, num_rows)."""

    rows: torch.Tensor

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    @property
    def first_row(self) -> int:
        return 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.rows[start:stop]


def drafted_acceptance(
    method: DraftMethod, target: TrainingTarget, corpus: Corpus, indices: Sequence[int], depth: int
) -> Acceptance:
    """Acceptance of chains of `depth` drafts begun after each token of the answers."""
    counts = torch.zeros(1 + depth, dtype=torch.int64)
    for index in indices:
        tokens = corpus.tokens(index).tolist()
        features = _features(method, target, tokens)
        method.open("session")
        for known in range(int(corpus.prompt_len[index]) + 1, len(tokens) - depth + 1):
            job = DraftJob("session", tokens[:known], depth, GREEDY, features=Rows(features[: known - 1]))
            while not job.done:
                method.advance([job])
            right = [drafted == true for drafted, true in zip(job.tokens, tokens[known:], strict=False)]
            accepted = next((place for place, good in enumerate(right) if not good), len(right))
            counts[: 1 + accepted] += 1
        method.close("session")
    return acceptance_of(counts)


def _features(method: DraftMethod, target: TrainingTarget, tokens: list[int]) -> torch.Tensor:
    taps = method.info.taps
    assert taps is not None
    states = target.hidden_states(torch.tensor([tokens]), taps.layers or (FINAL,))
    joined = torch.cat([state[0] for state in states], dim=-1)
    return joined if taps.project is None else taps.project(joined)
