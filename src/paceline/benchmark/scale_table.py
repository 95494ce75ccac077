"""The table that `paceline bench scale` prints, the lines below it, and the plot over distances."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from paceline.benchmark.scale import WAYS, ScaleResult, ScaleRow
from paceline.errors import ConfigurationError

_COLORS = dict(zip(WAYS, ("tab:gray", "tab:green", "tab:blue", "tab:orange", "tab:red"), strict=True))
_FULL = 0.9
"""From this share of its time on a part counts as what limits the rest."""


def scale_table(result: ScaleResult) -> Table:
    """One line for each way of each case."""
    options = result.plan.options
    verify, draft = options.verify_pass, options.draft_pass
    prepared = f", {options.prepared_outcomes} outcomes prepared" if options.prepared_outcomes else ""
    table = Table(
        title=f"{options.verifiers} verifiers ({verify.pass_ms:g} ms a pass and {verify.token_ms:g} a token), "
        f"{options.drafters} drafters ({draft.pass_ms:g} and {draft.token_ms:g}), acceptance {options.acceptance:g}, "
        f"blocks of {options.num_speculative_tokens}{prepared}, {result.plan.repeats} x {result.plan.seconds:g} s",
        caption="Medians. Achieved: goodput divided by that of the ideal without software. CPU: milliseconds per "
        "round, of all verifiers or drafters together. Busy: share of the time in passes. Ahead: share of rounds "
        "whose block was there.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for heading in ("sessions", "RTT\nms"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("way", no_wrap=True)
    headings = ("tokens\n/s", "ideal", "achieved", "to\nplain", "rounds\n/s", "gateway\nCPU", "gRPC\nCPU", "Redis\nCPU")
    for heading in (*headings, "verifier\nCPU", "drafter\nCPU", "verifier\nbusy", "drafter\nbusy", "ahead"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: ScaleRow) -> list[str]:
    run, cpu = row.middle, row.middle.cpu_ms_per_round
    shares = [f"{share:.2f}" for share in (run.verifier_busy, run.drafter_busy, run.ahead_hits)]
    costs = [f"{ms:.2f}" for ms in (cpu.gateway, cpu.gateway_wire, cpu.redis, cpu.verifiers, cpu.drafters)]
    return [
        str(row.sessions),
        f"{row.rtt_ms:g}",
        row.way,
        f"{row.tokens_per_second:.1f}",
        f"{row.ideal_tokens_per_second:.1f}",
        f"{row.achieved:.3f}",
        f"{row.over_plain:.2f}" if row.over_plain else "",
        *([f"{run.rounds_per_second:.1f}", *costs, *shares] if run.rounds_per_second else [""] * 9),
    ]


def notes(result: ScaleResult, num_cores: int | None = None) -> list[str]:
    """Lines below the table: what ahead gains, and what limits the goodput of each case.

    Args:
        result: what was measured.
        num_cores: of the machine; None: this one.
    """
    cores = num_cores or os.cpu_count() or 1
    lines: list[str] = []
    for row in result.rows:
        case = f"{row.sessions} sessions, {row.rtt_ms:g} ms"
        if row.way == "ahead" and row.over_sequential:
            lines.append(f"{case}: drafting ahead gives {row.over_sequential:.3f} times what drafting in turn does")
        if row.middle.rounds_per_second:
            lines.append(f"{case}, {row.way}: {_limit(row, cores)}")
    return lines


def _limit(row: ScaleRow, cores: int) -> str:
    run, cpu = row.middle, row.middle.cpu_ms_per_round
    gateway_share = cpu.gateway * run.rounds_per_second / 1e3
    full = [
        (f"the gateway's event loop, busy for {gateway_share:.0%} of the time", gateway_share),
        (f"the machine: {run.busy_cores:.1f} of its {cores} cores are busy with this alone", run.busy_cores / cores),
        (f"the verifiers, in passes for {run.verifier_busy:.0%} of the time", run.verifier_busy),
        (f"the drafters, in passes for {run.drafter_busy:.0%} of the time", run.drafter_busy),
    ]
    found = [what for what, share in full if share >= _FULL]
    if not found:
        return "nothing of it is full: its parts wait for one another, or for a machine that does other work too"
    return "limited by " + " and ".join(found)


def check_plotting() -> None:
    """Finds out before anything is measured whether it could be plotted.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigurationError(
            "a plot needs matplotlib: run `pip install 'paceline[train]'`, or leave --plot out", field="plot"
        )


def plot_distances(path: Path, rows: Sequence[ScaleRow]) -> None:
    """Goodput of each way over the distance of the replicas, with the ideal of each; a PNG file.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    check_plotting()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    places = sorted({row.rtt_ms for row in rows})
    for way in dict.fromkeys(row.way for row in rows):
        line = [row for row in rows if row.way == way]
        color = _COLORS[way]
        at = [places.index(row.rtt_ms) for row in line]
        axes.plot(at, [row.tokens_per_second for row in line], marker="o", color=color, label=way)
        axes.plot(at, [row.ideal_tokens_per_second for row in line], color=color, linestyle=":", linewidth=1)
    axes.set_xticks(range(len(places)), [f"{place:g}" for place in places])
    sessions = rows[0].sessions
    axes.set(
        xlabel="round trip between gateway and replicas, ms (dotted: ideal)",
        ylabel="tokens per second",
        title=f"Simulated devices, {sessions} {'session' if sessions == 1 else 'sessions'}",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110)
