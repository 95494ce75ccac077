"""Oracle 5, as far as memory and open files go: each process against itself, once it had warmed up in its present life.

A process that is killed begins a new life, and with it a new comparison. Seconds in which it could not work, since it
was starting, frozen or cut off, do not warm it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from tests.chaos.fleet import ChaosFleet

WARM_UP_S = 10.0
"""Of work, until allocators and kernels have most of what they will take."""
MORE_FILES = 40
"""Connections to Redis are kept, as many as were needed at once."""
MORE_BYTES = 24 * 2**20
"""With a tenth: allocators and kernels go on growing a little."""
_LOOK_S = 1.0
CLIENTS = "clients"
"""The process that runs the clients: this one."""


@dataclass(frozen=True, slots=True)
class Size:
    """What a process takes.

    Attributes:
        files: open file descriptors.
        memory_bytes: resident memory.
    """

    files: int
    memory_bytes: int

    @classmethod
    def of(cls, pid: int) -> Size | None:
        """Now; None if it is gone."""
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            return cls(process.num_fds(), process.memory_info().rss)
        return None


@dataclass(slots=True)
class _Life:
    worked_s: float = 0.0
    warm: Size | None = None


class Growth:
    """Watches processes from their beginning."""

    def __init__(self) -> None:
        self._lives: dict[tuple[str, int], _Life] = {}

    async def watch(self, fleet: ChaosFleet) -> None:
        """Looks every second until it is cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            self.note({**fleet.working(), CLIENTS: os.getpid()}, _LOOK_S)

    def note(self, working: Mapping[str, int], seconds: float) -> None:
        """Tells who has worked so long since the last time: process ids by name."""
        for key in working.items():
            life = self._lives.setdefault(key, _Life())
            life.worked_s += seconds
            if life.warm is None and life.worked_s >= WARM_UP_S:
                life.warm = Size.of(key[1])

    def compared(self) -> dict[str, tuple[Size, Size]]:
        """Sizes when warm and now, by name, of those that have warmed up and still live."""
        sizes = {name: (life.warm, Size.of(pid)) for (name, pid), life in self._lives.items()}
        return {name: (warm, now) for name, (warm, now) in sizes.items() if warm is not None and now is not None}

    def memory_mib(self) -> dict[str, tuple[int, int]]:
        """Resident memory of `compared`."""
        return {
            name: (warm.memory_bytes >> 20, now.memory_bytes >> 20) for name, (warm, now) in self.compared().items()
        }

    def complaints(self) -> list[str]:
        """Processes that hold more than a moment of work can leave behind."""
        grown = []
        for name, (warm, now) in self.compared().items():
            if now.files > warm.files + MORE_FILES:
                grown.append(f"{name} has {now.files} open files, and had {warm.files}")
            if now.memory_bytes > warm.memory_bytes * 1.1 + MORE_BYTES:
                grown.append(f"{name} takes {now.memory_bytes >> 20} MiB, and took {warm.memory_bytes >> 20}")
        return grown
