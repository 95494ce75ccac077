"""A distance between two processes of one machine: a TCP proxy that holds every byte back for a stated time.

    python -m paceline.benchmark.delay_proxy 127.0.0.1:7001 127.0.0.1:7002

prints one line of JSON: the port that leads to each address. It obeys the lines of its standard input and ends with it:

    25        from now on bytes of either direction are 25 ms late
    cut 1     nothing passes to or from the address of index 1, and nobody is told
    mend 1    what was held back goes on

A process of its own, so that what it costs is in nobody's figures, and one thread around `select`, whose waits are
exact to some 50 microseconds: an asyncio loop rounds them up to whole milliseconds. What bytes take to pass it in any
case counts as delay too, so that a ping takes about as much longer as was asked for. The kernel's own means (netem) are
not in every kernel and want root. Bytes are delayed, never dropped or reordered: a cut is what TCP makes of a network
that is away for a while. Connections stay open, and new ones are not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from paceline.engine.simulated.pass_time import exact_sleeps
from paceline.errors import Unavailable

_HOST = "127.0.0.1"
_CHUNK_BYTES = 1 << 16
_START_TIMEOUT_S = 20.0
_PASSAGE_S = 75e-6
"""What bytes take to pass in one direction if they are not held: a thread that slept is woken. On virtual cores a
ping each 10 ms takes 0.07 to 0.09 ms without the proxy, and 0.18 to 0.29 ms through it."""
_SHORTEST_SLEEP_S = 50e-6
"""To sleep for less takes longer."""


@dataclass(slots=True, eq=False)
class _Direction:
    """Bytes from one socket to another, on a connection to the address of an index."""

    index: int
    source: socket.socket
    sink: socket.socket
    held: deque[tuple[float, bytes]] = field(default_factory=deque)  # due when, what; empty bytes for the end
    due: bytes = b""  # could be sent if the sink took it
    reads: bool = True


class DelayLoop:
    """The proxy's only thread.

    Args:
        targets: (host, port) of each address; connections to `ports[i]` lead to `targets[i]`.

    Attributes:
        ports: where it listens.
        delay_s: of one direction.
        cut: indices of the addresses that are cut off.
    """

    def __init__(self, targets: Sequence[tuple[str, int]]) -> None:
        self._targets = tuple(targets)
        self._listeners = {socket.create_server((_HOST, 0)): index for index in range(len(targets))}
        self._directions: list[_Direction] = []
        self.ports = tuple(listener.getsockname()[1] for listener in self._listeners)
        self.delay_s = 0.0
        self.cut: set[int] = set()

    def obey(self, line: str) -> None:
        """Does what a line of the standard input says."""
        word, _, index = line.partition(" ")
        if word == "cut":
            self.cut.add(int(index))
        elif word == "mend":
            self.cut.discard(int(index))
        else:
            self.delay_s = float(line) / 1e3

    def turn(self, also: int) -> bool:
        """Waits for what happens next and does it; says whether the file `also` can be read."""
        ways = [way for way in self._directions if way.index not in self.cut]
        readers: list[socket.socket | int] = [
            *(listener for listener, index in self._listeners.items() if index not in self.cut),
            also,
            *(way.source for way in ways if way.reads),
        ]
        writers = [way.sink for way in ways if way.due]
        readable, _, _ = select.select(readers, writers, (), self._wait_s(ways))
        for listener in self._listeners.keys() & set(readable):
            self._accept(listener)
        now_s = time.perf_counter()
        for way in ways:
            if way.source in readable:
                self._read(way, now_s)
            while way.held and way.held[0][0] <= now_s:
                _, data = way.held.popleft()
                way.due += data
                if not data and not way.due:
                    self._end(way)
            if way.due:
                self._write(way)
        return also in readable

    def _wait_s(self, ways: Sequence[_Direction]) -> float | None:
        due_s = min((way.held[0][0] for way in ways if way.held), default=None)
        if due_s is None:
            return None
        wait_s = due_s - time.perf_counter()
        return wait_s if wait_s > _SHORTEST_SLEEP_S else 0.0

    def _accept(self, listener: socket.socket) -> None:
        near, _ = listener.accept()
        index = self._listeners[listener]
        try:
            far = socket.create_connection(self._targets[index])
        except OSError:
            near.close()  # as if nobody listened
            return
        for end in (near, far):
            end.setblocking(False)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._directions += [_Direction(index, near, far), _Direction(index, far, near)]

    def _read(self, way: _Direction, now_s: float) -> None:
        try:
            data = way.source.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        way.reads = bool(data)
        way.held.append((now_s + max(0.0, self.delay_s - _PASSAGE_S), data))

    def _write(self, way: _Direction) -> None:
        try:
            way.due = way.due[way.sink.send(way.due) :]
        except BlockingIOError:
            pass
        except OSError:
            self._end(way)

    def _end(self, way: _Direction) -> None:
        """Both ends go: what speaks gRPC has no half-open connections."""
        self._directions = [other for other in self._directions if other.source not in (way.source, way.sink)]
        way.source.close()
        way.sink.close()


def main(addresses: Sequence[str]) -> None:
    """Runs until standard input ends."""
    exact_sleeps()
    loop = DelayLoop([(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)])
    sys.stdout.write(json.dumps(loop.ports) + "\n")
    sys.stdout.flush()
    pending = b""
    while True:
        if not loop.turn(sys.stdin.fileno()):
            continue
        data = os.read(sys.stdin.fileno(), _CHUNK_BYTES)
        if not data:
            return
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            loop.obey(line.decode())


class DelayProxy:
    """The proxy as a child process. Use as an async context manager.

    Args:
        addresses: host:port of each service behind it.

    Attributes:
        addresses: where these are reached through it, once it runs.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._targets = tuple(addresses)
        self._process: asyncio.subprocess.Process | None = None
        self.addresses: tuple[str, ...] = ()

    @property
    def pid(self) -> int:
        """Its process id; 0 while it does not run."""
        return self._process.pid if self._process else 0

    async def __aenter__(self) -> Self:
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "paceline.benchmark.delay_proxy",
            *self._targets,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                line = await process.stdout.readline() if process.stdout else b""
            self.addresses = tuple(f"{_HOST}:{port}" for port in json.loads(line))
        except (TimeoutError, ValueError) as error:
            await self.stop()
            raise Unavailable(f"the delay proxy does not start: {error}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def delay(self, rtt_ms: float) -> None:
        """From now on a round trip takes so much longer, in milliseconds; bytes on their way keep their time."""
        await self._tell(f"{rtt_ms / 2}")

    async def cut(self, index: int) -> None:
        """Cuts the address of that index off, in both directions and without a word to anybody; `mend` ends it."""
        await self._tell(f"cut {index}")

    async def mend(self, index: int) -> None:
        """Ends a cut: what was held back goes on its way."""
        await self._tell(f"mend {index}")

    async def _tell(self, line: str) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.write(f"{line}\n".encode())
            await self._process.stdin.drain()

    async def stop(self) -> None:
        """Ends it, with all connections through it."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
