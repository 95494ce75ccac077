"""The method `medusa`: heads on the target's last hidden state, each proposing tokens for one position ahead.

Let L be the number of committed tokens, the pending one at position L - 1 included. The target has fed L - 1 of them;
its hidden state of row L - 2, after the final norm, is what its own head made the pending token from.

| what | reads | proposes the token at position |
|---|---|---|
| target's head | row L - 2 | L - 1, the pending token |
| Medusa head k | row L - 2 | L + k, depth k + 1 of the tree |

So one draft costs one small pass over one row, and the method holds nothing of a session. A head does not know what the
heads before it chose: all nodes of one depth have the same candidates, and a fixed tree (`tree_shape.py`) says which of
them are combined.

Medusa: Cai et al. 2024, arXiv 2401.10774. Its typical acceptance changes the output and is not offered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint
from paceline.drafting.medusa_heads import MedusaHeads
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.drafting.tree_shape import TreeShape
from paceline.engine.draft_candidates import draft_candidates
from paceline.engine.features import FeatureTaps
from paceline.engine.sampling import DraftChoice, DraftRow
from paceline.engine.shared_parts import SharedParts
from paceline.errors import ConfigurationError
from paceline.messages import AcceptanceRule

_UNKNOWN_TOKEN = -1
"""Stands for a draft token that a head cannot know; processing ignores it."""


class MedusaMethod:
    """Drafts trees with Medusa heads.

    Under the rule `match` candidates share the target's noise. Under `ratio` a draft is the chain of each head's best
    token, chosen without chance. The confidence of a token is its head's own probability of it, not the path's.

    Penalties count the committed tokens, not those of the block itself, which differ from branch to branch.

    Args:
        checkpoint: the heads.
        parts: the target's head, where the heads share it; also says where the weights go and in which format.
        tree: which candidates are combined; what is deeper than there are heads is left out.
        vocab_limit: ids at or above it are never proposed; None for the target's own size.
        eos_token_ids: ids that `min_tokens` masks.
        tokenizer_hash: fingerprint of the target's tokenizer.
        vocabulary: its tokens.

    Raises:
        ConfigurationError: the heads are for a target of another hidden size.
    """

    def __init__(
        self,
        checkpoint: MedusaCheckpoint,
        parts: SharedParts,
        *,
        tree: TreeShape,
        vocab_limit: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer_hash: str = "",
        vocabulary: Mapping[int, str] | None = None,
    ) -> None:
        if checkpoint.config.hidden_size != parts.hidden_size:
            raise ConfigurationError(
                f"the Medusa heads are for rows of {checkpoint.config.hidden_size} numbers, the target has "
                f"{parts.hidden_size}: give the heads that were trained for this target",
                field="model",
            )
        vocab_size = min(parts.vocab_size, vocab_limit or parts.vocab_size)
        self._heads = MedusaHeads(checkpoint, parts, vocab_size)
        whole = tree.crop(self._heads.num_heads)
        self._trees = [whole.crop(depth) for depth in range(1, whole.max_depth + 1)]
        self._eos_token_ids = eos_token_ids
        self._info = MethodInfo(
            name="medusa",
            vocab_size=vocab_size,
            tokenizer_hash=tokenizer_hash,
            vocabulary=vocabulary or {},
            weights_bytes=self._heads.num_bytes + parts.weights_bytes,
            taps=FeatureTaps(width=parts.hidden_size, only_last=True),
        )

    @property
    def info(self) -> MethodInfo:
        """Facts about the method."""
        return self._info

    @property
    def tree(self) -> TreeShape:
        """The tree of a draft that is not limited by its depth."""
        return self._trees[-1]

    def open(self, session: str) -> None:
        """Nothing to hold."""

    def kv_len(self, session: str) -> int:
        """No rows."""
        return 0

    def close(self, session: str) -> None:
        """Nothing to free."""

    @torch.inference_mode()
    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Finishes every job at once: one pass through the heads for all of them.

        A job without the hidden state of its last computed row gets nothing.
        """
        ready: list[tuple[DraftJob, torch.Tensor]] = []
        for job in jobs:
            if job.done:
                continue
            job.method = self._info.name
            job.done = True
            hidden = _last_row(job)
            if hidden is not None:
                ready.append((job, hidden))
        if ready:
            self._draft([job for job, _ in ready], torch.cat([hidden for _, hidden in ready]))

    def _draft(self, jobs: Sequence[DraftJob], hidden: torch.Tensor) -> None:
        """Fills in the blocks of jobs with the hidden states # [jobs, hidden_size]."""
        shapes = [self._shape_for(job) for job in jobs]
        num_heads = max(shape.max_depth for shape in shapes)
        logits = self._heads(hidden, num_heads)  # head by head, in each job by job
        rows = [
            DraftRow(job.sampling_without_chance, job.context, (_UNKNOWN_TOKEN,) * head, job.generation_start)
            for head in range(num_heads)
            for job in jobs
        ]
        candidates = draft_candidates(
            logits,
            rows,
            num=max(shape.num_ranks for shape in shapes),
            vocab_size=self._info.vocab_size,
            eos_token_ids=self._eos_token_ids,
            target_ids=self._heads.target_ids,
        )
        for index, (job, shape) in enumerate(zip(jobs, shapes, strict=True)):
            _plant(job, shape, candidates[index :: len(jobs)])

    def _shape_for(self, job: DraftJob) -> TreeShape:
        depth = min(job.max_depth, len(self._trees))
        return TreeShape.chain(depth) if job.rule is AcceptanceRule.RATIO else self._trees[depth - 1]


def _last_row(job: DraftJob) -> torch.Tensor | None:
    """The hidden state that the pending token was made from # [1, hidden_size]; None where it is not there."""
    row = len(job.context) - 2
    if job.features is None or row < job.features.first_row or row >= job.features.num_rows:
        return None
    return job.features.read(row, row + 1)


def _plant(job: DraftJob, shape: TreeShape, candidates: Sequence[Sequence[DraftChoice]]) -> None:
    """Fills in a job's block. A node for which there is no candidate is left out, and what is below it.

    Args:
        job: has no tokens yet.
        shape: its tree.
        candidates: of each depth, best first.
    """
    places: dict[tuple[int, ...], int] = {(): 0}
    for node in shape.nodes:
        choices, rank = candidates[len(node) - 1], node[-1]
        if node[:-1] not in places or rank >= len(choices):
            continue
        job.tokens.append(choices[rank].token)
        job.parents.append(places[node[:-1]])
        job.confidences.append(choices[rank].confidence)
        places[node] = len(job.tokens)
