"""Plots of a run, as PNG files."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from paceline.training.history import History


def plot_loss(path: Path, history: History) -> None:
    """Loss, and what it is made of, over answer tokens learnt from."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point.tokens for point in history.losses]
    axes.plot(tokens, [point.loss for point in history.losses], color="black", label="loss")
    names = history.losses[0].parts if history.losses else {}
    for name in names:
        axes.plot(tokens, [point.parts[name] for point in history.losses], linewidth=0.8, label=name)
    axes.set(xlabel="answer tokens learnt from", ylabel="loss", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)


def plot_acceptance(path: Path, history: History) -> None:
    """Share of held-out positions with at least so many drafts accepted, and expected tokens per pass."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    tokens = [point.tokens for point in history.evaluations]
    depth = len(history.evaluations[0].at_least) if history.evaluations else 0
    for index in range(depth):
        shares = [point.at_least[index] for point in history.evaluations]
        axes.plot(tokens, shares, marker=".", label=f"at least {index + 1} accepted")
    axes.set(xlabel="answer tokens learnt from", ylabel="share of positions", title="Held-out acceptance of a chain")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    right = axes.twinx()
    per_pass = [point.tokens_per_pass for point in history.evaluations]
    right.plot(tokens, per_pass, color="black", linestyle="--", label="tokens per pass")
    right.set_ylabel("expected tokens per pass")
    lines, labels = axes.get_legend_handles_labels()
    more_lines, more_labels = right.get_legend_handles_labels()
    axes.legend(lines + more_lines, labels + more_labels, loc="upper left")
    figure.savefig(path, dpi=110)
