"""What happens to a row of logits before a token is chosen from it; the same for draft rows, bonus rows and plain rows.

Order: logit_bias, repetition, frequency and presence penalty, min_tokens mask, temperature, top_k, top_p, min_p. Every
row is processed with the state of its own prefix: the committed tokens and the drafts between the root and the row.

Truncation is by value: each of top_k, top_p and min_p gives the least logit that stays, and tokens equal to it stay
too. So nothing depends on how a device orders equal logits, nor on which rows are worked on together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from paceline.messages import SamplingParams
from paceline.speculation.noise import keyed_argmax, keyed_argmax_of

_SHORTLIST = 512
"""How many of the best tokens are looked at for truncation before all of them are sorted."""


@dataclass(frozen=True, slots=True)
class Cut:
    """What truncation leaves of some rows.

    Attributes:
        floors: least logit that stays. # [rows] float32
        ids: the best tokens of each row. # [rows, width] int64
        logits: their logits, -inf where one was cut off. # [rows, width] float32
        complete: whether `ids` holds every token that stays. # [rows] bool
    """

    floors: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor
    complete: torch.Tensor


@dataclass(frozen=True, slots=True)
class Shaping:
    """Temperature and truncation of a sampled request. Rows that share it can be worked on together."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @classmethod
    def of(cls, sampling: SamplingParams) -> Shaping | None:
        """The request's shaping; None when it is greedy and only the best token counts."""
        if sampling.greedy:
            return None
        return cls(sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)

    @property
    def truncates(self) -> bool:
        """Whether any token may be cut off."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0

    def choose(
        self,
        logits: torch.Tensor,  # [rows, vocab_size] float32
        keys: torch.Tensor,  # [rows] int64
    ) -> torch.Tensor:
        """Truncates and samples rows that are scaled already and have finite maxima. Returns ids, int64 # [rows]."""
        if not self.truncates:
            return keyed_argmax(logits, keys)
        cut = self.cut(logits)
        tokens = keyed_argmax_of(cut.logits, cut.ids, keys)
        if not cut.complete.all():
            wide = ~cut.complete
            kept = logits[wide]
            kept.masked_fill_(kept < cut.floors[wide].unsqueeze(1), -torch.inf)
            tokens[wide] = keyed_argmax(kept, keys[wide])
        return tokens

    def cut(self, logits: torch.Tensor) -> Cut:
        """Applies top_k, top_p and min_p, in that order, each to what the one before has left.

        Looks at the best few hundred tokens and sorts all of them only in rows where those are not enough.

        Args:
            logits: scaled rows with finite maxima; not changed. # [rows, vocab_size] float32
        """
        vocab_size = logits.shape[1]
        totals = None
        if self.top_p < 1.0 and not self.top_k:
            totals = 1.0 / logits.softmax(-1).amax(-1).double()  # sum of exp(logit - best logit)
        best, ids = logits.topk(min(_SHORTLIST, vocab_size), dim=-1)
        floors, complete = self._floors(best, totals)
        complete |= (best[:, -1] == -torch.inf) | (best.shape[1] == vocab_size)
        if not complete.all():
            wide = ~complete
            floors[wide], _ = self._floors(_descending(logits[wide]), None if totals is None else totals[wide])
        return Cut(floors, ids, best.masked_fill(best < floors.unsqueeze(1), -torch.inf), complete)

    def _floors(self, best: torch.Tensor, totals: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Judges from the best logits of each row in falling order, # [rows, width].

        Returns:
            The least logit that stays # [rows], and whether the answer is final # [rows] bool: something was seen that
            does not stay after top_k (or after all, without top_k), so all that stays was seen.
        """
        floors = torch.full_like(best[:, 0], -torch.inf)
        settled = None
        if self.top_k:
            floors = best[:, min(self.top_k, best.shape[1]) - 1].clone()
            settled = best[:, -1] < floors
        if self.top_p < 1.0:
            weights = (best - best[:, :1]).exp_().double()
            weights.masked_fill_(best < floors.unsqueeze(1), 0.0)
            sums = weights.cumsum(-1)
            mass = self.top_p * (sums[:, -1] if totals is None else totals)
            num_kept = (sums - weights < mass.unsqueeze(1)).sum(-1).clamp_(min=1)
            floors = torch.maximum(floors, best.gather(1, num_kept.unsqueeze(1) - 1)[:, 0])
        if self.min_p > 0.0:
            floors = torch.maximum(floors, best[:, 0] + math.log(self.min_p))
        return floors, best[:, -1] < floors if settled is None else settled


def _descending(logits: torch.Tensor) -> torch.Tensor:
    if logits.device.type == "cpu":
        return torch.from_numpy(np.sort(logits.numpy(), axis=-1)[:, ::-1].copy())  # three times as fast as torch.sort
    return logits.sort(dim=-1, descending=True).values


@dataclass(frozen=True, slots=True)
class PrefixState:
    """What the processors know of the tokens before the rows of one session.

    Attributes:
        sampling: the request's parameters.
        committed: tokens that come before all of the rows; read during the call only.
        generation_start: index in `committed` of the first generated token.
        eos_token_ids: ids that min_tokens masks, together with the stop ids.
    """

    sampling: SamplingParams
    committed: Sequence[int]
    generation_start: int
    eos_token_ids: tuple[int, ...] = ()


class SessionRows:
    """The rows of one session, processed on demand.

    Args:
        logits: one row per path, without padding columns; not changed. # [rows, vocab_size]
        state: the tokens before the rows.
        paths: per row, the tokens between `state.committed` and the row.
    """

    def __init__(self, logits: torch.Tensor, state: PrefixState, paths: Sequence[Sequence[int]]) -> None:
        self.logits = logits
        self.state = state
        self.paths = paths
        self.shaping = Shaping.of(state.sampling)
        self._counts: tuple[torch.Tensor, torch.Tensor] | None = None

    def position(self, row: int) -> int:
        """Absolute position of the token chosen from a row."""
        return len(self.state.committed) + len(self.paths[row])

    def processed(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows after bias, penalties, masks and temperature (1 when greedy), before truncation.

        Returns:
            The rows, float32, not to be changed, # [len(rows), vocab_size]; and whether each is usable: it came finite
            from the model and a token is left to choose. # [len(rows)] bool
        """
        logits = self.logits[rows[0] : rows[0] + 1] if len(rows) == 1 else self.logits[list(rows)]
        logits = logits.float()
        usable = logits.amax(-1).isfinite() & logits.amin(-1).isfinite()  # both carry NaN on
        edited = self._edited(logits, rows)
        if self.shaping is not None and self.shaping.temperature != 1.0:
            edited = edited / self.shaping.temperature
        if edited is not logits:
            usable &= edited.amax(-1).isfinite()
        return edited, usable

    def _edited(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Applies bias, penalties and the min_tokens mask; gives back `logits` itself where nothing is to be done."""
        sampling = self.state.sampling
        vocab_size = logits.shape[1]
        num_generated = len(self.state.committed) - self.state.generation_start
        too_short = [i for i, row in enumerate(rows) if num_generated + len(self.paths[row]) < sampling.min_tokens]
        penalised = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)
        if not (sampling.logit_bias or penalised or too_short):
            return logits
        logits = logits.clone()
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        if bias:
            logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
        if penalised:
            self._penalise_(logits, rows)
        ends = [t for t in {*self.state.eos_token_ids, *sampling.stop_token_ids} if 0 <= t < vocab_size]
        for index in too_short if ends else ():
            logits[index, ends] = -torch.inf
        return logits

    def _penalise_(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        sampling = self.state.sampling
        vocab_size = logits.shape[1]
        if self._counts is None:
            committed = torch.tensor(self.state.committed, dtype=torch.int64)
            in_vocab = (committed >= 0) & (committed < vocab_size)
            split = self.state.generation_start
            self._counts = (
                torch.bincount(committed[:split][in_vocab[:split]], minlength=vocab_size).to(logits.device),
                torch.bincount(committed[split:][in_vocab[split:]], minlength=vocab_size).to(logits.device),
            )
        in_prompt, in_output = self._counts
        for index, row in enumerate(rows):
            path = [token for token in self.paths[row] if 0 <= token < vocab_size]
            output = in_output
            if path:
                output = in_output + torch.bincount(torch.tensor(path), minlength=vocab_size).to(logits.device)
            values = logits[index]
            if sampling.repetition_penalty != 1.0:
                factor = sampling.repetition_penalty
                repeated = torch.where(values > 0, values / factor, values * factor)
                values = torch.where((in_prompt + output) > 0, repeated, values)
            logits[index] = values - (sampling.frequency_penalty * output + sampling.presence_penalty * (output > 0))
