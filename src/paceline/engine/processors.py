"""What happens to a row of logits before a token is chosen from it; the same for draft rows, bonus rows and plain rows.

Order: logit_bias, repetition, frequency and presence penalty, min_tokens mask, temperature, top_k, top_p, min_p. Every
row is processed with the state of its own prefix: the committed tokens and the drafts between the root and the row.

Truncation is by value: each of top_k, top_p and min_p gives the least logit that stays, and tokens equal to it stay
too. So nothing depends on how a device orders equal logits. All operations work on each row alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from paceline.messages import SamplingParams

_WIDTHS = (512, 4096)
"""How many of the best tokens to look at for truncation, before all of them are sorted."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The state of some rows of one session.

    Attributes:
        sampling: the request's parameters.
        committed: tokens that come before all of the rows; read during the call only.
        generation_start: index in `committed` of the first generated token.
        paths: per row, the tokens between `committed` and the row.
        eos_token_ids: ids that min_tokens masks, together with the stop ids.
    """

    sampling: SamplingParams
    committed: Sequence[int]
    generation_start: int
    paths: tuple[tuple[int, ...], ...]
    eos_token_ids: tuple[int, ...] = ()

    @property
    def positions(self) -> list[int]:
        """Absolute position of the token chosen from each row."""
        return [len(self.committed) + len(path) for path in self.paths]

    @property
    def needs_edits(self) -> bool:
        """Whether `edit_rows_` would do anything."""
        return bool(self.sampling.logit_bias) or self._has_penalties or any(self._too_short)

    @property
    def _has_penalties(self) -> bool:
        sampling = self.sampling
        return (
            sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        )

    @property
    def _too_short(self) -> list[bool]:
        num_generated = len(self.committed) - self.generation_start
        return [num_generated + len(path) < self.sampling.min_tokens for path in self.paths]

    def edit_rows_(self, logits: torch.Tensor) -> None:
        """Applies bias, penalties and the min_tokens mask in place to `logits`, # [rows, vocab_size] float32."""
        sampling = self.sampling
        vocab_size = logits.shape[1]
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        if bias:
            logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
        if self._has_penalties:
            self._penalise_(logits)
        masked = [t for t in {*self.eos_token_ids, *sampling.stop_token_ids} if 0 <= t < vocab_size]
        if masked:
            for row, too_short in enumerate(self._too_short):
                if too_short:
                    logits[row, masked] = -torch.inf

    def _penalise_(self, logits: torch.Tensor) -> None:
        sampling = self.sampling
        in_output = self._counts(self.committed[self.generation_start :], logits)
        if sampling.repetition_penalty != 1.0:
            seen = in_output + self._counts(self.committed[: self.generation_start], logits) > 0
            factor = sampling.repetition_penalty
            logits.copy_(logits.where(~seen, torch.where(logits > 0, logits / factor, logits * factor)))
        logits -= sampling.frequency_penalty * in_output
        logits -= sampling.presence_penalty * (in_output > 0)

    def _counts(self, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """How often each id occurs in `tokens` and the row's path. Returns float32 # [rows, vocab_size]."""
        vocab_size = logits.shape[1]
        base = torch.bincount(torch.tensor(tokens, dtype=torch.int64), minlength=vocab_size)[:vocab_size].float()
        counts = base.repeat(len(self.paths), 1)
        for row, path in enumerate(self.paths):
            for token in path:
                if 0 <= token < vocab_size:
                    counts[row, token] += 1
        return counts.to(logits.device)


@dataclass(frozen=True, slots=True)
class Shaping:
    """Temperature and truncation: rows that share it are worked on together. A greedy row has no shaping."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float

    @classmethod
    def of(cls, sampling: SamplingParams) -> Shaping | None:
        """The request's shaping; None when it is greedy."""
        if sampling.greedy:
            return None
        return cls(sampling.temperature, max(0, sampling.top_k), sampling.top_p, max(0.0, sampling.min_p))

    @property
    def truncates(self) -> bool:
        """Whether any token may be cut off."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def scale(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits over temperature, in a new tensor unless nothing changes."""
        return logits if self.temperature == 1.0 else logits / self.temperature

    def survivors(self, logits: torch.Tensor) -> Iterator[Survivors]:
        """Cuts rows off by top_k, top_p and min_p, in that order, each on what the one before has left.

        Looks at the best few hundred tokens first and at more of them only in rows where that is not enough.

        Args:
            logits: scaled rows with finite maxima. # [rows, vocab_size] float32

        Yields:
            Batches of rows that together are all rows.
        """
        vocab_size = logits.shape[1]
        rows = torch.arange(logits.shape[0], device=logits.device)
        totals = None
        if self.top_p < 1.0 and not self.top_k:
            totals = 1.0 / logits.softmax(-1).amax(-1).double()  # sum of exp(logit - best logit)
        for width in (*(w for w in _WIDTHS if self.top_k < w < vocab_size), vocab_size):
            pending = logits[rows]
            values, ids = pending.topk(width, dim=-1) if width < vocab_size else pending.sort(-1, descending=True)
            floors = self._floors(values, None if totals is None else totals[rows])
            # Complete when something was seen that does not stay: then all that stays was seen.
            complete = (values[:, -1] < floors) | (values[:, -1] == -torch.inf)
            if width == vocab_size:
                complete.fill_(True)
            if complete.any():
                values, ids, floors = values[complete], ids[complete], floors[complete]
                values = values.masked_fill_(values < floors.unsqueeze(1), -torch.inf)
                yield Survivors(rows[complete], ids, values, floors)
                rows = rows[~complete]
            if not len(rows):
                return

    def _floors(self, values: torch.Tensor, totals: torch.Tensor | None) -> torch.Tensor:
        """Least logit that stays, judged from the best `values` in falling order, # [rows, width] -> [rows]."""
        best = values[:, 0]
        floors = torch.full_like(best, -torch.inf)
        if self.top_k:
            floors = values[:, min(self.top_k, values.shape[1]) - 1]
        if self.top_p < 1.0:
            weights = (values - best.unsqueeze(1)).double().exp_()
            weights.masked_fill_(values < floors.unsqueeze(1), 0.0)
            sums = weights.cumsum(-1)
            before = sums - weights
            mass = self.top_p * (sums[:, -1] if totals is None else totals)
            num_kept = (before < mass.unsqueeze(1)).sum(-1).clamp_(min=1)
            floors = torch.maximum(floors, values.gather(1, num_kept.unsqueeze(1) - 1)[:, 0])
        if self.min_p > 0.0:
            floors = torch.maximum(floors, best + torch.tensor(self.min_p, dtype=torch.float64).log().item())
        return floors


@dataclass(frozen=True, slots=True)
class Survivors:
    """What truncation leaves of some rows.

    Attributes:
        rows: which rows. # [n] int64
        ids: the best tokens of each. # [n, width] int64
        logits: their scaled logits; -inf where one was cut off. # [n, width] float32
        floors: least logit that stayed. # [n] float32
    """

    rows: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    floors: torch.Tensor
