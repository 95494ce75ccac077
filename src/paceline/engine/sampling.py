"""From logits to tokens: the ordinary sampler, and the drafter's keyed choice.

The target engine hands the logits of a pass to `judge` (`engine/judging.py`); drafting methods hand theirs to
`draft_tokens`. Both sample by the same noise, keyed by (seed, absolute position, token id), after the same processing
(`engine/processors.py`). A row is treated the same whatever other rows come with it, so a token does not depend on
batch, block or neighbours.

Positions: with L committed tokens, the token sampled at tree node v has absolute position L + depth(v), and so has a
draft token proposed after a context of L + depth(v) tokens.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.engine.near_best import NearBest, choose_near_best
from paceline.engine.processors import PrefixState, SessionRows, Shaping, real_columns
from paceline.messages import DraftProbs, SamplingParams, TokenLogprobs
from paceline.speculation.noise import noise_keys

LOGPROB_FLOOR = -9999.0
"""Reported for tokens of probability zero, since -inf is no JSON number."""


@dataclass(frozen=True, slots=True)
class DraftRow:
    """What a drafting method knows of one row of its logits.

    Attributes:
        sampling: the request's parameters, seed included.
        context: the tokens before the drafted ones: committed, then assumed. Read during the call only.
        drafted: the chain proposed so far; the row is what the draft model says after it.
        generation_start: index in `context` of the first generated token; only affects speed.
    """

    sampling: SamplingParams
    context: Sequence[int]
    drafted: Sequence[int] = ()
    generation_start: int = 0


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A draft token.

    Attributes:
        token: its id.
        confidence: the draft model's own probability of it, after temperature, before truncation.
        draft_probs: what it was drawn from; None where it was chosen otherwise.
    """

    token: int
    confidence: float
    draft_probs: DraftProbs | None = None


def draft_tokens(
    logits: Sequence[torch.Tensor] | torch.Tensor,  # [rows, >= vocab_size] float, or each row [1, >= vocab_size]
    rows: Sequence[DraftRow],
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
) -> list[DraftChoice | None]:
    """Chooses one draft token per row with the target's noise, so that drafter and target tend to choose alike.

    The processing is the target's: bias, penalties, min_tokens, temperature, top_k, top_p, min_p; greedy requests get
    the best token. All of it can only change speed.

    Returns:
        Per row its choice, or None where the row is not finite: stop drafting there.
    """
    sessions = draft_sessions(logits, rows, vocab_size, eos_token_ids)
    if sessions and sessions[0].goes_row_by_row:
        processed = [session.processed_row(0) for session in sessions]
        tokens = _choose_apart([(session, 0) for session in sessions], processed)
        return [
            None if row is None or token is None else DraftChoice(token, _share(row, token))
            for row, token in zip(processed, tokens, strict=True)
        ]
    return _draft_together(sessions) if sessions else []


def _share(row: NDArray[np.float32], token: int) -> float:
    """The probability of a token."""
    weights = row - row[row.argmax()]
    np.exp(weights, out=weights)
    return float(weights[token] / weights.sum())


def _draft_together(sessions: Sequence[SessionRows]) -> list[DraftChoice | None]:
    """`draft_tokens` on a GPU, where every number that is fetched costs a wait: all are fetched in one go."""
    tokens = [token for (token,) in sample([(session, (0,)) for session in sessions])]
    chosen = torch.tensor([[token or 0] for token in tokens], device=sessions[0].logits.device)
    probs = torch.cat([session.processed((0,))[0] for session in sessions]).softmax(-1).gather(1, chosen)
    return [
        None if token is None else DraftChoice(token, confidence)
        for token, confidence in zip(tokens, probs[:, 0].tolist(), strict=True)
    ]


def draft_sessions(
    logits: Sequence[torch.Tensor] | torch.Tensor,
    rows: Sequence[DraftRow],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
) -> list[SessionRows]:
    """Every row of a draft model as a session of one row."""
    alone = logits.unsqueeze(1).unbind() if isinstance(logits, torch.Tensor) else logits
    return [
        SessionRows(
            real_columns(own, vocab_size),
            PrefixState(row.sampling, row.context, row.generation_start, eos_token_ids),
            (row.drafted,),
        )
        for own, row in zip(alone, rows, strict=True)
    ]


def sample(batch: Sequence[tuple[SessionRows, Sequence[int]]]) -> list[list[int | None]]:
    """The ordinary sampler: chooses a token from each listed row of each session.

    On a GPU all rows with the same temperature and truncation are worked on together.

    Returns:
        Per session one token per listed row; None where the row is not usable.
    """
    tokens: list[list[int | None]] = [[] for _ in batch]
    apart = [index for index, (session, _) in enumerate(batch) if session.goes_row_by_row]
    picks = iter(_sample_apart([(batch[index][0], row) for index in apart for row in batch[index][1]]))
    for index in apart:
        tokens[index] = list(itertools.islice(picks, len(batch[index][1])))
    alike: dict[tuple[Shaping | None, int, torch.device], list[int]] = {}
    for index, (session, _) in enumerate(batch):
        if not session.goes_row_by_row:
            alike.setdefault((session.shaping, session.logits.shape[1], session.logits.device), []).append(index)
    for members in alike.values():
        for member, chosen in zip(members, _sample_alike([batch[m] for m in members]), strict=True):
            tokens[member] = chosen
    return tokens


def _sample_apart(rows: Sequence[tuple[SessionRows, int]]) -> list[int | None]:
    """`sample` for rows on a CPU: each is gone through by itself."""
    return _choose_apart(rows, (session.processed_row(row) for session, row in rows))


def _choose_apart(
    rows: Sequence[tuple[SessionRows, int]], processed: Iterable[NDArray[np.float32] | None]
) -> list[int | None]:
    """`_sample_apart` for rows that are processed; the few tokens that are left of many, together."""
    tokens: list[int | None] = [None] * len(rows)
    shortlists: dict[int, NearBest] = {}
    for index, ((session, row), values) in enumerate(zip(rows, processed, strict=True)):
        if values is None:
            continue
        if session.shaping is None:
            tokens[index] = int(values.argmax())  # the first of equals, which is the lowest id
            continue
        logits = torch.from_numpy(values)
        if (shortlist := session.shaping.near_best(logits)) is not None:
            shortlists[index] = shortlist
        else:
            tokens[index] = int(session.shaping.choose(logits[None], _keys([(session, row)])))
    if shortlists:
        keys = _keys([rows[index] for index in shortlists])
        for index, token in zip(shortlists, choose_near_best(list(shortlists.values()), keys), strict=True):
            tokens[index] = _sample_alike([(rows[index][0], rows[index][1:])])[0][0] if token is None else token
    return tokens


def _keys(rows: Sequence[tuple[SessionRows, int]]) -> torch.Tensor:
    """The keys of rows of one device. # [rows] int64."""
    seeds = [session.state.sampling.seed for session, _ in rows]
    return noise_keys(seeds, [session.position(row) for session, row in rows], device=rows[0][0].logits.device)


def _sample_alike(batch: Sequence[tuple[SessionRows, Sequence[int]]]) -> list[list[int | None]]:
    """`sample` for sessions of one shaping, vocabulary and device."""
    processed = [session.processed(rows) for session, rows in batch]
    logits = torch.cat([p[0] for p in processed]) if len(processed) > 1 else processed[0][0]
    usable = torch.cat([p[1] for p in processed])
    if not usable.all():
        logits = logits.masked_fill(~usable.unsqueeze(1), 0.0)
    shaping = batch[0][0].shaping
    if shaping is None:
        chosen = logits.argmax(-1)  # the first of equals, which is the lowest id
    else:
        chosen = shaping.choose(logits, _keys([(session, row) for session, rows in batch for row in rows]))
    picks = iter(zip(chosen.tolist(), usable.tolist(), strict=True))
    return [[token if ok else None for token, ok in itertools.islice(picks, len(rows))] for _, rows in batch]


def token_logprobs(
    session: SessionRows, rows: Sequence[int], tokens: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of chosen tokens under the distribution that they were drawn from.

    That is the distribution after all processing, truncation included; a greedy request reports temperature 1 without
    truncation. Alternatives are ordered by their logits before truncation, the lower id first among equals.

    Args:
        session: the rows.
        rows: one row per token.
        tokens: what was chosen there.
        num_top: how many alternatives to report.
    """
    entries = []
    for row, token in zip(rows, tokens, strict=True):
        logits, _ = session.processed((row,))
        kept = logits if session.shaping is None else session.shaping.kept(logits)
        logprobs = kept[0].log_softmax(-1).clamp_(min=LOGPROB_FLOOR)
        best, ids = logits[0].topk(min(num_top, logits.shape[1]))
        ranked = sorted(
            zip(best.tolist(), ids.tolist(), logprobs[ids].tolist(), strict=True),
            key=lambda entry: (-entry[0], entry[1]),
        )
        top_tokens, top_logprobs = tuple(entry[1] for entry in ranked), tuple(entry[2] for entry in ranked)
        entries.append(TokenLogprobs(float(logprobs[token]), top_tokens, top_logprobs))
    return tuple(entries)
