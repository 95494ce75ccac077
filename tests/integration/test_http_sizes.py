"""Bodies that are too large, and large ones that hold up nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet
from tests.integration.http_calls import (
    CHAT,
    COMPLETIONS,
    error_of,
    http_fleet,
)

LAW = hash_law(VOCAB, seed=21)


async def test_body_limit(tmp_path: Path) -> None:
    limit = 4096
    async with http_fleet(tmp_path, LAW, settings={"max_body_bytes": limit}) as (fleet, http):

        def body(size: int) -> bytes:
            frame = b'{"max_tokens": 1, "prompt": [1' + b"]}"
            return b'{"max_tokens": 1, "prompt": [1' + b" " * (size - len(frame)) + b"]}"

        async def chunked(content: bytes) -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        for content in (body(limit), chunked(body(limit))):
            assert (await http.post("/v1/completions", content=content)).status_code == 200
        for content in (body(limit + 1), chunked(body(limit + 1)), body(4 * limit), chunked(body(4 * limit))):
            response = await http.post("/v1/completions", content=content)
            assert error_of(response) == (413, "invalid_request_error", None, "payload_too_large")
            assert str(limit) in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", content=body(limit))).status_code == 200
        await fleet.quiet()


async def test_the_stated_size_is_enough_to_refuse(tmp_path: Path) -> None:
    """Nothing of the body is waited for."""
    async with http_fleet(tmp_path, LAW) as (fleet, _):
        host, _, port = fleet.gateway.addresses["http"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await writer.wait_closed()


async def test_large_bodies_do_not_stall_others(tmp_path: Path) -> None:
    """Reading, parsing and tokenizing are elsewhere, or quick: the long text alone takes more than twice as long."""
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"prompt": [1] * 2_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 5_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 1_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 300_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_000}, "messages"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(token): 1 for token in range(100_000)}}, "logit_bias"),
    ]
    async with http_fleet(tmp_path, LAW) as (fleet, _):
        for endpoint, body, param in bodies:
            content = json.dumps(body).encode()
            async with stalls() as worst:
                response = await raw_post(fleet, endpoint, content)
            assert b"HTTP/1.1 400 " in response
            assert f'"param":"{param}"'.encode() in response
            assert worst.stall_s < 1.0, param


@dataclass
class Worst:
    """The longest time in which the event loop did nothing else."""

    stall_s: float = 0.0


@contextlib.asynccontextmanager
async def stalls() -> AsyncIterator[Worst]:
    worst, loop = Worst(), asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            before_s = loop.time()
            await asyncio.sleep(0.001)
            worst.stall_s = max(worst.stall_s, loop.time() - before_s)

    watching = asyncio.create_task(watch())
    try:
        yield worst
    finally:
        watching.cancel()


async def raw_post(fleet: Fleet, endpoint: str, content: bytes) -> bytes:
    """A request whose client costs next to nothing."""
    host, _, port = fleet.gateway.addresses["http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/{endpoint} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return response
