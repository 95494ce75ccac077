"""Gateways as processes on ports of their own, over the replicas of a fleet and one Redis: to be killed and stopped.

async with gateways(fleet, server.url, 3) as processes:
    client = AsyncClient([each.address for each in processes])
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from tests.integration.fleet import MODEL, TIMEOUT_S, Fleet, until
from tests.integration.node import free_port


class GatewayProcess:
    """One gateway; `start` brings it back on its port after a kill."""

    def __init__(self, fleet: Fleet, redis_url: str, folder: Path, name: str) -> None:
        self._ready_file = folder / f"{name}.json"
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        settings = {
            "model": str(fleet.folder),
            "model-name": MODEL,
            "port": str(port),
            "redis-url": redis_url,
            "verifiers": ",".join(node.address for node in fleet.verifiers),
            "drafters": ",".join(node.address for node in fleet.drafters) or "none",
            "ready-file": str(self._ready_file),
            "log-level": "warning",
            # A machine that is busy is no silent store.
            "redis-ack-timeout-ms": "2000",
            "redis-timeout-ms": "5000",
        }
        flags = [part for name, value in settings.items() for part in (f"--{name}", value)]
        self._command = [sys.executable, "-m", "paceline_gateway", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        """Returns when it serves."""
        self._ready_file.unlink(missing_ok=True)
        self._process = process = await asyncio.to_thread(subprocess.Popen, self._command, stdin=subprocess.DEVNULL)
        await until(lambda: self._ready_file.exists() or process.poll() is not None, TIMEOUT_S * 3)
        assert process.poll() is None, "the gateway has ended at once"
        assert json.loads(self._ready_file.read_text(encoding="utf-8"))["address"] == self.address

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        """kill -9; returns when it is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


@contextlib.asynccontextmanager
async def gateways(fleet: Fleet, redis_url: str, folder: Path, count: int) -> AsyncIterator[list[GatewayProcess]]:
    """So many running gateways, started at the same time."""
    processes = [GatewayProcess(fleet, redis_url, folder, f"gateway-{index}") for index in range(count)]
    try:
        await asyncio.gather(*[process.start() for process in processes])
        yield processes
    finally:
        for process in processes:
            process.kill()
