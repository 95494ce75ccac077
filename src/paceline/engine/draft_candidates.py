"""Several drafts for one position: the siblings of a draft tree.

The target takes the token with the best processed logit plus keyed noise. A drafter that shares the noise therefore
proposes the tokens with the best scores of its own, which is Gumbel-top-k sampling without replacement (Kool, van Hoof,
Welling 2019): the target's choice is far more often among them than among the drafter's most likely tokens.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.nn.functional import pad, threshold

from paceline.engine.processors import SessionRows, Shaping, penalises
from paceline.engine.sampling import DraftChoice, DraftRow, draft_sessions, draft_tokens
from paceline.speculation.noise import gumbel, noise_keys, uniform

_SHORTLIST = 512
"""How many of the best tokens are looked at before truncation is found to leave more than that."""
_BOUND_SLACK = 1e-3
"""Covers the rounding of bounds, which are computed in float32."""
_CPU_ELEMENTS = 1 << 16
"""Fits the temporaries of rows into the L2 cache."""
_LEAST_BOUND = -50.0
"""No bound is taken for lower than this below the best logit: float32 weights end there, with any noise on top."""


def draft_candidates(
    logits: torch.Tensor,  # [rows, >= vocab_size] float
    rows: Sequence[DraftRow],
    *,
    num: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    target_ids: torch.Tensor | None = None,  # [draft_vocab_size] int64
) -> list[tuple[DraftChoice, ...]]:
    """The `num` best draft tokens of every row, by the target's processing and the target's noise.

    The first one is what `draft_tokens` chooses; greedy requests get the best logits. Equal scores: the lower id first.

    Args:
        logits: rows of a draft model.
        rows: what is known of them.
        num: most candidates of a row, at least 1; there are fewer where truncation leaves fewer.
        vocab_size: ids at or above it are never chosen.
        eos_token_ids: ids that min_tokens masks.
        target_ids: for a model with a vocabulary of its own, the id of each of its columns: different ones, all below
            `vocab_size`, on the device of the logits. Columns beyond are padding.

    Returns:
        Per row its candidates, best first, each with the model's own probability of it; none where the row is not
        finite: stop drafting there.
    """
    if target_ids is None:
        sessions = draft_sessions(logits, rows, vocab_size, eos_token_ids)
        target_ids = torch.arange(min(vocab_size, logits.shape[1]), device=logits.device)
    else:
        rows, eos_token_ids = in_draft_ids(rows, eos_token_ids, target_ids, vocab_size)
        sessions = draft_sessions(logits, rows, len(target_ids), eos_token_ids)
    alike: dict[Shaping | None, list[int]] = {}
    for index, session in enumerate(sessions):
        alike.setdefault(session.shaping, []).append(index)
    candidates: dict[int, tuple[DraftChoice, ...]] = {}
    for shaping, members in alike.items():
        found = _candidates_alike(shaping, [sessions[member] for member in members], num, target_ids)
        candidates.update(zip(members, found, strict=True))
    return [candidates[index] for index in range(len(rows))]


def best_drafts(
    logits: Sequence[torch.Tensor] | torch.Tensor,  # [rows, >= vocab_size] float, or each row [1, >= vocab_size]
    rows: Sequence[DraftRow],
    *,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    target_ids: torch.Tensor | None = None,  # [draft_vocab_size] int64
) -> Sequence[DraftChoice | None]:
    """The best draft token of every row, whether the draft vocabulary is the target's or a part of it.

    Args:
        logits: rows of a draft model.
        rows: what is known of them.
        vocab_size: ids at or above it are never chosen.
        eos_token_ids: ids that min_tokens masks.
        target_ids: of a model with a vocabulary of its own; see `draft_candidates`.

    Returns:
        Per row its choice, or None where the row is not finite: stop drafting there.
    """
    if target_ids is None:
        return draft_tokens(logits, rows, vocab_size=vocab_size, eos_token_ids=eos_token_ids)
    if not isinstance(logits, torch.Tensor):
        logits = torch.cat(list(logits))
    found = draft_candidates(
        logits, rows, num=1, vocab_size=vocab_size, eos_token_ids=eos_token_ids, target_ids=target_ids
    )
    return [candidates[0] if candidates else None for candidates in found]


def in_draft_ids(
    rows: Sequence[DraftRow], eos_token_ids: tuple[int, ...], target_ids: torch.Tensor, vocab_size: int
) -> tuple[list[DraftRow], tuple[int, ...]]:
    """Rows and ends of generation in the columns of a draft vocabulary, for processing.

    A token that the draft model lacks becomes -1, which is ignored.
    """
    to_column = torch.full((vocab_size,), -1, dtype=torch.int64, device=target_ids.device)
    to_column[target_ids] = torch.arange(len(target_ids), device=target_ids.device)

    def columns_of(tokens: Sequence[int]) -> list[int]:
        ids = torch.tensor(tokens, dtype=torch.int64, device=target_ids.device)
        known = (ids >= 0) & (ids < vocab_size)
        return torch.where(known, to_column[torch.where(known, ids, 0)], -1).tolist()

    contexts: dict[int, list[int]] = {}  # the nodes of a tree have one in common
    translated = []
    for row in rows:
        sampling = row.sampling
        if sampling.logit_bias or sampling.stop_token_ids:
            biases = zip(columns_of(list(sampling.logit_bias)), sampling.logit_bias.values(), strict=True)
            row = replace(
                row,
                sampling=replace(
                    sampling,
                    logit_bias={column: bias for column, bias in biases if column >= 0},
                    stop_token_ids=tuple(columns_of(sampling.stop_token_ids)),
                ),
            )
        if penalises(sampling):
            # Without penalties only the number of tokens counts.
            if id(row.context) not in contexts:
                contexts[id(row.context)] = columns_of(row.context)
            row = replace(row, context=contexts[id(row.context)], drafted=columns_of(row.drafted))
        translated.append(row)
    return translated, tuple(columns_of(eos_token_ids))


def _candidates_alike(
    shaping: Shaping | None, sessions: Sequence[SessionRows], num: int, target_ids: torch.Tensor
) -> list[tuple[DraftChoice, ...]]:
    """`draft_candidates` for rows of one shaping."""
    processed = [session.processed((0,)) for session in sessions]
    usable = torch.cat([entry[1] for entry in processed])
    logits = torch.cat([entry[0] for entry in processed]) if len(processed) > 1 else processed[0][0]
    if not usable.all():
        logits = logits.masked_fill(~usable.unsqueeze(1), 0.0)
    if shaping is None:
        columns, scores = _best_columns(logits, num, target_ids)
    else:
        keys = noise_keys(
            [session.state.sampling.seed for session in sessions],
            [session.position(0) for session in sessions],
            device=logits.device,
        )
        columns, scores = _best_shaped(shaping, logits, keys, num, target_ids)
    probs = logits.softmax(-1).gather(1, columns)
    found = zip(usable.tolist(), target_ids[columns].tolist(), scores.tolist(), probs.tolist(), strict=True)
    return [
        tuple(DraftChoice(token, prob) for token, score, prob in zip(*row, strict=True) if ok and score > -torch.inf)
        for ok, *row in found
    ]


def _best_shaped(
    shaping: Shaping, logits: torch.Tensor, keys: torch.Tensor, num: int, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the best scores among those that truncation leaves, and the scores; -inf where there are fewer.

    Args:
        shaping: of all rows.
        logits: processed rows with finite maxima. # [rows, width] float32
        keys: of the noise. # [rows]
        num: how many; fewer if there are fewer columns.
        target_ids: ids of the columns. # [width]
    """
    if not shaping.truncates:
        return _best_noisy(logits, keys, num, target_ids)
    if logits.device.type == "cpu" and not shaping.top_k:
        rows = [slice(row, row + 1) for row in range(len(logits))]
        return _joined([_best_by_mass(shaping, logits[row], keys[row], num, target_ids) for row in rows])
    kept, columns = shaping.shortlist(logits, max(shaping.top_k + num, _SHORTLIST))
    scores = kept.double() + gumbel(keys, target_ids[columns])
    columns, scores = _in_order(columns, scores, num, target_ids)
    more_stay = (kept[:, -1] > -torch.inf) & (kept.shape[1] < logits.shape[1])
    if more_stay.any():
        wide = _best_noisy(shaping.kept(logits[more_stay]), keys[more_stay], num, target_ids)
        columns[more_stay], scores[more_stay] = wide
    return columns, scores


def _best_by_mass(
    shaping: Shaping, row: torch.Tensor, key: torch.Tensor, num: int, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_best_shaped` for one row # [1, width] under top_p or min_p, without looking for a floor that is far down.

    The best of all columns are the best of those that stay, once those that do not are taken out: a column stays under
    top_p if what is likelier has less mass than that.
    """
    logits, best = row[0], row.amax()
    least = best + math.log(shaping.min_p) if shaping.min_p else logits.new_tensor(-torch.inf)
    weights = (logits - best).exp_()
    total = weights.sum(dtype=torch.float64)
    mass = shaping.top_p * total
    if shaping.top_p < 1.0:
        # Few columns can have this much; if they are enough together, nothing else stays.
        heavy = (weights * _SHORTLIST >= total).nonzero()[:, 0]
        falling, order = logits[heavy].sort(descending=True)
        heavy = heavy[order]
        sums = weights[heavy].cumsum(0, dtype=torch.float64)
        if len(heavy) and sums[-1] >= mass:
            least = torch.maximum(least, falling[(sums - weights[heavy] < mass).sum() - 1])
            scores = falling.masked_fill(falling < least, -torch.inf).double() + gumbel(key, target_ids[heavy])
            return _in_order(heavy.unsqueeze(0), scores, num, target_ids)

    def is_cut_off(weight: float) -> bool:
        return bool(threshold(weights, weight, 0.0).sum(dtype=torch.float64) >= mass)

    left = row.masked_fill(row < least, -torch.inf) if shaping.min_p else row
    columns, scores = _best_noisy(left, key, 2 * num + 8, target_ids)
    found = weights[columns[0]]
    ranked = sorted(found.tolist(), reverse=True)
    num_left = bisect.bisect_left(ranked, True, key=is_cut_off) if shaping.top_p < 1.0 else len(ranked)
    if num_left < num:
        return _best_noisy(shaping.kept(row), key, num, target_ids)
    return _in_order(columns, scores.masked_fill(found < ranked[num_left - 1], -torch.inf), num, target_ids)


def _best_noisy(
    logits: torch.Tensor, keys: torch.Tensor, num: int, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_best_shaped` without truncation; -inf excludes a column.

    Logarithms are taken only where the score may be among the best: it is at most logit - log(uniform), and a few
    times `num` of those bounds are looked at. When what was left out could have been better, which is rare, the row is
    done in full.
    """
    elements = _CPU_ELEMENTS if logits.device.type == "cpu" else logits.numel()
    rows_at_once = max(1, elements // logits.shape[1])
    chunks = [slice(start, start + rows_at_once) for start in range(0, len(logits), rows_at_once)]
    return _joined([_best_noisy_chunk(logits[rows], keys[rows], num, target_ids) for rows in chunks])


def _best_noisy_chunk(
    logits: torch.Tensor, keys: torch.Tensor, num: int, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    best = logits.amax(-1, keepdim=True)
    weights = (logits - best).exp_()
    ranks, columns = weights.div_(uniform(keys, target_ids)).topk(min(4 * num + 16, logits.shape[1]), dim=-1)
    scores = logits.gather(1, columns).double() + gumbel(keys, target_ids[columns])
    left_out = ranks[:, -1].double().log_().clamp_(min=_LEAST_BOUND) + best[:, 0] + _BOUND_SLACK
    columns, scores = _in_order(columns, scores, num, target_ids)
    unsure = (scores[:, -1] <= left_out) & (ranks.shape[1] < logits.shape[1])
    if unsure.any():
        noisy = logits[unsure].double() + gumbel(keys[unsure], target_ids)
        columns[unsure], scores[unsure] = _best_columns(noisy, num, target_ids)
    return columns, scores


def _best_columns(scores: torch.Tensor, num: int, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of the best scores, and the scores. # [rows, min(num, width)]."""
    best, columns = scores.topk(min(num + 1, scores.shape[1]), dim=-1)
    last = best[:, -1]
    columns, best = _in_order(columns, best, num, target_ids)
    # As many equals as were looked at: the lowest ids may not be among them.
    for row in ((best[:, -1] == last) & (scores.shape[1] > num)).nonzero()[:, 0].tolist():
        columns[row], best[row] = (part[0] for part in _best_in_full(scores[row : row + 1], num, target_ids))
    return columns, best


def _best_in_full(scores: torch.Tensor, num: int, target_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.arange(scores.shape[1], device=scores.device).expand_as(scores)
    return _in_order(columns, scores, num, target_ids)


def _in_order(
    columns: torch.Tensor, scores: torch.Tensor, num: int, target_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The `num` best in falling order, the lower id first among equals; filled up with scores of -inf.

    Columns and scores # [rows, k].
    """
    by_id = target_ids[columns].argsort(dim=-1)
    order = by_id.gather(1, scores.gather(1, by_id).argsort(stable=True, dim=-1, descending=True))[:, :num]
    missing = (0, num - order.shape[1])
    return pad(columns.gather(1, order), missing), pad(scores.gather(1, order), missing, value=-torch.inf)


def _joined(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([columns for columns, _ in parts]), torch.cat([scores for _, scores in parts])
