"""The training loop of all methods, on `accelerate`: one command for a CPU, a GPU, or several with `accelerate launch`.

A step's data, learning rate and chance follow from its number (and, where the run is bounded in time, from the time
spent), so a run that goes on from a checkpoint takes the steps that it would have taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn

from paceline.errors import ModelError
from paceline.training.acceptance import acceptance_of, count_chains
from paceline.training.batches import Batch, BatchOrder, BatchSource
from paceline.training.checkpoint import CheckpointFolder, RunState
from paceline.training.grouping import group_by_length
from paceline.training.history import EvalPoint, History, LossPoint
from paceline.training.learner import Learner, Progress
from paceline.training.options import TrainOptions
from paceline.training.status import OnStatus, Status

_LOSS_EVERY = 10
"""Steps per point of the loss curve."""


class TrainingLoop:
    """Trains a learner, measures it and keeps checkpoints.

    Args:
        accelerator: from `accelerate`; decides on devices and processes.
        learner: on the CPU, not yet prepared.
        source: makes batches.
        train: sequences to learn from.
        held_out: sequences to measure with.
        options: of the run.
        checkpoints: where its state is kept.
        fingerprint: of data, target and options.
        on_status: told of progress, in the main process only.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        learner: Learner,
        *,
        source: BatchSource,
        train: Sequence[int],
        held_out: Sequence[int],
        options: TrainOptions,
        checkpoints: CheckpointFolder,
        fingerprint: str,
        on_status: OnStatus,
    ) -> None:
        self._accelerator = accelerator
        self._options = options
        self._source = source
        self._checkpoints = checkpoints
        self._fingerprint = fingerprint
        self._on_status = on_status
        self._order = BatchOrder(train, source, batch_tokens=options.batch_tokens, seed=options.seed)
        lengths = {index: source.length(index) for index in held_out[: options.eval_sequences]}
        self._eval_groups = group_by_length(tuple(lengths), lengths, options.batch_tokens)
        parameters = [value for value in learner.parameters() if value.requires_grad]
        optimizer = torch.optim.AdamW(
            parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay
        )
        self._state = checkpoints.load(fingerprint)
        if self._state is not None:
            learner.load_trained_state(dict(self._state.trained))
            optimizer.load_state_dict(dict(self._state.optimizer))
        self._learner = learner
        self._model, self._optimizer = accelerator.prepare(learner, optimizer)
        self.step = self._state.step if self._state else 0
        self.seconds = self._state.seconds if self._state else 0.0
        self.tokens = self._state.tokens if self._state else 0
        self.history = self._state.history if self._state else History()
        self._recent: list[tuple[float, tuple[tuple[str, float], ...]]] = []
        self._saved_at_s = time.monotonic()

    def eval_batches(self) -> list[Batch]:
        """The held-out batches, on the learner's device."""
        return [self._source.make(group).to(self._accelerator.device) for group in self._eval_groups]

    def run(self) -> None:
        """Trains to the end. Afterwards the learner has the parameters that measured best.

        Raises:
            ModelError: the loss is not a number any more.
        """
        began_s, before_s = time.monotonic(), self.seconds
        if not self.history.evaluations:
            self._evaluate()
        while not self._is_over():
            self._take_step()
            self.seconds = before_s + time.monotonic() - began_s
            if self.step % _LOSS_EVERY == 0:
                self._note_loss()
            if self.step % self._options.eval_every == 0:
                self._evaluate()
            self._save_if_due()
        if self.history.evaluations[-1].step != self.step:
            self._evaluate()
        self._save()
        best = self._checkpoints.load_best()
        if best is not None:
            self._learner.load_trained_state(dict(best))

    # --- steps ----------------------------------------------------------------------------------------------------

    def _share(self) -> float:
        options = self._options
        shares = [self.step / options.max_steps] if options.max_steps else []
        shares += [self.seconds / options.max_seconds] if options.max_seconds else []
        return min(max(shares), 1.0)

    def _is_over(self) -> bool:
        patience = self._options.patience
        over = self._share() >= 1.0 or bool(patience and self.history.evaluations_since_best >= patience)
        # Clocks differ between processes: one that stops early would leave the others waiting.
        flag = torch.tensor([float(over)], device=self._accelerator.device)
        return bool(self._accelerator.reduce(flag, reduction="sum").item() > 0)

    def _take_step(self) -> None:
        options, accelerator = self._options, self._accelerator
        progress = Progress(self.step, self._share())
        for group in self._optimizer.param_groups:
            group["lr"] = options.learning_rate * learning_rate_share(progress.share, options.warmup)
        world, rank = accelerator.num_processes, accelerator.process_index
        self._model.train()
        for micro in range(options.accumulate):
            number = (self.step * options.accumulate + micro) * world + rank
            torch.manual_seed(hash((options.seed, number)) % 2**63)
            batch = self._source.make(self._order.at(number)).to(accelerator.device)
            with accelerator.accumulate(self._model), accelerator.autocast():
                loss = self._model(batch, progress)
                accelerator.backward(loss.total)
                if accelerator.sync_gradients and options.grad_clip:
                    accelerator.clip_grad_norm_(self._model.parameters(), options.grad_clip)
                self._optimizer.step()
                self._optimizer.zero_grad()
            value = loss.total.detach().item()
            if not math.isfinite(value):
                raise ModelError(
                    f"the loss is {value} at step {self.step}: lower learning_rate; checkpoints before it are kept"
                )
            self._recent.append((value, loss.parts))
            self.tokens += self._sum(batch.num_answer_tokens)
        self.step += 1
        if accelerator.is_main_process:
            self._on_status(self._status())

    def _sum(self, number: int) -> int:
        if self._accelerator.num_processes == 1:
            return number
        counts = torch.tensor([number], device=self._accelerator.device)
        return int(self._accelerator.reduce(counts, reduction="sum").item())

    def _status(self, *, evaluated: bool = False) -> Status:
        last = self.history.losses[-1].loss if self.history.losses else None
        loss = sum(value for value, _ in self._recent) / len(self._recent) if self._recent else last
        newest = self.history.evaluations[-1] if self.history.evaluations else None
        epoch = self._order.epoch_of(self.step * self._options.accumulate * self._accelerator.num_processes)
        return Status(self.step, self._share(), self.seconds, self.tokens, loss, epoch, newest, evaluated)

    def _note_loss(self) -> None:
        count = len(self._recent)
        names = [name for name, _ in self._recent[0][1]]
        parts = {name: sum(dict(parts)[name] for _, parts in self._recent) / count for name in names}
        mean = sum(value for value, _ in self._recent) / count
        rate = float(self._optimizer.param_groups[0]["lr"])
        self.history = self.history.with_loss(LossPoint(self.step, self.tokens, mean, parts, rate))
        self._recent.clear()

    # --- measuring and keeping ------------------------------------------------------------------------------------

    @torch.no_grad()
    def _evaluate(self) -> None:
        learner: Learner = self._unwrapped()
        learner.eval()
        world, rank = self._accelerator.num_processes, self._accelerator.process_index
        counts = torch.zeros(1 + learner.depth, dtype=torch.int64, device=self._accelerator.device)
        for group in self._eval_groups[rank::world]:
            batch = self._source.make(group).to(self._accelerator.device)
            counts += count_chains(batch, learner.matches(batch))
        measured = acceptance_of(self._accelerator.reduce(counts, reduction="sum").cpu())
        point = EvalPoint(
            self.step, self.seconds, self.tokens, measured.positions, measured.at_least, measured.tokens_per_pass
        )
        self.history = self.history.with_evaluation(point)
        if self._accelerator.is_main_process:
            if self.history.best == point:
                self._checkpoints.save_best(learner.trained_state())
            self._on_status(self._status(evaluated=True))

    def _save_if_due(self) -> None:
        by_steps = self._options.checkpoint_every and self.step % self._options.checkpoint_every == 0
        by_time = time.monotonic() - self._saved_at_s >= self._options.checkpoint_seconds
        if by_steps or by_time:
            self._save()

    def _save(self) -> None:
        self._saved_at_s = time.monotonic()
        if self._accelerator.is_main_process:
            self._checkpoints.save(
                RunState(
                    fingerprint=self._fingerprint,
                    step=self.step,
                    seconds=self.seconds,
                    tokens=self.tokens,
                    trained=self._unwrapped().trained_state(),
                    optimizer=self._optimizer.state_dict(),
                    history=self.history,
                )
            )

    def _unwrapped(self) -> Learner:
        model: nn.Module = self._accelerator.unwrap_model(self._model)
        if not isinstance(model, Learner):
            raise TypeError(f"accelerate wrapped the learner into {type(model).__name__} and does not unwrap it")
        return model


def learning_rate_share(share: float, warmup: float) -> float:
    """Share of the highest learning rate: a line up, then half a cosine down to a tenth.

    Args:
        share: of the run that is over, 0 to 1.
        warmup: share of the run in which it rises.
    """
    if share < warmup:
        return max(share, 1e-3) / warmup
    down = (share - warmup) / max(1.0 - warmup, 1e-9)
    return 0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * down))
