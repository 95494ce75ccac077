"""The tables that `make bench` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from paceline.benchmark.compare import WhereTimeGoes

if TYPE_CHECKING:
    from bench.run import Results


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))


def ratio_table(results: Results) -> Table:
    """One line per method and block size."""
    table = _table(f"median over {results.num_prompts} prompts, {results.repeats} repeats")
    table.add_column("method")
    headings = ("K", "tokens/pass", "acceptance", "tok/s", "to plain", "to\ntransformers", "texts")
    for heading in headings:
        table.add_column(heading, justify="right")
    table.add_row(
        "plain decoding", "0", "1.00", "", f"{results.plain_tokens_per_second:.1f}", "1.00x", _plain_to(results)
    )
    if results.transformers_tokens_per_second:
        table.add_row("transformers.generate", "", "1.00", "", f"{results.transformers_tokens_per_second:.1f}")
    for row in results.rows:
        to_transformers = f"{row.ratio_to_transformers:.2f}x" if row.ratio_to_transformers else ""
        table.add_row(
            row.method,
            str(row.num_speculative_tokens),
            f"{row.tokens_per_pass:.2f}",
            f"{row.acceptance:.0%}",
            f"{row.tokens_per_second:.1f}",
            f"{row.ratio:.2f}x",
            to_transformers,
            ", ".join(sorted({figure.equality.value for figure in row.prompts})),
        )
    return table


def _plain_to(results: Results) -> str:
    if not results.transformers_tokens_per_second:
        return ""
    return f"{results.plain_tokens_per_second / results.transformers_tokens_per_second:.2f}x"


def prompt_table(results: Results) -> Table:
    """Ratios by prompt."""
    table = _table("ratio to plain decoding by prompt (tokens/pass)")
    table.add_column("prompt")
    for row in results.rows:
        method = row.method.replace(",", ",\n")
        table.add_column(f"{method}\nK={row.num_speculative_tokens}", justify="right")
    for index, figure in enumerate(results.rows[0].prompts):
        cells = [row.prompts[index] for row in results.rows]
        table.add_row(figure.prompt, *[f"{cell.ratio:.2f}x ({cell.tokens_per_pass:.1f})" for cell in cells])
    return table


def time_table(results: Results) -> Table:
    """Where the time goes, in milliseconds per token."""
    table = _table("milliseconds per token: total = verify + draft wait + rest; the others run beside")
    table.add_column("method")
    for heading in ("K", "total", "verify", "draft wait", "rest", "draft", "wire", "queue"):
        table.add_column(heading, justify="right")
    table.add_row("plain decoding", "0", *_times(results.plain_where_time_goes))
    for row in results.rows:
        table.add_row(row.method, str(row.num_speculative_tokens), *_times(row.where_time_goes))
    return table


def _times(where: WhereTimeGoes) -> list[str]:
    values = (
        where.total_ms,
        where.verify_ms,
        where.draft_wait_ms,
        where.rest_ms,
        where.draft_ms,
        where.wire_ms,
        where.queue_ms,
    )
    return [f"{value:.1f}" for value in values]
