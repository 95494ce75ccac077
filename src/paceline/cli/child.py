"""One service process on this machine: started, waited for, stopped.

A child runs in a process group of its own, so that a Ctrl-C in the terminal reaches only the launcher, which then stops
its children in order. Should the launcher be killed, the children notice by themselves (`--parent-pid`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.cli.serve import service_environment
from paceline.errors import ConfigurationError

_READY_POLL_S = 0.05
_NUM_SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class ChildAddresses:
    """Where a process listens, each as host:port.

    Attributes:
        grpc: its rpc services.
        http: its HTTP API; empty when it has none.
        metrics: its `/metrics`; empty when it serves none.
    """

    grpc: str = ""
    http: str = ""
    metrics: str = ""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start a process.

    Attributes:
        name: for people, such as "verifier 0".
        command: program and arguments.
        ready_file: file in which the process tells its addresses when it is ready.
        log_file: file that gets its output.
        environment: variables on top of the launcher's own.
    """

    name: str
    command: tuple[str, ...]
    ready_file: Path
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A running process. Owned by one task."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.addresses = ChildAddresses()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def name(self) -> str:
        """Its name for people."""
        return self.spec.name

    @property
    def address(self) -> str:
        """Where its rpc services are, host:port; empty until it is ready."""
        return self.addresses.grpc

    @property
    def pid(self) -> int:
        """Process id; 0 before the start."""
        return self._process.pid if self._process else 0

    @property
    def has_ended(self) -> bool:
        """Whether it was started and has ended."""
        return self._process is not None and self._process.returncode is not None

    async def start(self) -> None:
        """Starts the process; its output goes to the log file, which is emptied first.

        Raises:
            ConfigurationError: the program cannot be run.
        """
        self.spec.ready_file.unlink(missing_ok=True)
        # What an earlier run left would be shown as the end of this one. Appending lets two processes share a file.
        self.spec.log_file.write_bytes(b"")
        with self.spec.log_file.open("ab") as log:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self.spec.command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**service_environment(), **self.spec.environment},
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigurationError(f"cannot start {self.name} ({self.spec.command[0]}): {error}") from error

    async def wait_ready(self, timeout_s: float) -> ChildAddresses:
        """Waits until the process has told its addresses, and returns them.

        Raises:
            ConfigurationError: it ended or was silent for `timeout_s`; the message has its last lines.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (addresses := self._read_addresses()) is None:
                    if self._started().returncode is not None:
                        raise ConfigurationError(self.ended_message("before it was ready"))
                    await asyncio.sleep(_READY_POLL_S)
        except TimeoutError:
            raise ConfigurationError(
                f"{self.name} was not ready after {timeout_s:.0f} s; the end of {self.spec.log_file}:\n"
                + self.last_lines()
            ) from None
        self.addresses = addresses
        return addresses

    async def wait_ended(self) -> int:
        """Waits for the end of the process and returns its exit status; negative: the signal that ended it."""
        return await self._started().wait()

    def terminate(self) -> None:
        """Sends SIGTERM, if there is still somebody to get it."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    async def stop(self, grace_s: float) -> None:
        """Asks the process to drain and stop; after `grace_s` it is killed with all that it started."""
        process = self._process
        if process is None:
            return
        if process.returncode is None:
            self.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await process.wait()
        # The group may outlive its leader: whatever the service has started goes with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

    def ended_message(self, when: str) -> str:
        """What to tell about a process that has ended: its exit status and its last lines."""
        status = self._started().returncode or 0
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"{self.name} {how} {when}; the end of {self.spec.log_file}:\n{self.last_lines()}"

    def last_lines(self) -> str:
        """The end of the log."""
        with contextlib.suppress(OSError):
            text = self.spec.log_file.read_text(errors="replace")
            return "\n".join(f"  {line}" for line in text.splitlines()[-_NUM_SHOWN_LINES:])
        return "  (no log)"

    def _started(self) -> asyncio.subprocess.Process:
        if self._process is None:
            raise RuntimeError(f"{self.name} is not started")
        return self._process

    def _read_addresses(self) -> ChildAddresses | None:
        """What the ready file says; None while there is none or it is being written."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            told = json.loads(self.spec.ready_file.read_text())
            if told["pid"] == self.pid:
                more = (str(told.get(f"{name}_address", "")) for name in ("http", "metrics"))
                return ChildAddresses(str(told["address"]), *more)
        return None
