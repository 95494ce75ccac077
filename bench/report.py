"""Where the benchmarks of this folder write their results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.benchmark import report

RESULTS = Path(__file__).parent / "results"


def write_report(benchmark: str, results: Any) -> Path:
    """Writes bench/results/<benchmark>.json; see `paceline.benchmark.report.write_report`."""
    return report.write_report(benchmark, results, RESULTS)
