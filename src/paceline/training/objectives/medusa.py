"""Medusa heads: from one hidden state of the target, the tokens two, three, ... places on (arXiv 2401.10774).

Head k reads x, the target's state after the final norm at the last token fed, makes x + SiLU(A_k x + b_k) of it (once
per residual layer; A_k and b_k begin at zero, so it begins as the identity) and multiplies by a head. Its label is the
token k + 2 places on, its weight in the loss `decay` to the power k. The target is frozen.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from paceline.drafting.checkpoints.medusa import MedusaCheckpoint, MedusaConfig
from paceline.drafting.checkpoints.writing import write_medusa
from paceline.training.acceptance import chain_matches
from paceline.training.batches import Batch
from paceline.training.draft_vocabulary import DraftVocabulary
from paceline.training.learner import Learner, Loss, Progress, stored
from paceline.training.losses import mean_cross_entropy
from paceline.training.options import MedusaHead, MedusaOptions
from paceline.training.target import FINAL, TrainingTarget

TOP_RANKS = 10
"""Ranks whose accuracy is measured, for trees of candidates."""


class ResidualBlock(nn.Module):
    """x + SiLU(A x + b), once per layer; begins as the identity."""

    def __init__(self, hidden_size: int, layers: int) -> None:
        super().__init__()
        self.linears = [nn.Linear(hidden_size, hidden_size) for _ in range(layers)]
        self.layers = nn.ModuleList(self.linears)
        for linear in self.linears:
            nn.init.zeros_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:  # [rows, hidden_size] -> same
        """Applies all layers."""
        for linear in self.linears:
            rows = rows + functional.silu(linear(rows))
        return rows


class MedusaLearner(Learner):
    """Medusa heads that learn.

    Args:
        target: gives the head that they begin with.
        vocabulary: what they can propose; the whole of the target's where its own head is shared.
        options: number of heads and so on.
    """

    layers = (FINAL,)
    target_head: torch.Tensor
    token_ids: torch.Tensor
    draft_ids: torch.Tensor

    def __init__(self, target: TrainingTarget, vocabulary: DraftVocabulary, options: MedusaOptions) -> None:
        super().__init__()
        self.depth = options.heads
        self.vocabulary = vocabulary
        self.head_kind = options.head
        self.head_accuracies: tuple[tuple[float, ...], ...] = ()
        self._decay = options.decay
        self.residuals = [ResidualBlock(target.hidden_size, options.layers) for _ in range(options.heads)]
        self.blocks = nn.ModuleList(self.residuals)
        self.register_buffer("token_ids", vocabulary.token_ids, persistent=False)
        self.register_buffer("draft_ids", vocabulary.draft_ids(), persistent=False)
        if options.head is MedusaHead.SHARED:
            self.register_buffer("target_head", target.head.float(), persistent=False)
            self.lm_heads = nn.ParameterList()
        else:
            beginning = target.head[vocabulary.token_ids.to(target.head.device)].float()
            copies = options.heads if options.head is MedusaHead.OWN else 1
            self.lm_heads = nn.ParameterList([nn.Parameter(beginning.clone()) for _ in range(copies)])

    def logits(self, head: int, rows: torch.Tensor) -> torch.Tensor:
        """Logits over the draft vocabulary # [rows, hidden_size] -> [rows, draft_vocab_size]."""
        if self.head_kind is MedusaHead.SHARED:
            weight = self.target_head
        else:
            weight = self.lm_heads[head if self.head_kind is MedusaHead.OWN else 0]
        return functional.linear(self.residuals[head](rows), weight)

    def forward(self, batch: Batch, progress: Progress) -> Loss:
        """Cross entropy of each head, weighted."""
        states = batch.features[0]
        total = states.new_zeros(())
        parts = []
        for head in range(self.depth):
            labels = self.draft_ids[batch.shifted_tokens(2 + head)]
            learnt = batch.anchors(head + 1) & (labels >= 0)
            loss = mean_cross_entropy(self.logits(head, states[learnt]), labels[learnt])
            total = total + self._decay**head * loss
            parts.append((f"head {head}", loss.item()))
        return Loss(total, tuple(parts))

    def matches(self, batch: Batch) -> torch.Tensor:
        """Whether each head's best token is right."""
        states = batch.features[0]

        def draft(head: int, anchors: torch.Tensor) -> torch.Tensor:
            return self.token_ids[self.logits(head, states[anchors]).argmax(dim=-1)]

        return chain_matches(batch, self.depth, draft)

    @torch.no_grad()
    def prepare_to_write(self, batches: list[Batch]) -> None:
        """Measures how often the token of each rank is the right one, head by head."""
        hits = torch.zeros(self.depth, TOP_RANKS)
        anchors_seen = 0
        for batch in batches:
            anchors = batch.anchors(self.depth)
            anchors_seen += int(anchors.sum())
            for head in range(self.depth):
                best = self.logits(head, batch.features[0][anchors]).topk(min(TOP_RANKS, len(self.vocabulary))).indices
                wanted = batch.shifted_tokens(2 + head)[anchors]
                hits[head, : best.shape[1]] += (self.token_ids[best] == wanted[:, None]).sum(dim=0).cpu()
        rates = hits / max(anchors_seen, 1)
        self.head_accuracies = tuple(tuple(round(rate, 5) for rate in row) for row in rates.tolist())

    def write(self, folder: Path, target_name: str) -> None:
        """Writes `config.json` and safetensors: TGI's layout where the target's head is shared, else vLLM's."""
        shared = self.head_kind is MedusaHead.SHARED
        heads = [stored(weight) for weight in self.lm_heads]
        config = MedusaConfig(
            num_heads=self.depth,
            num_layers=len(self.residuals[0].linears),
            hidden_size=self.residuals[0].linears[0].in_features,
            vocab_size=len(self.vocabulary),
            shared_head=shared,
            has_bias=True,
        )
        checkpoint = MedusaCheckpoint(
            config=config,
            blocks=tuple(
                tuple((stored(linear.weight), stored(linear.bias)) for linear in block.linears)
                for block in self.residuals
            ),
            heads=None if shared else tuple(heads * (self.depth // len(heads))),
            layout="",
            token_map=None if self.vocabulary.is_full else self.vocabulary.token_ids,
            head_accuracies=self.head_accuracies,
        )
        write_medusa(folder, checkpoint, target_vocab_size=self.vocabulary.vocab_size, base=target_name)
