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
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.near_best import NearBest
from paceline.errors import ModelError
from paceline.messages import SamplingParams
from paceline.speculation.noise import keyed_argmax, keyed_argmax_of

_SHORTLIST = 512
"""How many of the best tokens are looked at first: mostly all that truncation leaves is among them."""
_LEAST_WEIGHT = 2.0**-149
"""Smallest float32 above 0: no token with any weight is lighter."""


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
        if self.top_p < 1.0 and not self.top_k:
            return self._choose_by_mass(logits, keys)
        kept, ids, complete = self._shortlist(logits, None, _SHORTLIST)
        tokens = keyed_argmax_of(kept, ids, keys)
        if not complete.all():
            tokens[~complete] = keyed_argmax(self.kept(logits[~complete]), keys[~complete])
        return tokens

    def near_best(self, row: torch.Tensor) -> NearBest | None:
        """The few tokens of a scaled row that `choose` can choose, where it is known that they are few. On a CPU."""
        return None if self.top_k else NearBest.of(row, self.top_p, self.min_p)

    def _choose_by_mass(self, logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Samples rows under top_p without top_k, and without looking for its floor where that is far down.

        The best of all tokens is the best of those that stay if it stays itself, and top_p keeps it if what is likelier
        than it has less mass than top_p. If not, neither it nor any less likely token stays, and the rest is sampled
        again.
        """
        best = logits.amax(-1, keepdim=True)
        weights = (logits - best).exp_()
        totals = weights.sum(-1, dtype=torch.float64)
        left = logits
        if self.min_p > 0.0:
            left = logits.masked_fill(logits < best + math.log(self.min_p), -torch.inf)
        tokens = keyed_argmax(left, keys, None if self.min_p > 0.0 else weights)
        cut_off = self._cut_off_by_top_p(logits, weights, totals, tokens)
        while cut_off.any():
            values = logits[cut_off].gather(1, tokens[cut_off].unsqueeze(1))
            still_left = left[cut_off].masked_fill(logits[cut_off] <= values, -torch.inf)
            tokens[cut_off] = keyed_argmax(still_left, keys[cut_off])
            cut_off = self._cut_off_by_top_p(logits, weights, totals, tokens)
        return tokens

    def _cut_off_by_top_p(
        self, logits: torch.Tensor, weights: torch.Tensor, totals: torch.Tensor, tokens: torch.Tensor
    ) -> torch.Tensor:
        """Whether what is likelier than a row's token has the mass that top_p asks for. # [rows] bool."""
        likelier = torch.where(logits > logits.gather(1, tokens.unsqueeze(1)), weights, 0.0)
        return likelier.sum(-1, dtype=torch.float64) >= self.top_p * totals

    def shortlist(self, logits: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The best tokens of each row that truncation leaves.

        Args:
            logits: scaled rows with finite maxima. # [rows, vocab_size] float32
            length: most tokens of a row, at least 1.

        Returns:
            Their logits, -inf where fewer are left, and their ids. # [rows, min(length, vocab_size)]
        """
        kept, ids, _ = self._shortlist(logits, self._totals(logits), length)
        return kept, ids

    def _shortlist(
        self, logits: torch.Tensor, totals: torch.Tensor | None, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`shortlist`, and whether nothing else is left # [rows] bool."""
        best, ids = logits.topk(min(length, logits.shape[1]), dim=-1)
        floors, complete = self._floors(best, totals, logits.shape[1])
        return best.masked_fill(best < floors.unsqueeze(1), -torch.inf), ids, complete

    def kept(self, logits: torch.Tensor) -> torch.Tensor:
        """Scaled rows with -inf for the tokens that truncation cuts off. # [rows, vocab_size] float32."""
        if not self.truncates:
            return logits
        return logits.masked_fill(logits < self.floors(logits).unsqueeze(1), -torch.inf)

    def probs(self, logits: torch.Tensor) -> torch.Tensor:
        """The distributions that `choose` draws from. # [rows, vocab_size] float32."""
        return self.kept(logits).softmax(-1)

    def floors(self, logits: torch.Tensor) -> torch.Tensor:
        """The least logit of each row that top_k, top_p and min_p leave, each judging what the one before has left.

        Args:
            logits: scaled rows with finite maxima. # [rows, vocab_size] float32

        Returns:
            Float32 # [rows].
        """
        totals = self._totals(logits)
        best = logits.topk(min(_SHORTLIST, logits.shape[1]), dim=-1).values
        floors, complete = self._floors(best, totals, logits.shape[1])
        if not complete.all():
            wide = ~complete
            floors[wide] = self._floors_wide(logits[wide], None if totals is None else totals[wide])
        return floors

    def _floors_wide(self, logits: torch.Tensor, totals: torch.Tensor | None) -> torch.Tensor:
        """Floors of rows of which more stays than the shortlist holds."""
        num_candidates = vocab_size = logits.shape[1]
        if totals is not None:
            # Tokens that together have the mass which top_p asks for: nothing below the least of them stays.
            weights = (logits - logits.amax(-1, keepdim=True)).exp_()
            least, mass = totals.unsqueeze(1) / _SHORTLIST, self.top_p * totals
            heavy = weights.new_zeros(weights.shape)
            # All tokens together may miss a mass close to the total, which was summed in another order.
            while (least >= _LEAST_WEIGHT).any() and not (heavy.sum(-1, dtype=torch.float64) >= mass).all():
                least = least / 8
                heavy = torch.where(weights >= least, weights, 0.0)
            num_candidates = int((heavy > 0.0).sum(-1).amax())
        best = logits.topk(num_candidates, dim=-1).values
        return self._floors(best, totals, vocab_size)[0]

    def _totals(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Sum of exp(logit - best logit) where top_p needs it of the whole row. # [rows] float64."""
        if self.top_p == 1.0 or self.top_k:
            return None
        return (logits - logits.amax(-1, keepdim=True)).exp_().sum(-1, dtype=torch.float64)

    def _floors(
        self, best: torch.Tensor, totals: torch.Tensor | None, vocab_size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Floors judged from the best logits of each row in falling order, # [rows, width].

        Returns:
            The least logit that stays # [rows], and whether that is final # [rows] bool: a token was seen that top_k
            does not leave (without top_k: that does not stay), or all tokens were seen.
        """
        floors = torch.full_like(best[:, 0], -torch.inf)
        if self.top_k:
            floors = best[:, min(self.top_k, best.shape[1]) - 1].clone()
        final = (best[:, -1] < floors) | (best[:, -1] == -torch.inf) | (best.shape[1] == vocab_size)
        if self.top_p < 1.0:
            weights = (best - best[:, :1]).exp_().double()
            weights.masked_fill_(best < floors.unsqueeze(1), 0.0)
            sums = weights.cumsum(-1)
            mass = self.top_p * (sums[:, -1] if totals is None else totals)
            num_kept = (sums - weights < mass.unsqueeze(1)).sum(-1).clamp_(min=1)
            floors = torch.maximum(floors, best.gather(1, num_kept.unsqueeze(1) - 1)[:, 0])
        if self.min_p > 0.0:
            floors = torch.maximum(floors, best[:, 0] + math.log(self.min_p))
        return floors, final if self.top_k else final | (best[:, -1] < floors)


@dataclass(frozen=True, slots=True)
class PrefixState:
    """What the processors know of the tokens before the rows of one session.

    Attributes:
        sampling: the request's parameters.
        committed: tokens that come before all of the rows; read as long as the rows are worked on.
        generation_start: index in `committed` of the first generated token.
        eos_token_ids: ids that min_tokens masks, together with the stop ids.
    """

    sampling: SamplingParams
    committed: Sequence[int]
    generation_start: int
    eos_token_ids: tuple[int, ...] = ()


def penalises(sampling: SamplingParams) -> bool:
    """Whether a token's logit depends on the tokens before it."""
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1, 0, 0)


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
        self._seen: tuple[torch.Tensor, torch.Tensor] | None = None

    @cached_property
    def goes_row_by_row(self) -> bool:
        """Whether rows are sampled one at a time and only where the walk comes to them, or all in one go.

        The temporaries of one row fit into a CPU's caches, those of several do not; a GPU wants few launches.
        """
        return self.logits.device.type == "cpu"

    def make_ready(self) -> None:
        """Does what can be done before the logits are there; on a CPU they always are."""
        if self.goes_row_by_row:
            _ = self._rows

    def position(self, row: int) -> int:
        """Absolute position of the token chosen from a row."""
        return len(self.state.committed) + len(self.paths[row])

    def unusable(self, row: int) -> ModelError:
        """The error that ends a session which comes to a row that is not usable."""
        return ModelError(
            f"the logits for position {self.position(row)} are not finite or leave no token to choose: check the "
            "weights, their dtype and the request's logit_bias"
        )

    def processed(self, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows after bias, penalties, masks and temperature (1 when greedy), before truncation.

        Returns:
            The rows, float32, not to be changed, # [len(rows), vocab_size]; and whether each is usable: it came finite
            from the model and a token is left to choose. # [len(rows)] bool
        """
        logits = self.logits[rows[0] : rows[0] + 1] if len(rows) == 1 else self.logits[list(rows)]
        logits = logits.float()
        edited, best = self._edited(logits, rows), logits.amax(-1)
        usable = (logits.amin(-1) > -torch.inf) & (best < torch.inf)  # both carry NaN on, which compares false
        if edited is not logits:
            best = edited.amax(-1)
        if self.shaping is not None and self.shaping.temperature != 1.0:
            edited, best = edited / self.shaping.temperature, best / self.shaping.temperature
        return edited, usable & (best.abs() < torch.inf)

    def processed_row(self, row: int) -> NDArray[np.float32] | None:
        """`processed` for one row on a CPU; None if it is not usable.

        By numpy as far as possible, which begins far sooner than torch: of a small vocabulary that is what costs.

        Returns:
            The row, not to be changed. # [vocab_size]
        """
        values: NDArray[np.float32] = self._rows[row]
        best = values[values.argmax()]
        if not (values[values.argmin()] > -math.inf and best < math.inf):  # NaN is found by both, and compares false
            return None
        if self._is_edited(row):
            values = self._edited(torch.from_numpy(values[None]), (row,))[0].numpy()
            best = values[values.argmax()]
        if self.shaping is not None and self.shaping.temperature != 1.0:
            with np.errstate(over="ignore"):  # what is infinite then is found below
                values, best = values / np.float32(self.shaping.temperature), best / self.shaping.temperature
        return values if math.isfinite(best) else None

    @cached_property
    def _rows(self) -> NDArray[np.float32]:
        """All rows as they are in the memory of a CPU. # [rows, vocab_size]."""
        rows: NDArray[np.float32] = self.logits.float().numpy()
        return rows

    def _is_edited(self, row: int) -> bool:
        """Whether bias, penalties or the min_tokens mask change the row."""
        sampling = self.state.sampling
        return bool(sampling.logit_bias) or penalises(sampling) or self._is_too_short(row)

    def _is_too_short(self, row: int) -> bool:
        """Whether min_tokens forbids that the generation ends with the row's token."""
        return self.position(row) - self.state.generation_start < self.state.sampling.min_tokens

    def _edited(self, logits: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        """Applies bias, penalties and the min_tokens mask; gives back `logits` itself where nothing is to be done."""
        if not any(self._is_edited(row) for row in rows):
            return logits
        sampling = self.state.sampling
        vocab_size = logits.shape[1]
        logits = logits.clone()
        bias = {token: value for token, value in sampling.logit_bias.items() if 0 <= token < vocab_size}
        if bias:
            logits[:, list(bias)] += torch.tensor(list(bias.values()), dtype=torch.float32, device=logits.device)
        if penalises(sampling):
            self._penalise_(logits, rows)
        ends = [t for t in {*self.state.eos_token_ids, *sampling.stop_token_ids} if 0 <= t < vocab_size]
        for index, row in enumerate(rows if ends else ()):
            if self._is_too_short(row):
                logits[index, ends] = -torch.inf
        return logits

    def _penalise_(self, logits: torch.Tensor, rows: Sequence[int]) -> None:
        sampling = self.state.sampling
        if self._seen is None:
            start = self.state.generation_start
            self._seen = (
                torch.unique(self._ids(self.state.committed[:start])),
                self._ids(self.state.committed[start:]),
            )
        in_prompt, in_output = self._seen
        for index, row in enumerate(rows):
            output, counts = torch.unique(torch.cat([in_output, self._ids(self.paths[row])]), return_counts=True)
            if sampling.repetition_penalty != 1.0:
                seen = torch.unique(torch.cat([in_prompt, output]))
                values = logits[index, seen]
                factor = sampling.repetition_penalty
                logits[index, seen] = torch.where(values > 0, values / factor, values * factor)
            logits[index, output] -= sampling.frequency_penalty * counts + sampling.presence_penalty

    def _ids(self, tokens: Sequence[int]) -> torch.Tensor:
        """Those of the tokens that are in the vocabulary. # [n] int64."""
        ids = torch.tensor(tokens, dtype=torch.int64)
        return ids[(ids >= 0) & (ids < self.logits.shape[1])].to(self.logits.device)


def real_columns(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The logits without padding columns."""
    return logits if logits.shape[1] <= vocab_size else logits[:, :vocab_size]
