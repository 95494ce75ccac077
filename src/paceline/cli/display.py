"""Shows how a fleet starts: a live table in a terminal, lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from paceline.cli.console import err


class Display:
    """The parts of a fleet and their states, on standard error. A `FleetObserver`; use as a context manager."""

    def __init__(self) -> None:
        self._console = err()
        self._states: dict[str, tuple[str, str]] = {}
        self._spinners: dict[str, Spinner] = {}
        self._live = Live(get_renderable=self._table, console=self._console, transient=True, refresh_per_second=8)

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def changed(self, part: str, state: str, detail: str = "") -> None:
        """Shows a part's new state."""
        self._states[part] = (state, detail)
        if not self._live.is_started:
            self._console.print(f"{part}: {state} {detail}".rstrip(), markup=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for part, (state, detail) in self._states.items():
            if state == "ready":
                mark: Text | Spinner = Text("✓", "green")
            else:
                mark = self._spinners.setdefault(part, Spinner("dots"))
            table.add_row(mark, part, Text(state), Text(detail, "dim"))
        return table
