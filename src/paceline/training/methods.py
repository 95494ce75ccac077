"""Which learner belongs to which options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.training.corpus import Corpus, Split
from paceline.training.draft_vocabulary import most_frequent
from paceline.training.learner import Learner
from paceline.training.options import MedusaHead, MedusaOptions, TrainOptions
from paceline.training.target import TrainingTarget

MakeLearner = Callable[[Any, TrainingTarget, Corpus, Split], Learner]


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """A method that can be trained.

    Attributes:
        name: as drafting names it.
        learner: makes the module that learns, from options, target, corpus and split.
    """

    name: str
    learner: MakeLearner


def method_of(options: TrainOptions) -> TrainingMethod:
    """The method that options belong to."""
    return _METHODS[type(options)]


def _medusa(options: MedusaOptions, target: TrainingTarget, corpus: Corpus, split: Split) -> Learner:
    from paceline.training.objectives.medusa import MedusaLearner

    size = 0 if options.head is MedusaHead.SHARED else options.draft_vocab_size
    vocabulary = most_frequent(corpus, split.train, target.vocab_size, size, always=target.eos_token_ids)
    return MedusaLearner(target, vocabulary, options)


_METHODS: dict[type[TrainOptions], TrainingMethod] = {MedusaOptions: TrainingMethod("medusa", _medusa)}
