"""Bytes that are no request, and requests that nobody means well by: no answer is the server's fault, and it lives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, plain_tokens
from tests.integration.front_door import FrontDoor, error_of, front_door, post_bytes
from tests.integration.http_calls import CHAT, COMPLETIONS, ENDPOINTS

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAW = hash_law(VOCAB, seed=47)
PROMPT = [1, 2, 3]
PATIENCE_S = 20.0
STATUS_LINE = re.compile(rb"HTTP/1\.1 (\d{3}) ")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path_factory.mktemp("front"), LAW) as front:
        yield front


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def it_lives(
    front: FrontDoor, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[None]:
    """After each of them the next good request is served, at one door or another, and no exception has been logged."""
    yield
    door = front.doors[len(request.node.name) % len(front.doors)]
    answer = await door.generate(front.fleet.request(PROMPT, max_tokens=3))
    assert list(answer.token_ids) == plain_tokens(LAW, PROMPT, 3)
    assert not [record for record in caplog.records if record.exc_info]


async def exchange(front: FrontDoor, content: bytes, count: int = 1, *, last: bytes = b"") -> list[int]:
    """The statuses of so many answers, or of all that come before the server closes the connection.

    Args:
        front: the doors.
        content: what is sent at once.
        count: how many answers to wait for.
        last: what is sent when the first answer has begun.
    """
    statuses: list[int] = []
    received = b""
    async with front.connect() as connection, asyncio.timeout(PATIENCE_S):
        with contextlib.suppress(ConnectionError):
            await connection.send(content)
            while len(statuses) < count and (piece := await connection.read()):
                received += piece
                statuses = [int(status) for status in STATUS_LINE.findall(received)]
                if statuses and last:
                    await connection.send(last)
                    last = b""
    return statuses


async def leave(front: FrontDoor, content: bytes) -> None:
    """Sends something that is not complete, and leaves."""
    async with front.connect() as connection:
        await connection.send(content)


def get(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: test", *headers, "", ""]).encode("latin-1")


GOOD = post_bytes(COMPLETIONS, b'{"prompt": [1, 2, 3], "max_tokens": 2}')
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"

REFUSED: dict[str, bytes] = {
    "empty line before": b"\r\n" + get("/health"),
    "coding that nobody knows": HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    "no version": b"GET /health\r\n\r\n",
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": get("/health", "Host: other"),
    "method of garbage": b"G\x00T /health HTTP/1.1\r\nHost: test\r\n\r\n",
    "path of garbage": b"GET /he\xffalth HTTP/1.1\r\nHost: test\r\n\r\n",
    "header without a colon": get("/health", "Garbage"),
    "header with a zero": get("/health", "X-Some: a\x00b"),
    "hello of TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200) + b"\r\n\r\n",
    "negative length": HEAD + b"Content-Length: -1\r\n\r\n",
    "length of letters": HEAD + b"Content-Length: many\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "chunk of a bad size": CHUNKED + b"zz\r\n{}\r\n0\r\n\r\n",
    "chunk of an endless size": CHUNKED + b"f" * 100 + b"\r\n{}",
    "chunk that is longer than it said": CHUNKED + b"2\r\n{}{}{}{}\r\n0\r\n\r\n",
}
TOLERATED: dict[str, tuple[bytes, int]] = {
    "version 9": (b"GET /health HTTP/9.9\r\nHost: test\r\n\r\n", 200),
    # An object without a prompt: the chunks are what counts.
    "length and chunks": (HEAD + b"Content-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    "header of a folded line": (get("/health", "X-Some: a", " b"), 200),
    "version 1.0": (b"GET /health HTTP/1.0\r\n\r\n", 200),
    "websocket": (get("/health", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13"), 200),
    "upgrade to HTTP/2": (get("/health", "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c"), 200),
}
INCOMPLETE: dict[str, bytes] = {
    "nothing": b"",
    "line ends": b"\r\n\r\n\r\n",
    "half a head": b"GET /health HTTP/1.1\r\nHost: te",
    "body that ends too early": HEAD + b"Content-Length: 100\r\n\r\n{",
    "chunks that end too early": CHUNKED + b"5\r\n{",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_no_request(front: FrontDoor, name: str) -> None:
    assert await exchange(front, REFUSED[name], count=2) == [400]


@pytest.mark.parametrize("name", TOLERATED)
async def test_what_looks_odd_and_is_a_request(front: FrontDoor, name: str) -> None:
    content, status = TOLERATED[name]
    assert await exchange(front, content) == [status]


async def test_what_ends_too_early(front: FrontDoor) -> None:
    for content in INCOMPLETE.values():
        await leave(front, content)


async def test_other_protocols(front: FrontDoor) -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    assert set(await exchange(front, preface, count=2)) <= {400, 404, 405}


MANY = 2**20
ENDLESS: dict[str, bytes] = {
    "header": get("/health", "X-Some: " + "a" * MANY),
    "path": get("/" + "a" * MANY),
    "headers": get("/health", *[f"X-{index}: a" for index in range(MANY // 10)]),
    "extension of a chunk": CHUNKED + b"2;" + b"a" * MANY + b"\r\n{}\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_heads_of_a_megabyte(front: FrontDoor, name: str) -> None:
    # The rest of it may be on its way when the connection is closed, which then breaks it off.
    assert await exchange(front, ENDLESS[name], count=2) in ([400], [])


async def test_random_bytes(front: FrontDoor) -> None:
    source = random.Random(13)
    for _ in range(30):
        noise = source.randbytes(source.randrange(1, 3000))
        assert await exchange(front, noise + b"\r\n\r\n", count=2) == [400]
    for _ in range(60):
        # A good request with some bytes that are others.
        content, length = bytearray(GOOD), GOOD.index(b"\r\n\r\n") - 2
        for _ in range(source.randint(1, 4)):
            if (index := source.randrange(len(GOOD))) not in range(length, length + 2):
                content[index] = source.randrange(256)
        statuses = await exchange(front, bytes(content) + b"\r\n\r\n")
        assert statuses
        assert all(200 <= status < 500 for status in statuses)


# --- paths and methods ------------------------------------------------------------------------------------------------

PATHS = (
    "/../../etc/passwd",
    "/v1/../../etc/passwd",
    "/%2e%2e/%2e%2e/etc/passwd",
    "/v1/models/../../../etc/passwd",
    "/v1/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/v1/models/%00",
    "/v1/models/%ff%fe",
    "/v1/models/%ED%A0%80",
    "/v1/models/" + "a" * 20_000,
    "/v1//completions",
    "//etc/passwd",
    "/v1/completions/",
    "/v1/completions%2f",
    "/v1/chat",
    "/health;a=b",
    "http://example.org/",
    "*",
)


async def test_paths_that_lead_nowhere(front: FrontDoor) -> None:
    for path in PATHS:
        assert await exchange(front, get(path, "Connection: close"), count=2) == [404], path


async def test_methods_that_a_path_has_not(front: FrontDoor) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "BREW"):
            assert await exchange(front, get(path, "Connection: close", method=method), count=2) == [405], (
                method,
                path,
            )
    for path in ("/health", "/v1/models", "/metrics", "/openapi.json"):
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE", "BREW"):
            assert await exchange(front, get(path, "Connection: close", method=method), count=2) == [405], (
                method,
                path,
            )
    assert await exchange(front, get("example.org:443", "Connection: close", method="CONNECT"), count=2) == [404]


# --- bodies -----------------------------------------------------------------------------------------------------------

NINES = b"9" * 4000
NESTED = b"[" * 10_000 + b"]" * 10_000
NUMBERS = (
    "n",
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "max_tokens",
    "max_completion_tokens",
)
BODIES: dict[str, bytes] = {
    "nested prompt": b'{"prompt": ' + NESTED + b"}",
    "nested messages": b'{"messages": ' + NESTED + b"}",
    "nested field of no name": b'{"prompt": "a", "messages": 1, "x": ' + NESTED + b"}",
    "nested objects": b'{"prompt": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}",
    "nested and not closed": b'{"prompt": ' + b"[" * 1_000_000,
    "prompt of a huge number": b'{"prompt": [' + NINES + b"]}",
    "prompt of numbers with a point": b'{"prompt": [1.5]}',
    "prompt of truths": b'{"prompt": [true]}',
    "prompt of everything": b'{"prompt": ["a", 1, null]}',
    "prompt of nothing": b'{"prompt": null}',
    "stop ids of a huge number": b'{"prompt": "a", "stop_token_ids": [' + NINES + b"]}",
    "bias of a huge key": b'{"prompt": "a", "logit_bias": {"' + NINES + b'": 1}}',
    "bias of a huge number": b'{"prompt": "a", "logit_bias": {"1": ' + NINES + b"}}",
    "bias of digits of another script": '{"prompt": "a", "logit_bias": {"١": 1}}'.encode(),
    "mark of byte order": b'\xef\xbb\xbf{"prompt": "a"}',
    "UTF-16": '{"prompt": "a"}'.encode("utf-16"),
    "key of a megabyte": b'{"' + b"a" * 1_000_000 + b'": 1}',
    "100,000 keys": json.dumps({str(index): index for index in range(100_000)}).encode(),
    "zeros": bytes(1000),
    "two values": b"{}{}",
    "speculation of an array": b'{"prompt": "a", "speculation": [1]}',
    "options of a text": b'{"prompt": "a", "stream": true, "stream_options": "x"}',
    "metrics of a number": b'{"prompt": "a", "metrics": 1}',
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_bodies_that_nobody_means_well_by(front: FrontDoor, endpoint: str, name: str) -> None:
    response = await front.http.post(f"/v1/{endpoint}", content=BODIES[name])
    assert error_of(response).http_status == 400
    assert len(response.content) < 20_000


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_huge_numbers_in_every_field(front: FrontDoor, endpoint: str) -> None:
    prompt = '"messages": [{"role": "user", "content": "a"}]' if endpoint == CHAT else '"prompt": "a"'
    for field in NUMBERS:
        for number in (
            NINES.decode(),
            "-" + NINES.decode(),
            "1e400",
            "-1e400",
            "1e-400",
            "9" * 5000,
            "0." + "1" * 9000,
        ):
            body = f'{{{prompt}, "max_tokens": 3, "{field}": {number}}}'
            response = await front.http.post(f"/v1/{endpoint}", content=body.encode())
            if response.status_code != 200:
                assert error_of(response).http_status == 400
                assert len(response.content) < 20_000


async def test_the_last_of_equal_keys_counts(front: FrontDoor) -> None:
    body = b'{"max_tokens": "x", "prompt": [1, 2, 3], "max_tokens": 2, "temperature": 0, "return_token_ids": true}'
    response = await front.http.post(f"/v1/{COMPLETIONS}", content=body)
    assert response.json()["choices"][0]["token_ids"] == plain_tokens(LAW, PROMPT, 2)


# --- one connection ---------------------------------------------------------------------------------------------------


async def test_requests_in_a_row(front: FrontDoor) -> None:
    """Pipelined: each is answered in its turn, bad ones among them."""
    bad = post_bytes(COMPLETIONS, b"{")
    nowhere = get("/nowhere")
    assert await exchange(front, GOOD + bad + GOOD + nowhere + get("/health"), count=5) == [200, 400, 200, 404, 200]
    assert await exchange(front, get("/version") * 50, count=50) == [200] * 50
    # What follows is no request: nothing after it is looked at.
    assert await exchange(front, GOOD + b"\x00\x01\x02 garbage\r\n\r\n" + GOOD, count=3) == [200, 400]


async def test_what_follows_a_stream_on_its_connection(front: FrontDoor) -> None:
    stream: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 30, "ignore_eos": True, "stream": True}
    content = post_bytes(COMPLETIONS, json.dumps(stream).encode())
    assert await exchange(front, content, 2, last=GOOD) == [200, 200]
    assert await exchange(front, content, 3, last=b"\xff" * 1000 + b"\r\n\r\n") == [200, 400]


async def test_a_client_that_asks_before_it_sends(front: FrontDoor) -> None:
    body = b'{"prompt": [1, 2, 3], "max_tokens": 2}'
    head = post_bytes(COMPLETIONS, body, "Expect: 100-continue").removesuffix(body)
    assert await exchange(front, head, 2, last=body) == [100, 200]


async def test_what_follows_a_request_of_two_lengths_is_not_looked_at(front: FrontDoor) -> None:
    """A proxy that believes in the length would take the second request for the body of the first."""
    smuggled = get("/version")
    content = HEAD + b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % (5 + len(smuggled))
    assert await exchange(front, content + b"0\r\n\r\n" + smuggled, count=2) == [400]
    assert await exchange(front, CHUNKED + b"0\r\n\r\n" + smuggled, count=2) == [400, 200]
