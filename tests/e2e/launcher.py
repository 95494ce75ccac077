"""Starts `paceline up` and `paceline generate` as processes, as a user does, and ends whatever is left of them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest

PACELINE = (sys.executable, "-c", "from paceline.cli import main; main()")
"""The program `paceline`, wherever it is installed."""
_PORT = re.compile(r":(\d+)(?:/metrics)?$")
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass
class Up:
    """A running `paceline up`.

    Attributes:
        process: the launcher.
        told: what it printed as JSON when the fleet was ready.
    """

    process: subprocess.Popen[str]
    told: dict[str, Any]

    @property
    def gateway(self) -> str:
        return str(self.told["addresses"]["gateway"])

    @property
    def http(self) -> str:
        return str(self.told["addresses"]["http"])

    def family(self) -> list[psutil.Process]:
        """The launcher's descendants: services and Redis."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ports(self) -> list[int]:
        addresses = self.told["addresses"]
        listed = [addresses[name] for name in ("gateway", "http", "redis")]
        listed += [*addresses["verifiers"], *addresses["drafters"], *addresses["metrics"].values()]
        return [int(port) for address in listed for port in _PORT.findall(address)]


class Launcher:
    """Starts `paceline up` and ends whatever is left of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[str]] = []
        self.seen: list[psutil.Process] = []

    def start(
        self, model: Path | str, *arguments: str, environment: Mapping[str, str] = _NOTHING
    ) -> subprocess.Popen[str]:
        """Starts it with these arguments; the gateway's ports are free ones unless they say otherwise."""
        command = [*PACELINE, "up", "--json", "--model", str(model), "--port=0"]
        command += ["--http-port=0", "--log-dir", str(self.folder / "logs"), *arguments]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, **environment},
        )
        self.started.append(process)
        return process

    def up(self, model: Path | str, *arguments: str, environment: Mapping[str, str] = _NOTHING) -> Up:
        """Starts it and waits until the fleet is ready."""
        process = self.start(model, *arguments, environment=environment)
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            pytest.fail(f"paceline up ended: {process.communicate()[1]}")
        up = Up(process, json.loads(line))
        self.seen += up.family()
        return up

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for member in self.seen:
            if member.is_running():
                member.kill()


def generate(address: str, *arguments: str) -> dict[str, Any]:
    """`paceline generate --json` as a process."""
    command = [*PACELINE, "generate", "--json", "--address", address, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def gone(members: list[psutil.Process]) -> bool:
    return not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


def is_listening(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0
