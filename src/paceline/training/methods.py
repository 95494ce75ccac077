"""Which learner belongs to which options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import InvalidArgument
from paceline.training.corpus import Corpus, Split
from paceline.training.draft_vocabulary import DraftVocabulary, most_frequent
from paceline.training.learner import Learner
from paceline.training.options import (
    DraftModelOptions,
    Eagle3Options,
    EagleOptions,
    LayerSkipOptions,
    MedusaHead,
    MedusaOptions,
    TrainOptions,
)
from paceline.training.target import TrainingTarget


@dataclass(frozen=True, slots=True)
class Materials:
    """What a learner is made from.

    Attributes:
        target: what it drafts for.
        corpus: the target's answers.
        split: which of them are learnt from.
        progress: told what was chosen.
    """

    target: TrainingTarget
    corpus: Corpus
    split: Split
    progress: Callable[[str], None]

    def vocabulary(self, size: int, *always: int) -> DraftVocabulary:
        """The most frequent tokens of the answers, and those that end them and `always`; for 0 all."""
        target = self.target
        chosen = (*target.eos_token_ids, *always)
        vocabulary = most_frequent(self.corpus, self.split.train, target.vocab_size, size, always=chosen)
        if size:
            self.progress(
                f"the {len(vocabulary)} most frequent of {target.vocab_size} ids make up "
                f"{vocabulary.coverage:.1%} of the answers' tokens"
            )
        return vocabulary

    @property
    def rarest_token(self) -> int:
        """The lowest of the ids that the corpus uses least, as a rule never."""
        return int(torch.bincount(self.corpus.token_ids, minlength=self.target.vocab_size).argmin())


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """A method that can be trained.

    Attributes:
        name: as drafting names it.
        learner: makes the module that learns.
    """

    name: str
    learner: Callable[[Any, Materials], Learner]


def method_of(options: TrainOptions) -> TrainingMethod:
    """The method that options belong to."""
    return _METHODS[type(options)]


def _medusa(options: MedusaOptions, materials: Materials) -> Learner:
    from paceline.training.objectives.medusa import MedusaLearner

    size = 0 if options.head is MedusaHead.SHARED else options.draft_vocab_size
    return MedusaLearner(materials.target, materials.vocabulary(size), options)


def _eagle(options: EagleOptions, materials: Materials) -> Learner:
    from paceline.training.objectives.eagle import EagleLearner

    return EagleLearner(materials.target, materials.vocabulary(options.loss_vocab_size), options)


def _eagle3(options: Eagle3Options, materials: Materials) -> Learner:
    from paceline.training.objectives.eagle3 import Eagle3Learner

    layers = aux_layers(options.aux_layers, materials.target.num_layers)
    return Eagle3Learner(materials.target, materials.vocabulary(options.draft_vocab_size), layers, options)


def _draft_model(options: DraftModelOptions, materials: Materials) -> Learner:
    from paceline.training.objectives.draft_model import DraftModelLearner, kept_layers

    kept = kept_layers(options.keep_layers, materials.target.num_layers)
    other = materials.rarest_token
    vocabulary = materials.vocabulary(options.draft_vocab_size, other)
    return DraftModelLearner(materials.target, vocabulary, other, kept, options)


def _layerskip(options: LayerSkipOptions, materials: Materials) -> Learner:
    from paceline.training.objectives.layerskip import LayerSkipLearner

    num_layers = materials.target.num_layers
    exit_layer = options.exit_layer or max(num_layers // 4, 1)
    if exit_layer >= num_layers:
        raise InvalidArgument(
            f"exit_layer is {exit_layer}: give a number below {num_layers}, the layers of the target",
            field="exit_layer",
        )
    return LayerSkipLearner(materials.target, materials.vocabulary(options.draft_vocab_size), exit_layer, options)


def aux_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """The layers that an option names; when it names none, the third, the middle and the last but two.

    Raises:
        InvalidArgument: it names others than the target has, or not in rising order.
    """
    if not text:
        return tuple(sorted({min(2, num_layers - 1), num_layers // 2, max(num_layers - 3, 0)}))
    parts = [part.strip() for part in text.split(",")]
    layers = tuple(int(part) for part in parts if part.isdecimal())
    if len(layers) != len(parts) or list(layers) != sorted(set(layers)) or layers[-1] > num_layers:
        raise InvalidArgument(
            f"aux_layers is {text!r}: give numbers from 0 to {num_layers} in rising order, such as 2,15,27",
            field="aux_layers",
        )
    return layers


_METHODS: dict[type[TrainOptions], TrainingMethod] = {
    MedusaOptions: TrainingMethod("medusa", _medusa),
    EagleOptions: TrainingMethod("eagle", _eagle),
    DraftModelOptions: TrainingMethod("draft_model", _draft_model),
    LayerSkipOptions: TrainingMethod("layerskip", _layerskip),
    Eagle3Options: TrainingMethod("eagle3", _eagle3),
}
