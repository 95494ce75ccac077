"""The best token of a row of logits, chosen on the device and left there: it can be fed before anybody has read it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.engine.processors import penalises
from paceline.engine.sampling import DraftChoice
from paceline.messages import SamplingParams


@dataclass(frozen=True, slots=True)
class BestToken:
    """A choice that only the device knows yet.

    Attributes:
        token: its id # [1] int64
        share: the row's own probability of it # [1] float32
        usable: whether the row is finite # [1] bool
    """

    token: torch.Tensor
    share: torch.Tensor
    usable: torch.Tensor


def takes_the_best(sampling: SamplingParams) -> bool:
    """Whether the token of a request is that of the best logit as the model gives it, whatever came before."""
    return sampling.greedy and not (sampling.logit_bias or penalises(sampling) or sampling.min_tokens)


@torch.inference_mode()
def best_token(logits: torch.Tensor, vocab_size: int) -> BestToken:
    """Chooses from a row.

    Args:
        logits: float32 # [1, >= vocab_size]
        vocab_size: ids at or above it are never chosen.
    """
    real = logits[:, :vocab_size]
    token = real.argmax(-1)  # the first of equals, which is the lowest id
    share = real.softmax(-1).gather(1, token.unsqueeze(1))[:, 0]
    return BestToken(token, share, real.isfinite().all(-1))


@torch.inference_mode()
def side_by_side(chosen: Sequence[BestToken]) -> torch.Tensor:
    """What `read` reads, in one piece: a row each for ids, shares and whether they are usable # [3, n] float64."""
    tokens, shares, usable = zip(*[(one.token, one.share, one.usable) for one in chosen], strict=True)
    return torch.stack([torch.cat(part).double() for part in (tokens, shares, usable)])


def read(choices: torch.Tensor) -> list[DraftChoice | None]:
    """Reads choices # [3, n]; None for one whose row is not finite."""
    tokens, shares, usable = choices.tolist()
    return [
        DraftChoice(int(token), share) if ok else None for token, share, ok in zip(tokens, shares, usable, strict=True)
    ]
