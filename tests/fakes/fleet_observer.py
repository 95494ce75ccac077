"""An observer of a fleet: for tests of what a fleet tells."""

from __future__ import annotations

import asyncio


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()

    def changed(self, part: str, state: str, detail: str = "") -> None:
        self.changes.put_nowait((part, state, detail))

    async def next(self, part: str) -> tuple[str, str]:
        while True:
            name, state, detail = await asyncio.wait_for(self.changes.get(), 20)
            if name == part:
                return state, detail
