"""Sampling under top_p and min_p from the few best tokens of a row, where nothing else can stay.

The tokens within a fixed distance of the best one are the shortlist of the row: what is left out is less likely than
all of them. If they have the mass that top_p asks for, or if min_p cuts off before they end, then whatever truncation
leaves is among them, and no other token needs noise. The choice is that of the whole row, `Shaping.choose`.

Masses are sums of float32, in which the smallest of a large vocabulary may get lost. A shortlist is used only where no
error that this can make matters; if it could, the whole row is done exactly. For a CPU, like `row_search`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from paceline.engine.row_search import ids_near_best
from paceline.speculation.noise import gumbel

_REACH = 9.0
"""A token further below the best has less than 1/8000 of its weight."""
_MAX_TOKENS = 2048
"""Flat rows are done in full: this many of their tokens may not be enough."""
_FLOAT32_STEP = 2.0**-23
_ROUNDING_STEPS = 64
"""By how much single weights may be off, amply; their sum by less than one step more for each of them."""


@dataclass(frozen=True, slots=True)
class NearBest:
    """The best tokens of a row; all that truncation can leave is among them.

    Attributes:
        ids: in rising order. # [k] int64
        logits: scaled; -inf for those that min_p cuts off. # [k] float32
        shares: each token's mass of the whole row, or zeros without top_p. # [k] float32
        top_p: a token stays if what is likelier has less mass.
        doubt: masses may be off by so much.
    """

    ids: torch.Tensor
    logits: torch.Tensor
    shares: torch.Tensor
    top_p: float
    doubt: float

    @classmethod
    def of(cls, row: torch.Tensor, top_p: float, min_p: float) -> NearBest | None:
        """Takes the shortlist of a row; None where more may stay, or may not.

        Args:
            row: scaled logits with a finite maximum. # [vocab_size] float32
            top_p: of the request; 1 keeps everything.
            min_p: of the request; 0 keeps everything.
        """
        if top_p == 1.0 and min_p == 0.0:
            return None
        ids = ids_near_best(row, _REACH)
        if ids.shape[0] > _MAX_TOKENS:
            return None
        logits = row.index_select(0, ids)
        doubt = (row.shape[0] + _ROUNDING_STEPS) * _FLOAT32_STEP
        shares = row.softmax(-1).index_select(0, ids) if top_p < 1.0 else torch.zeros_like(logits)
        ends_by_min_p = min_p > 0.0 and math.log(min_p) > 1.0 - _REACH
        if not ends_by_min_p and float(shares.sum()) < top_p + doubt:
            return None
        if min_p > 0.0:
            logits = logits.masked_fill_(logits < logits.amax() + math.log(min_p), -torch.inf)
        return cls(ids, logits, shares, top_p, doubt)


def choose_near_best(
    shortlists: Sequence[NearBest],
    keys: torch.Tensor,  # [len(shortlists)] int64
) -> list[int | None]:
    """Samples one token from each shortlist, of at least one; None where rounding could decide what stays.

    The best of all tokens is the best of those that stay if it stays itself. If not, neither it nor any less likely
    token stays, and the rest is sampled again.
    """
    # All # [shortlists, longest shortlist], filled up with tokens that cannot win.
    ids = pad_sequence([shortlist.ids for shortlist in shortlists], batch_first=True)
    logits = pad_sequence([shortlist.logits for shortlist in shortlists], batch_first=True, padding_value=-torch.inf)
    shares = pad_sequence([shortlist.shares for shortlist in shortlists], batch_first=True)
    bounds = torch.tensor(
        [(entry.top_p - entry.doubt, entry.top_p + entry.doubt) for entry in shortlists], dtype=torch.float64
    )
    scores = logits.double() + gumbel(keys, ids)
    while True:
        winners = scores.argmax(-1, keepdim=True)  # the first of equals, which is the lowest id
        values = logits.gather(1, winners)
        likelier = torch.where(logits > values, shares, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        is_cut_off = likelier >= bounds[:, 1:]
        if not is_cut_off.any():
            break
        scores.masked_fill_(is_cut_off & (logits <= values), -torch.inf)
    stays = (likelier < bounds[:, :1]) | (likelier == 0.0)  # the best token always stays
    chosen = zip(ids.gather(1, winners)[:, 0].tolist(), stays[:, 0].tolist(), strict=True)
    return [token if sure else None for token, sure in chosen]
