"""The Docker engine of these tests: the one that runs on this machine, or a private one that is gone afterwards.

The private one has its own mounts, processes and network, so it needs root and cannot reach anything: its builds take
what they need from `supplies`, and whatever it started ends with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 60.0
_COMMAND_TIMEOUT_S = 600.0
# Debian's client first: it is as old as its engine and builds without a plugin.
_CLIENTS = ("/usr/bin/docker", "docker")


class NoEngine(Exception):
    """No engine runs here and none can be started."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine.

    Attributes:
        client: program that speaks to it.
        host: its address for DOCKER_HOST; empty for the client's own default.
        private: started for these tests, without images and without a network to the outside.
    """

    client: str
    host: str
    private: bool

    @property
    def environment(self) -> dict[str, str]:
        """Environment of a program that is to use this engine."""
        return {**os.environ, "DOCKER_BUILDKIT": "1"} | ({"DOCKER_HOST": self.host} if self.host else {})

    def run(self, *arguments: str, stdin: str | None = None, timeout_s: float = _COMMAND_TIMEOUT_S) -> str:
        """Output of a docker command.

        Raises:
            AssertionError: it failed; with what it said.
        """
        done = subprocess.run(
            [self.client, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=self.environment,
        )
        assert done.returncode == 0, f"docker {' '.join(arguments)}: {done.stderr.strip()}"
        return done.stdout.strip()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A docker command that goes on; its output is for the caller to read."""
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [self.client, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=self.environment
        )


@contextlib.contextmanager
def engine() -> Iterator[Engine]:
    """An engine, for as long as the tests run.

    Raises:
        NoEngine: there is none; says why.
    """
    client = next(filter(None, map(shutil.which, _CLIENTS)), None)
    if client is None:
        raise NoEngine("there is no docker command (on Debian: apt-get install --no-install-recommends docker.io)")
    if _answers(Engine(client, "", private=False)):
        yield Engine(client, "", private=False)
        return
    with _private_engine(client) as started:
        yield started


@contextlib.contextmanager
def _private_engine(client: str) -> Iterator[Engine]:
    if sys.platform != "linux" or os.geteuid() != 0:
        raise NoEngine("no Docker engine is running, and only root on Linux can start one for the tests")
    missing = [name for name in ("dockerd", "unshare", "ip", "mmdebstrap") if shutil.which(name) is None]
    if missing:
        raise NoEngine(
            f"no Docker engine is running and {', '.join(missing)} to start one is not here: "
            "apt-get install --no-install-recommends docker.io mmdebstrap iproute2"
        )
    folder = Path(tempfile.mkdtemp(prefix="paceline-engine-"))
    started = Engine(client, f"unix://{folder}/docker.sock", private=True)
    log_path = folder / "log"
    with log_path.open("wb") as log:
        # A process group of its own: the signal that ends it reaches the engine behind `unshare`.
        process = subprocess.Popen(_command(folder), stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)
    try:
        deadline_s = time.monotonic() + _START_TIMEOUT_S
        while not _answers(started):
            if process.poll() is not None or time.monotonic() > deadline_s:
                last_words = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
                raise NoEngine(f"a Docker engine does not start here: {' | '.join(last_words)}")
            threading.Event().wait(0.1)
        yield started
    finally:
        _end(process)
        shutil.rmtree(folder)
        # Control groups outlive their processes; the deepest first.
        for group in sorted(Path("/sys/fs/cgroup").glob(f"**/{folder.name}/**"), reverse=True):
            group.rmdir()


def _command(folder: Path) -> list[str]:
    daemon = f"dockerd --host unix://{folder}/docker.sock --data-root {folder}/data --exec-root {folder}/exec"
    daemon += f" --pidfile {folder}/pid --storage-driver overlay2 --cgroup-parent /{folder.name}"
    # A /run of its own as well: the engine leaves sockets there.
    script = f"mount -t tmpfs tmpfs /run && ip link set lo up && exec {daemon}"
    own = ["--net", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return ["unshare", *own, "sh", "-c", script]


def _answers(candidate: Engine) -> bool:
    with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
        return bool(candidate.run("info", "--format", "{{.ServerVersion}}", timeout_s=10.0))
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
