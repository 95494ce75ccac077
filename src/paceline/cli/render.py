"""How tokens and evidence look in a terminal. Knows no network and no process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from paceline.messages import TokenOrigin

STYLES = {
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.BONUS: "cyan",
    TokenOrigin.RECOVERED: "yellow",
    TokenOrigin.PLAIN: "",
    TokenOrigin.RECORDED: "dim",
}
"""Colour of a token by where it came from."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What the last line after a generation tells.

    Attributes:
        tokens: generated tokens.
        passes: the target's passes, the prompt's included.
        tokens_per_pass: their quotient.
        acceptance: accepted draft tokens divided by judged ones; None when nothing was judged.
        tokens_per_second: tokens divided by the time from the request to the end, the prompt's pass included.
        draft_ms: time of the drafter.
        verify_ms: time of the verifier.
        wire_ms: round trips less the replicas' own time.
    """

    tokens: int
    passes: int
    tokens_per_pass: float
    acceptance: float | None
    tokens_per_second: float
    draft_ms: float
    verify_ms: float
    wire_ms: float


def legend() -> Text:
    """What the colours mean."""
    line = Text("each token is an ", "dim")
    line.append("accepted", STYLES[TokenOrigin.ACCEPTED])
    line.append(" draft, ")
    line.append("recovered", STYLES[TokenOrigin.RECOVERED])
    line.append(" after a wrong one, a ")
    line.append("bonus", STYLES[TokenOrigin.BONUS])
    line.append(" after right ones, or plain")
    return line


def coloured(text: str, lengths: Sequence[int], origins: Sequence[TokenOrigin]) -> Text:
    """A chunk's text, each token's part in the colour of its origin.

    Args:
        text: the chunk's text.
        lengths: characters of it that each token made visible.
        origins: where each token came from. Text beyond what the lengths cover has the colour of the last token.
    """
    line, start = Text(), 0
    for length, origin in zip(lengths, origins, strict=False):
        line.append(text[start : start + length], STYLES[origin])
        start += length
    if start < len(text):
        line.append(text[start:], STYLES[origins[-1]] if origins else "")
    return line


def summary_line(summary: Summary) -> str:
    """The one line after a generation."""
    parts = [
        f"{summary.tokens} tokens",
        f"{summary.passes} passes",
        f"{summary.tokens_per_pass:.2f} tokens/pass",
        "no drafts" if summary.acceptance is None else f"acceptance {summary.acceptance:.0%}",
        f"{summary.tokens_per_second:.1f} tok/s",
        f"draft {summary.draft_ms:.0f} ms, verify {summary.verify_ms:.0f} ms, wire {summary.wire_ms:.0f} ms",
    ]
    return " | ".join(parts)
