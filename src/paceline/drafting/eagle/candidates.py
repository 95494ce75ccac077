"""What may follow the nodes of a draft, by the head's logits and the request's noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from paceline.drafting.eagle.growth import Candidate
from paceline.engine.draft_candidates import draft_candidates
from paceline.engine.sampling import DraftChoice, DraftRow
from paceline.speculation.noise import gumbel, noise_keys

_LEAST_PROB = 1e-30


def find_candidates(
    logits: torch.Tensor,  # [rows, >= vocab_size or draft_vocab_size]
    rows: Sequence[DraftRow],
    *,
    num: int,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    target_ids: torch.Tensor | None,
) -> list[list[Candidate]]:
    """The `num` best tokens after each row, best first; none where the row is not finite.

    See `draft_candidates`, whose arguments these are.
    """
    found = draft_candidates(
        logits, rows, num=num, vocab_size=vocab_size, eos_token_ids=eos_token_ids, target_ids=target_ids
    )
    return [
        [Candidate(choice.token, choice.confidence, chance) for choice, chance in zip(choices, chances, strict=True)]
        for choices, chances in zip(found, _chances(found, rows), strict=True)
    ]


def _chances(found: Sequence[Sequence[DraftChoice]], rows: Sequence[DraftRow]) -> list[list[float]]:
    """How likely the target takes each candidate.

    For a greedy request that is the head's own probability. A sampled one's noise is known: a token that it lifts is
    likely, however improbable it was before. The target takes the best of log-probability plus noise, as it takes the
    best log-probability of a greedy request, so the same function of these sums tells the chance.
    """
    noisy = [
        (index, choice) for index, choices in enumerate(found) if not rows[index].sampling.greedy for choice in choices
    ]
    noise: dict[int, list[float]] = {}
    if noisy:
        keys = noise_keys(
            [rows[index].sampling.seed for index, _ in noisy],
            [len(rows[index].context) + len(rows[index].drafted) for index, _ in noisy],
        )
        values = gumbel(keys, torch.tensor([[choice.token] for _, choice in noisy]))[:, 0].tolist()
        for (index, _), value in zip(noisy, values, strict=True):
            noise.setdefault(index, []).append(value)
    return [
        _softmax(
            [
                math.log(max(choice.confidence, _LEAST_PROB)) + value
                for choice, value in zip(choices, noise[index], strict=True)
            ]
        )
        if index in noise
        else [choice.confidence for choice in choices]
        for index, choices in enumerate(found)
    ]


def _softmax(scores: Sequence[float]) -> list[float]:
    best = max(scores)
    weights = [math.exp(score - best) for score in scores]
    total = sum(weights)
    return [weight / total for weight in weights]
