"""Drafts for the rule `ratio`: drawn from a short list of tokens, which is sent along.

What is sent is what the token is drawn from, to the last bit: the list is cut, normalised and rounded to float32 first,
then drawn from. The noise is a stream that nothing else uses; with the target's own the rule would be biased.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.draft_candidates import in_draft_ids
from paceline.engine.processors import SessionRows, Shaping
from paceline.engine.sampling import DraftChoice, DraftRow, draft_sessions
from paceline.messages import DraftProbs
from paceline.speculation.noise import NoiseStream, keyed_argmax_of, noise_keys


def draw_drafts(
    logits: torch.Tensor,  # [rows, >= vocab_size] float
    rows: Sequence[DraftRow],
    *,
    num_draft_probs: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...] = (),
    target_ids: torch.Tensor | None = None,  # [draft_vocab_size] int64
) -> list[DraftChoice | None]:
    """Draws one draft token per row of sampled requests, from the best tokens of the processed row.

    The processing is the target's: bias, penalties, min_tokens, temperature, top_k, top_p, min_p.

    Args:
        logits: rows of a draft model.
        rows: what is known of them.
        num_draft_probs: most tokens of a distribution; fewer where truncation leaves fewer.
        vocab_size: ids at or above it are never chosen.
        eos_token_ids: ids that min_tokens masks.
        target_ids: of a model with a vocabulary of its own; see `draft_candidates`.

    Returns:
        Per row its choice with `draft_probs`, or None where the row is not finite: stop drafting there.
    """
    if target_ids is not None:
        rows, eos_token_ids = in_draft_ids(rows, eos_token_ids, target_ids, vocab_size)
        vocab_size = len(target_ids)
    sessions = draft_sessions(logits, rows, vocab_size, eos_token_ids)
    choices: list[DraftChoice | None] = [None] * len(rows)
    alike: dict[Shaping, list[int]] = {}
    for index, session in enumerate(sessions):
        alike.setdefault(session.shaping or Shaping(), []).append(index)
    for shaping, members in alike.items():
        drawn = _draw_alike(shaping, [sessions[member] for member in members], num_draft_probs, target_ids)
        for member, choice in zip(members, drawn, strict=True):
            choices[member] = choice
    return choices


def _draw_alike(
    shaping: Shaping, sessions: Sequence[SessionRows], num_draft_probs: int, target_ids: torch.Tensor | None
) -> list[DraftChoice | None]:
    """`draw_drafts` for rows of one shaping."""
    processed = [session.processed((0,)) for session in sessions]
    usable = torch.cat([entry[1] for entry in processed])
    logits = torch.cat([entry[0] for entry in processed]).masked_fill(~usable.unsqueeze(1), 0.0)
    kept, ids = shaping.shortlist(logits, num_draft_probs)
    probs = kept.softmax(-1)
    keys = noise_keys(
        [session.state.sampling.seed for session in sessions],
        [session.position(0) for session in sessions],
        stream=NoiseStream.RATIO_DRAFT,
        device=logits.device,
    )
    tokens = keyed_argmax_of(probs.double().log_(), ids, keys)
    confidences = logits.softmax(-1).gather(1, tokens.unsqueeze(1))[:, 0]
    if target_ids is not None:
        tokens, ids = target_ids[tokens], target_ids[ids]
    columns = (usable.tolist(), tokens.tolist(), confidences.tolist(), ids.tolist(), probs.tolist())
    return [
        DraftChoice(token, confidence, _listed(row_ids, row_probs)) if ok else None
        for ok, token, confidence, row_ids, row_probs in zip(*columns, strict=True)
    ]


def _listed(ids: Sequence[int], probs: Sequence[float]) -> DraftProbs:
    num_listed = sum(prob > 0.0 for prob in probs)  # best first
    return DraftProbs(tuple(ids[:num_listed]), tuple(probs[:num_listed]))
