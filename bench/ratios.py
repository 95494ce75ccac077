"""Ratios with the bound that each is to keep: the last lines of every benchmark of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Ratio:
    """A measured ratio and its bound.

    Attributes:
        name: what is divided by what.
        value: measured.
        at_most, at_least: the bound; None where there is none.
    """

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def bound(self) -> str:
        """The bound in words; empty without one."""
        if self.at_most is not None:
            return f"at most {self.at_most:g}"
        return "" if self.at_least is None else f"at least {self.at_least:g}"

    @property
    def kept(self) -> bool:
        """Whether the value keeps its bound; a ratio without one always does."""
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


def show_ratios(title: str, ratios: Sequence[Ratio]) -> None:
    """Prints the ratios with their bounds."""
    table = Table("ratio", "value", "bound", "", title=title)
    for ratio in ratios:
        verdict = "" if not ratio.bound else "kept" if ratio.kept else "[red]missed[/]"
        table.add_row(ratio.name, f"{ratio.value:.2f}", ratio.bound, verdict)
    Console(width=120).print(table)
