"""EAGLE-1: the target's next hidden state from this one and the token after it (arXiv 2401.15077).

Row t is made of f_t, the target's state after the final norm, and token t + 1. What comes out stands for f_{t+1}: the
target's own head makes of it the logits of token t + 2. Loss: smooth L1 between both states, and a tenth of the cross
entropy between what the head says of both. Features get a little noise, since drafts feed the head its own states.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.drafting.checkpoints.eagle import EagleCheckpoint
from paceline.drafting.checkpoints.writing import write_eagle
from paceline.training.acceptance import chain_matches
from paceline.training.batches import Batch, shift
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.eagle_checkpoint import checkpoint_config, stored_weights
from paceline.training.head_layer import ChainRows, HeadLayer, head_config
from paceline.training.learner import Learner, Loss, Progress
from paceline.training.losses import mean_soft_cross_entropy
from paceline.training.options import EagleOptions
from paceline.training.target import FINAL, TrainingTarget

_NOISE_LENGTH = 512
"""Noise is for sequences of this length and less for longer ones, as published."""


class EagleLearner(Learner):
    """An EAGLE-1 head that learns.

    Args:
        target: gives embedding and head, frozen.
        vocabulary: the tokens that the cross entropy looks at; drafts are from the whole vocabulary.
        options: of the head and its loss.
    """

    layers = (FINAL,)
    embedding: torch.Tensor
    target_head: torch.Tensor
    loss_head: torch.Tensor

    def __init__(self, target: TrainingTarget, vocabulary: DraftVocabulary, options: EagleOptions) -> None:
        super().__init__()
        self.depth = options.depth
        self._options = options
        self._target = target
        self.config = head_config(target)
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.fc = nn.Linear(2 * target.hidden_size, target.hidden_size, bias=options.fc_bias)
        self.layer = HeadLayer(self.config, target.hidden_size)
        self.register_buffer("embedding", target.embedding.float(), persistent=False)
        self.register_buffer("target_head", target.head.float(), persistent=False)
        self.register_buffer("loss_head", self.target_head[vocabulary.token_ids], persistent=False)

    def unroll(self, batch: Batch, features: torch.Tensor, rows: int) -> Iterator[torch.Tensor]:
        """States of each row of every chain # [batch, length, hidden_size]."""
        chain = ChainRows(self.rotary, batch.tokens, rows)
        for row in range(rows):
            embedded = self.embedding[batch.shifted_tokens(1 + row)]
            joined = self.fc(torch.cat([embedded, features], dim=-1))
            features = self.layer(joined, joined, chain)
            yield features

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Smooth L1 and a share of cross entropy."""
        true = batch.features[0]
        spread = self._options.noise * _NOISE_LENGTH / max(true.shape[1], _NOISE_LENGTH)
        noise = (torch.rand_like(true) * 2 - 1) * spread
        state = next(self.unroll(batch, true + noise, 1))
        learnt = batch.anchors(1)
        made, wanted = state[learnt], shift(true, 1)[learnt]
        regression = functional.smooth_l1_loss(made, wanted, reduction="sum") / max(made.numel(), 1)
        with torch.no_grad():
            wanted_logits = functional.linear(wanted, self.loss_head)
        classification = mean_soft_cross_entropy(functional.linear(made, self.loss_head), wanted_logits)
        total = regression + self._options.token_weight * classification
        return Loss(total, (("smooth L1", regression.item()), ("cross entropy", classification.item())))

    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether each draft of a chain on the head's own states is right."""
        states = self.unroll(batch, batch.features[0], self.depth)
        return chain_matches(
            batch,
            self.depth,
            lambda _, anchors: functional.linear(next(states)[anchors], self.target_head).argmax(dim=-1),
        )

    def write(self, folder: Path, target_name: str) -> None:
        """Writes SafeAILab's layout; embedding and head are the target's and not stored."""
        config = checkpoint_config(
            self.config, "eagle", target_hidden_size=self._target.hidden_size, fc_bias=self.fc.bias is not None
        )
        write_eagle(folder, EagleCheckpoint(config, stored_weights(self), ""))
