"""One process of the fleet over all its lives: it is started, dies, and is started again, as a cluster would do it.

A member is owned by its keeper task. Faults only send signals: the keeper notices the end, and begins the next life.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from paceline.cli.child import Child, ChildSpec
from paceline.errors import ConfigurationError
from paceline.session.embedded import HOST, find_server, tethered

READY_TIMEOUT_S = 120.0
ENVIRONMENT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
"""A kernel for each shape of a batch is kept, up to 1024 of them: hundreds of passes long that looks like a leak."""
_POLL_S = 0.02
_RETRY_S = 0.5


class Kind(Enum):
    """What a member is."""

    GATEWAY = "gateway"
    VERIFIER = "verifier"
    DRAFTER = "drafter"
    REDIS = "redis"


@dataclass(slots=True)
class Member:
    """One process.

    Attributes:
        name: such as "verifier-1".
        kind: what it is.
        port: on which it listens, in every life.
        folder: for its logs and ready file.
        flags: of a service; nothing for Redis.
        changed: told when it can be used or cannot be any more.
        pid: of its present life; 0 while there is none.
        num_lives: processes started so far.
        up: it serves.
        kills: `kill -9` so far.
        stopping: no further life is wanted.
        pause_s: between the end of this life and the next one.
        loses_data: Redis begins the next life empty.
        ended_by_itself: one line for each end that nobody asked for.
    """

    name: str
    kind: Kind
    port: int
    folder: Path
    flags: dict[str, str]
    changed: Callable[[], None]
    pid: int = 0
    num_lives: int = 0
    up: bool = False
    kills: int = 0
    stopping: bool = False
    pause_s: float = 0.0
    loses_data: bool = False
    ended_by_itself: list[str] = field(default_factory=list)
    metrics: str = ""
    _killed: bool = False

    @property
    def address(self) -> str:
        """host:port."""
        return f"{HOST}:{self.port}"

    @property
    def logs(self) -> list[Path]:
        """One file for each life."""
        return sorted(self.folder.glob("life-*.log"))

    async def keep(self) -> None:
        """The owner task: one life after another, until it is told to stop."""
        self.folder.mkdir(parents=True, exist_ok=True)
        while not self.stopping:
            child = Child(self._spec())
            try:
                await self._live(child)
            finally:
                self.pid = 0
                self._set_up(False)
                if child.pid and not child.has_ended:
                    os.kill(child.pid, signal.SIGKILL)
                    await child.wait_ended()
            self._judge_end(child)
            await asyncio.sleep(self.pause_s)
            self.pause_s = 0.0

    async def _live(self, child: Child) -> None:
        if self.loses_data:
            shutil.rmtree(self._data, ignore_errors=True)
            self.loses_data = False
        self._data.mkdir(exist_ok=True)
        self._killed = False
        await child.start()
        self.num_lives += 1
        self.pid = child.pid
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(self._become_ready(child))
            await child.wait_ended()
            waiting.cancel()

    async def _become_ready(self, child: Child) -> None:
        if self.kind is Kind.REDIS:
            while not await self._answers_ping():  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        else:
            try:
                self.metrics = (await child.wait_ready(READY_TIMEOUT_S)).metrics
            except ConfigurationError:
                if not child.has_ended:
                    raise  # it hangs
                return  # `_judge_end` says why it has ended
        self._set_up(True)

    def _judge_end(self, child: Child) -> None:
        if self._killed or self.stopping:
            return
        # As a cluster does: begun again after a while.
        self.pause_s = _RETRY_S
        self.ended_by_itself.append(child.ended_message("although nobody killed it"))

    async def _answers_ping(self) -> bool:
        try:
            reader, writer = await asyncio.open_connection(HOST, self.port)
            writer.write(b"PING\r\n")
            answer = await reader.readline()
            writer.close()
        except OSError:
            return False
        return answer == b"+PONG\r\n"

    def _set_up(self, up: bool) -> None:
        if self.up is not up:
            self.up = up
            self.changed()

    # --- faults -----------------------------------------------------------------------------------------------------

    def kill(self, pause_s: float = 0.0, *, loses_data: bool = False) -> bool:
        """kill -9; says whether there was anybody to be killed.

        Args:
            pause_s: before the next life.
            loses_data: the next life of Redis begins empty.
        """
        if not self.pid or self._killed:
            return False
        self._killed = True
        self.kills += 1
        self.pause_s, self.loses_data = pause_s, loses_data
        # Down from this moment on, and not only when the keeper hears of it.
        self._set_up(False)
        os.kill(self.pid, signal.SIGKILL)
        return True

    def send(self, number: signal.Signals, pid: int) -> bool:
        """Sends a signal to a life, if it is the present one; says whether it is."""
        if not pid or self.pid != pid or self._killed:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return True

    # --- how to start it ----------------------------------------------------------------------------------------------

    @property
    def _data(self) -> Path:
        return self.folder / "data"

    def _spec(self) -> ChildSpec:
        ready_file = self.folder / "ready.json"
        log_file = self.folder / f"life-{self.num_lives:03}.log"
        command = self._redis_command() if self.kind is Kind.REDIS else self._service_command(ready_file)
        return ChildSpec(self.name, tuple(command), ready_file, log_file, ENVIRONMENT)

    def _service_command(self, ready_file: Path) -> list[str]:
        common = {
            "port": str(self.port),
            "metrics-port": "0",
            "ready-file": str(ready_file),
            "parent-pid": str(os.getpid()),
        }
        flags = [f"--{name}={value}" for name, value in {**self.flags, **common}.items()]
        return [sys.executable, "-m", f"paceline_{self.kind.value}", *flags]

    def _redis_command(self) -> list[str]:
        # What it has answered is in the file, so that a killed server has it when it is back.
        return tethered(
            [
                *(str(find_server()), "--port", str(self.port), "--bind", HOST, "--protected-mode", "yes"),
                *("--dir", str(self._data), "--save", "", "--appendonly", "yes", "--appendfsync", "no"),
            ]
        )
