"""The one table that `paceline bench methods` prints."""

from __future__ import annotations

from rich import box
from rich.table import Table

from paceline.benchmark.compare import Equality
from paceline.benchmark.memory import ROOM_TOKENS
from paceline.benchmark.method_rows import OVERALL, MethodRow, MethodsResult


def methods_table(result: MethodsResult) -> Table:
    """One line for each way to draft: what it takes, where its time goes, and how fast it is."""
    table = Table(
        title=f"{result.model}, {len(result.kinds)} kinds of prompts, {result.repeats} repeats, greedy, one session",
        caption=f"MB: weights + key/value rows for {ROOM_TOKENS} tokens. ms: medians per round. Acceptance: of the "
        "first positions. Ratios: to plain decoding in turns on the same fleet.",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("method", no_wrap=True)
    table.add_column("where", no_wrap=True)
    kinds = [kind.replace("_", "\n") for kind in (*result.kinds, OVERALL)]
    headings = ("extra MB", "draft\nms", "verify\nms", "wire\nms", "acceptance", "tokens/\npass", *kinds)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("texts", no_wrap=True)
    for row in result.rows:
        table.add_row(*_cells(row))
    for absentee in result.absent:
        table.add_row(absentee.name, absentee.placement, *[""] * len(headings), "not measured")
    return table


def notes(result: MethodsResult) -> list[str]:
    """Lines below the table: why rows are empty, and which texts differ."""
    lines = [f"{each.name} in the {each.placement} was not measured: {each.reason}" for each in result.absent]
    wrong = [row for row in result.rows if row.overall.equality is Equality.DIFFERENT]
    return lines + [
        f"{row.method} in the {row.placement}: texts differ from plain decoding's; that is a bug, please report it"
        for row in wrong
    ]


def _cells(row: MethodRow) -> list[str]:
    overall = row.overall
    return [
        row.method,
        row.placement,
        f"{row.memory.weights_mb:.0f} + {row.memory.kv_mb:.0f}" if row.placement else "",
        f"{overall.draft_ms:.1f}",
        f"{overall.verify_ms:.1f}",
        f"{overall.wire_ms:.1f}",
        " ".join([f"{share:.2f}".removeprefix("0") for share in overall.acceptance]),
        f"{overall.tokens_per_pass:.2f}",
        *[f"{figures.ratio:.2f}" for figures in row.kinds],
        overall.equality.value,
    ]
