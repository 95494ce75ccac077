"""EAGLE-3: the next token from the states of three layers, learnt on the head's own drafts (arXiv 2503.01840).

Row t is made of the residual streams entering a low, a middle and a high layer of the target at t, and of token t + 1;
its logits, over a small vocabulary, are those of token t + 2. Training unrolls a chain of drafts at every position
(training-time test): row i is made of the head's own state of row i - 1 and of the true token t + 1 + i. Loss: cross
entropy against what the target says, as far as it speaks of tokens of the draft vocabulary, weighted by `decay` to the
power i. No state is compared with the target's.

Positions whose answer token is not in the draft vocabulary are left out. (As published, those whose best token by the
target is not: the same where answers are greedy, and it would take a product with the target's whole head.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from paceline.drafting.checkpoints.eagle import EagleCheckpoint
from paceline.drafting.checkpoints.writing import write_eagle3
from paceline.training.acceptance import chain_matches
from paceline.training.batches import Batch, shift
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.eagle_checkpoint import checkpoint_config, stored_weights
from paceline.training.head_layer import SMALL, ChainRows, HeadLayer, begin_as, head_config, norm_weights
from paceline.training.learner import Learner, Loss, Progress
from paceline.training.losses import mean_soft_cross_entropy
from paceline.training.options import Eagle3Options, FeatureNorm, HeadBeginning
from paceline.training.target import FINAL, TrainingTarget


class Eagle3Layer(HeadLayer):
    """A layer whose attention sees the normed embedding and the normed state side by side."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, 2 * config.hidden_size)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)


class Eagle3Learner(Learner):
    """An EAGLE-3 head that learns.

    Args:
        target: gives the embedding, frozen, and what head and final norm begin with.
        vocabulary: what the head can propose.
        aux_layers: whose entering residual streams it sees, lowest first.
        options: of the head and its loss.
    """

    embedding: torch.Tensor
    target_head: torch.Tensor
    token_ids: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(
        self,
        target: TrainingTarget,
        vocabulary: DraftVocabulary,
        aux_layers: tuple[int, ...],
        options: Eagle3Options,
    ) -> None:
        super().__init__()
        self.depth = options.depth
        self.layers = (*aux_layers, FINAL)
        self.vocabulary = vocabulary
        self._aux_layers = aux_layers
        self._options = options
        self._architecture = type(target.model).__name__
        self.config = head_config(target)
        hidden, epsilon = target.hidden_size, self.config.rms_norm_eps
        self.rotary = LlamaRotaryEmbedding(self.config)
        self.input_norm = None
        self._stream_norms: list[LlamaRMSNorm] = []
        if options.feature_norm is FeatureNorm.JOINED:
            self.input_norm = LlamaRMSNorm(hidden * len(aux_layers), epsilon)
        elif options.feature_norm is FeatureNorm.EACH:
            self._stream_norms = [LlamaRMSNorm(hidden, epsilon) for _ in aux_layers]
            self.fc_norm = nn.ModuleList(self._stream_norms)
        self.fc = nn.Linear(hidden * len(aux_layers), hidden, bias=False)
        self.layer = Eagle3Layer(self.config)
        self.norm = LlamaRMSNorm(hidden, epsilon)
        self.lm_head = nn.Linear(hidden, len(vocabulary), bias=False)
        if options.beginning is HeadBeginning.TARGET:
            self._begin_as_target(target)
        beginning = target.head[vocabulary.token_ids.to(target.head.device)].float().cpu()
        with torch.no_grad():
            self.lm_head.weight.copy_(beginning)
        self.register_buffer("embedding", target.embedding.float(), persistent=False)
        self.register_buffer("target_head", beginning, persistent=False)
        self.register_buffer("token_ids", vocabulary.token_ids, persistent=False)
        self.register_buffer("draft_ids", vocabulary.draft_ids(), persistent=False)

    def unroll(self, batch: Batch, rows: int) -> Iterator[torch.Tensor]:
        """What each row of every chain has before the head's own `lm_head` # [batch, length, hidden_size]."""
        chain = ChainRows(self.rotary, batch.tokens, rows)
        features = self._fused(batch.features[:-1])
        for row in range(rows):
            embedded = self.layer.input_layernorm(self.embedding[batch.shifted_tokens(1 + row)])
            normed = self.layer.hidden_norm(features)
            residual = normed if self._options.norm_before_residual else features
            state = self.layer(torch.cat([embedded, normed], dim=-1), residual, chain)
            output = self.norm(state)
            yield output
            features = output if self._options.norm_output else state

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Cross entropy of each row, weighted."""
        final = batch.features[-1]
        total = final.new_zeros(())
        # Each of the target's states is compared with by several rows: what it says is computed once.
        asked = batch.answer_states
        number = (asked.flatten().cumsum(0) - 1).view(asked.shape)
        with torch.no_grad():
            said = functional.linear(final[asked], self.target_head)
        parts = []
        for row, output in enumerate(self.unroll(batch, self._options.unroll)):
            learnt = batch.anchors(row + 1) & (self.draft_ids[batch.shifted_tokens(2 + row)] >= 0)
            wanted = said[shift(number, 1 + row)[learnt]]
            loss = mean_soft_cross_entropy(self.lm_head(output[learnt]), wanted)
            total = total + self._options.decay**row * loss
            parts.append((f"draft {row}", loss.item()))
        return Loss(total, tuple(parts))

    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether each draft of a chain on the head's own states is right."""
        outputs = self.unroll(batch, self.depth)

        def draft(_: int, anchors: torch.Tensor) -> torch.Tensor:
            return self.token_ids[self.lm_head(next(outputs)[anchors]).argmax(dim=-1)]

        return chain_matches(batch, self.depth, draft)

    def write(self, folder: Path, target_name: str) -> None:
        """Writes the layout of `speculators`; the embedding is the target's and not stored."""
        options = self._options
        config = checkpoint_config(
            self.config,
            "eagle3",
            target_hidden_size=self.config.hidden_size,
            draft_vocab_size=len(self.vocabulary),
            aux_layers=self._aux_layers,
            norm_before_residual=options.norm_before_residual,
            norm_before_fc=options.feature_norm is FeatureNorm.JOINED,
            fc_norm=options.feature_norm is FeatureNorm.EACH,
            norm_output=options.norm_output,
        )
        trimmed = not self.vocabulary.is_full
        checkpoint = EagleCheckpoint(
            config,
            stored_weights(self),
            "",
            d2t=self.vocabulary.d2t if trimmed else None,
            t2d=self.vocabulary.t2d if trimmed else None,
        )
        write_eagle3(folder, checkpoint, verifier=target_name, architecture=self._architecture)

    @torch.no_grad()
    def _begin_as_target(self, target: TrainingTarget) -> None:
        """Lets the head continue the high layer's residual stream as the target's last layer and norm would."""
        hidden, last = target.hidden_size, target.layers[-1]
        self.norm.weight.copy_(norm_weights(target.final_norm, hidden))
        self.fc.weight.mul_(SMALL)
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        if not begin_as(self.layer, last):
            return
        before_attention = getattr(last, "input_layernorm", None)
        if isinstance(before_attention, nn.Module):
            self.layer.hidden_norm.weight.copy_(norm_weights(before_attention, hidden))
        # About the size that residual streams have at the end of a model; the lower ones count less at first.
        for place, norm in enumerate(reversed(self._stream_norms)):
            norm.weight.fill_(hidden**0.5 / 4.0**place)

    def _fused(self, streams: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if self._stream_norms:
            streams = tuple(norm(rows) for norm, rows in zip(self._stream_norms, streams, strict=True))
        joined = torch.cat(streams, dim=-1)
        fused: torch.Tensor = self.fc(joined if self.input_norm is None else self.input_norm(joined))
        return fused
