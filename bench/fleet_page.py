"""Writes the tables of docs/benchmarks.md from bench/results. `tests/unit/bench/test_fleet_page.py` checks them.

    python -m bench.fleet_page

A table stands between a line `<!-- table NAME -->` and the next blank line; where nothing was measured a line says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.fleet_scale import CASES, DISTANCE, report_name
from bench.report import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
_TABLE = re.compile(r"^<!-- table (\w+) -->\n(?:.+\n)*", re.MULTILINE)
_Results = Mapping[str, Any]


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows))


def one_session(results: _Results) -> str:
    """One session through the fleet and in one process."""
    rows = []
    for row in results["rows"]:
        rest = f"{row['rest_ms']:.1f}" if row["rest_ms"] else ""
        times = [f"{row[name]:.1f}" for name in ("round_ms", "verify_ms", "draft_ms")]
        rows.append([row["way"], f"{row['tokens_per_second']:.1f}", *times, rest])
    return _lines(["way", "tokens/s", "round, ms", "verify", "draft", "rest"], rows)


def ratios(results: _Results) -> str:
    """Ratios of a benchmark with their aims."""
    rows = [[each["name"], f"{each['value']:.3g}", _aim(each)] for each in results["ratios"]]
    return _lines(["ratio", "measured", "aim"], rows)


def _aim(ratio: Mapping[str, Any]) -> str:
    if ratio["at_least"] is not None:
        return f"at least {ratio['at_least']:g}"
    return "" if ratio["at_most"] is None else f"at most {ratio['at_most']:g}"


def real_pair(results: _Results) -> str:
    """Ways to draft with the real pair."""
    names = ("to_plain", "to_plain_median", "decoding_to_plain", "tokens_per_pass", "acceptance", "ahead_hits")
    times = ("round_ms", "verify_ms", "draft_wait_ms", "draft_ms", "rest_ms")
    rows = [
        [
            row["way"],
            f"{row['tokens_per_second']:.1f}",
            *(f"{row[name]:.2f}" for name in names),
            *(f"{row[name]:.1f}" for name in times),
        ]
        for row in results["rows"]
    ]
    head = [
        "way",
        "tokens/s",
        "to plain",
        "median",
        "after the first token",
        "tokens per pass",
        "accepted",
        "ahead hits",
        "round, ms",
        "verify",
    ]
    return _lines([*head, "wait", "draft", "rest"], rows)


def by_distance(results: _Results) -> str:
    """Goodput and share of the ideal of each way at each distance, and what ahead gains."""
    cells: dict[str, dict[float, Mapping[str, Any]]] = {}
    for row in results["rows"]:
        cells.setdefault(row["way"], {})[row["rtt_ms"]] = row
    places = sorted({row["rtt_ms"] for row in results["rows"]})
    rows = [
        [way, *(f"{found[place]['tokens_per_second']:.1f}, {found[place]['achieved']:.2f}" for place in places)]
        for way, found in cells.items()
    ]
    rows.append(["ahead / sequential", *(f"{cells['ahead'][place]['over_sequential']:.2f}" for place in places)])
    return _lines(["way", *(f"{place:g} ms" for place in places)], rows)


def sessions(results: _Results) -> str:
    """Goodput, the ideal and processor time per round of each way."""
    rows = []
    for row in results["rows"]:
        run = row["middle"]
        cpu = run["cpu_ms_per_round"]
        fleet = ("gateway", "gateway_wire", "redis", "verifiers", "drafters")
        costs = [f"{cpu[name]:.2f}" for name in fleet]
        harness = f"{cpu['proxy'] + cpu['client']:.2f}"
        rows.append(
            [
                row["way"],
                f"{row['tokens_per_second']:.0f}",
                f"{row['ideal_tokens_per_second']:.0f}",
                f"{row['achieved']:.2f}",
                f"{run['rounds_per_second']:.0f}",
                *costs,
                harness,
                f"{run['busy_cores']:.1f}",
            ]
        )
    head = ["way", "tokens/s", "ideal", "achieved", "rounds/s", "gateway", "gRPC", "Redis", "verifiers", "drafters"]
    return _lines([*head, "client and proxy", "cores busy"], rows)


TABLES: Mapping[str, tuple[str, Callable[[_Results], str]]] = {
    "one_session": ("fleet", one_session),
    "one_session_ratios": ("fleet", ratios),
    "real_pair": ("fleet_ahead", real_pair),
    "real_pair_ratios": ("fleet_ahead", ratios),
    **{case: (report_name(case), by_distance if case == DISTANCE else sessions) for case in CASES},
}
"""By name: file in bench/results, and what makes the table of it."""


def filled(page: str) -> str:
    """The page with all tables as the results have them."""

    def table(found: re.Match[str]) -> str:
        report, make = TABLES[found[1]]
        path = RESULTS / f"{report}.json"
        if not path.is_file():
            return f"<!-- table {found[1]} -->\nNot measured yet: `make bench-fleet`.\n"
        content = json.loads(path.read_text("utf-8"))
        return f"<!-- table {found[1]} -->\n{make(content['results'])}"

    return _TABLE.sub(table, page)


def main() -> None:
    """Fills the page."""
    PAGE.write_text(filled(PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
