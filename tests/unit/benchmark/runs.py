"""Completions as a gateway would tell them."""

from __future__ import annotations

from paceline.cli.request import Completion
from paceline.generation import Evidence
from paceline.messages import FinishReason, TokenOrigin


def completion(num_tokens: int, evidence: Evidence) -> Completion:
    """A generation of tokens 0, 1, 2, ..."""
    return Completion(
        session="s",
        model="m",
        seed=0,
        warnings=(),
        text="",
        token_ids=tuple(range(num_tokens)),
        origins=(TokenOrigin.PLAIN,) * num_tokens,
        durable=True,
        finish_reason=FinishReason.LENGTH,
        stop_string="",
        prompt_tokens=3,
        evidence=evidence,
    )
