"""Connections that are neither used nor closed by their clients end by themselves; others last."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from paceline_gateway.http.server import HttpServer
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from paceline.runtime.settings import ServiceSettings
from paceline.runtime.supervisor import Supervisor
from tests.integration.fleet import until
from tests.integration.front_door import Raw, connect, num_connections

KEEP_ALIVE_S = 1
BIG = 2**20
REQUEST = b"GET %s HTTP/1.1\r\nHost: test\r\n\r\n"
SOON_S = 15.0


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """/big is a big answer; /early is answered before its body has come."""
    request = Request(scope, receive)
    content = b"x" * BIG if request.url.path == "/big" else b"ok"
    await Response(content)(scope, receive, send)


@contextlib.asynccontextmanager
async def server() -> AsyncIterator[str]:
    http = HttpServer(ServiceSettings(), 0, app, stop_grace_s=1.0, keep_alive_s=KEEP_ALIVE_S)
    async with Supervisor("http") as supervisor:
        yield http.start(supervisor)
        await http.stop()


async def drip(connection: Raw, piece: bytes, pause_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        while True:
            await connection.send(piece)
            await asyncio.sleep(pause_s)


async def ended(connection: Raw) -> bytes:
    async with asyncio.timeout(SOON_S):
        return await connection.rest()


async def says_nothing(address: str) -> None:
    async with connect(address) as connection:
        assert await ended(connection) == b""


async def says_nothing_more(address: str) -> None:
    async with connect(address) as connection:
        await connection.send(REQUEST % b"/")
        assert (await ended(connection)).endswith(b"ok")


async def never_ends_its_head(address: str, sent_before: bytes) -> None:
    async with connect(address) as connection:
        await connection.send(sent_before + b"GET / HTTP/1.1\r\nHost: test\r\n")
        dripping = asyncio.create_task(drip(connection, b"X-Some: thing\r\n", 0.05))
        await ended(connection)
        await dripping


async def never_ends_a_body_that_nobody_wants(address: str) -> None:
    async with connect(address) as connection:
        await connection.send(b"POST / HTTP/1.1\r\nHost: test\r\nTransfer-Encoding: chunked\r\n\r\n")
        dripping = asyncio.create_task(drip(connection, b"100\r\n" + b" " * 256 + b"\r\n", 0.005))
        assert b"\r\n\r\nok" in await ended(connection)
        await dripping


async def reads_slowly(address: str) -> None:
    """In more than the time of an idle connection; it gets everything."""
    async with connect(address, receive_bytes=4096) as connection:
        await connection.send((REQUEST % b"/big").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        received = 0
        while received < BIG:
            piece = await connection.read(BIG // 40)
            assert piece, f"broken off after {received} bytes"
            received += len(piece)
            await asyncio.sleep(2 * KEEP_ALIVE_S * len(piece) / BIG)


async def test_every_connection_without_a_request_ends() -> None:
    async with server() as address, asyncio.TaskGroup() as clients:
        clients.create_task(says_nothing(address))
        clients.create_task(says_nothing_more(address))
        clients.create_task(never_ends_its_head(address, b""))
        clients.create_task(never_ends_its_head(address, REQUEST % b"/"))
        clients.create_task(never_ends_a_body_that_nobody_wants(address))
        clients.create_task(reads_slowly(address))


async def test_an_answer_that_nobody_reads_does_not_hold_its_connection() -> None:
    async with server() as address, connect(address, receive_bytes=4096) as connection:
        await connection.send(REQUEST % b"/big")
        await until(lambda: num_connections(address) == 1)
        await until(lambda: num_connections(address) == 0)
        assert len(await connection.rest()) < BIG


async def test_requests_one_after_another_and_pipelined_keep_a_connection() -> None:
    async with server() as address, connect(address) as connection:
        for _ in range(3):
            await connection.send(REQUEST % b"/")
            assert (await connection.read()).endswith(b"ok")
            # Half of its time as an idle connection, and again.
            await asyncio.sleep(KEEP_ALIVE_S * 0.5)
        await connection.send((REQUEST % b"/") * 20)
        received = b""
        while received.count(b"\r\n\r\nok") < 20:
            received += await connection.read()
        assert num_connections(address) == 1


async def test_a_small_answer_does_not_wait_for_the_clients_acknowledgement() -> None:
    """Head and body are two writes: with Nagle's algorithm the second one would wait 40 ms for the client's system."""
    async with server() as address, connect(address) as connection:
        took_s, loop = [], asyncio.get_running_loop()
        for _ in range(60):
            started_at, received = loop.time(), b""
            await connection.send(REQUEST % b"/")
            while not received.endswith(b"ok"):
                received += await connection.read()
            took_s.append(loop.time() - started_at)
        assert sorted(took_s)[len(took_s) // 2] < 0.03
