"""The method `layerskip` inside the verifier: the target's own first layers write the draft (arXiv 2404.16710).

A draft token is what the final norm and the head make of the hidden state that leaves layer `exit_layer`. The rows of
these layers are the session's own, so drafting takes no key/value memory besides, and the pass that judges the block
runs only the layers behind the exit for what was fed here (`paceline.engine.native.early_exit`). In a drafter service
the same method is a draft model cut after `exit_layer` layers.

The head of a large vocabulary may take as long as these layers. A checkpoint can name the ids that are worth proposing;
drafts then come from a copy of their rows of the head, and every other token is the target's own to choose.

A target that was not trained for early exits is drafted for badly, and as losslessly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from paceline.drafting.head_products import make_product
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.engine.draft_candidates import best_drafts
from paceline.engine.native.early_exit import ExitStep
from paceline.engine.native.weights import Weight
from paceline.engine.runner import RunnerInfo
from paceline.engine.sampling import DraftRow
from paceline.errors import CapacityExceeded, ConfigurationError


class ExitsEarly(Protocol):
    """A target that can stop after its first layers: `NativeRunner`."""

    @property
    def info(self) -> RunnerInfo:
        """Facts about the model."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    def forward_first(self, batch: Sequence[ExitStep], num_layers: int, head: Weight | None = None) -> torch.Tensor:
        """See `NativeRunner.forward_first`."""

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        """See `NativeRunner.head_rows`."""


class LayerSkipMethod:
    """Drafts with the first layers of the target, in chains.

    Args:
        target: in this process; it runs no pass while this drafts.
        exit_layer: drafts come from layers [0, exit_layer).
        target_ids: ids that are proposed # [n] int64, all different; None for all.
        vocab_limit: ids at or above it are never proposed; None for the model's own size.
        eos_token_ids: ids that `min_tokens` masks.
        tokenizer_hash: fingerprint of the target's tokenizer.
        vocabulary: its tokens.

    Raises:
        ConfigurationError: the target has no such layer behind which others are.
    """

    def __init__(
        self,
        target: ExitsEarly,
        *,
        exit_layer: int,
        target_ids: torch.Tensor | None = None,
        vocab_limit: int | None = None,
        eos_token_ids: tuple[int, ...] = (),
        tokenizer_hash: str = "",
        vocabulary: Mapping[int, str] | None = None,
    ) -> None:
        if not 1 <= exit_layer < target.num_layers:
            raise ConfigurationError(
                f"exit_layer {exit_layer} is outside [1, {target.num_layers}), the layers of the target: drafts must "
                "leave before its last layer",
                field="exit_layer",
            )
        self._target = target
        self._exit_layer = exit_layer
        self._eos_token_ids = eos_token_ids
        vocab_size = min(target.info.vocab_size, vocab_limit or target.info.vocab_size)
        self._target_ids: torch.Tensor | None = None
        self._head: Weight | None = None
        if target_ids is not None:
            real = target_ids[target_ids < vocab_size]
            rows = target.head_rows(real)
            self._target_ids, self._head = real.to(rows.device), make_product(rows)
        self._info = MethodInfo(
            name="layerskip",
            vocab_size=vocab_size,
            max_model_len=target.info.max_model_len,
            tokenizer_hash=tokenizer_hash,
            vocabulary=vocabulary or {},
            weights_bytes=0 if self._head is None else self._head.num_bytes,
        )

    @property
    def info(self) -> MethodInfo:
        """Facts about the method."""
        return self._info

    def open(self, session: str) -> None:
        """Nothing: the rows are the target's."""

    def close(self, session: str) -> None:
        """Nothing: the rows are the target's."""

    def kv_len(self, session: str) -> int:
        """Always 0: the rows are the target's."""
        return 0

    @torch.inference_mode()
    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Adds one token to every job in one pass; a job without room for its rows is done with what it has."""
        steps: list[tuple[DraftJob, ExitStep]] = []
        for job in jobs:
            if not job.done:
                step = self._step(job)
                job.method, job.done = self._info.name, step is None
                if step is not None:
                    steps.append((job, step))
        if not steps:
            return
        logits = self._target.forward_first([step for _, step in steps], self._exit_layer, self._head)
        choices = best_drafts(
            logits,
            [DraftRow(job.sampling_without_chance, job.context, job.tokens, job.generation_start) for job, _ in steps],
            vocab_size=self._info.vocab_size,
            eos_token_ids=self._eos_token_ids,
            target_ids=self._target_ids,
        )
        for (job, step), choice in zip(steps, choices, strict=True):
            if choice is None:
                # Rows that give no finite logits may not be finite either: let the target compute them anew.
                step.kv.drop_ahead()
                job.done = True
                continue
            job.tokens.append(choice.token)
            job.confidences.append(choice.confidence)
            job.done = len(job.tokens) >= job.max_depth

    def _step(self, job: DraftJob) -> ExitStep | None:
        """What is to be fed for the job's next token; None if that cannot be."""
        kv = job.target_rows
        if kv is None or kv.num_rows != len(job.context) - 1 or len(job.tokens) >= job.max_depth:
            return None
        if not job.tokens:
            kv.drop_ahead()  # of a draft that was never judged
        elif kv.ahead is None or len(kv.ahead.tokens) != len(job.tokens):
            return None
        try:
            kv.reserve(len(job.tokens) + 1)
        except CapacityExceeded:
            return None
        return ExitStep(kv, job.tokens[-1] if job.tokens else job.context[-1])
