"""Clients that read ten bytes at a time, or nothing, or do not send what they announced: bounded, then cut off."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.text.request import GenerationRequest, TokenPrompt
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.fleet import GREEDY, VOCAB, perfect_method, until
from tests.integration.front_door import FrontDoor, Raw, content_of, front_door, post_bytes
from tests.integration.http_calls import CHAT

ENDLESS = cycle_law([3, 5, 7, 11], VOCAB)
RECEIVE_BYTES = 4096
MAX_TOKENS = 4000
WORD_CHARS = 100


def write_long_words(folder: Path) -> Path:
    """A tokenizer whose tokens are long words, so that buffers are full after few of them."""
    file = write_letters(folder, VOCAB, max_model_len=8192) / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocab = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {
        word if word in ("_", "<eos>") else word * WORD_CHARS: token for word, token in vocab.items()
    }
    file.write_text(json.dumps(tokenizer))
    return folder


@contextlib.asynccontextmanager
async def endless(folder: Path, **settings: Any) -> AsyncIterator[FrontDoor]:
    """Doors whose generations could go on for megabytes."""
    options: dict[str, Any] = {
        "runner": lambda law: ToyRunner(law, VOCAB, max_model_len=8192, num_pages=8192),
        "method": perfect_method(ENDLESS, at_once=True),
        "write_model": write_long_words,
        "settings": {"max_buffered_chunks": 4, "num_speculative_tokens": 8, **settings},
    }
    async with front_door(folder, ENDLESS, **options) as front:
        yield front


def long_stream(**fields: Any) -> bytes:
    """A request whose answer has some kilobytes for each token, as it goes over the wire."""
    body = {
        "messages": [{"role": "user", "content": "bcd"}],
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "logprobs": True,
        "top_logprobs": 20,
        "stream": True,
        **fields,
    }
    return post_bytes(CHAT, content_of(body))


async def sip(connection: Raw) -> None:
    """Reads ten bytes at a time, rarely."""
    with contextlib.suppress(ConnectionError):
        received = b"-"
        while received:
            received = await connection.read(10)
            await asyncio.sleep(0.2)


async def test_fifty_slow_readers_are_bounded_and_hurt_nobody(tmp_path: Path) -> None:
    async with endless(tmp_path) as front, contextlib.AsyncExitStack() as stack:
        sessions, verifier = front.fleet.gateway.sessions, front.fleet.verifiers[0]
        sipping = []
        for _ in range(50):
            connection = await stack.enter_async_context(front.connect(receive_bytes=RECEIVE_BYTES))
            await connection.send(long_stream())
            sipping.append(asyncio.create_task(sip(connection)))
        await until(lambda: len(sessions.actors) == 50 and all(actor.client.full for actor in sessions.actors), 60)
        await until(lambda: not verifier.alive.actor.pass_due())
        stopped_at = len(verifier.model.passes)
        request = GenerationRequest(TokenPrompt((4, 5, 6)), sampling=GREEDY, max_tokens=20)
        for door in front.doors:
            assert (await door.generate(request)).completion_tokens == 20
        # Ten bytes make no room: these were passes of the three others. The system's buffers may have taken a last
        # round or two of a slow one meanwhile; ones that went on would share every pass.
        passes = verifier.model.passes[stopped_at:]
        assert len(passes) >= 9
        assert sum(len(parts) - 1 for parts in passes) <= 2 * len(sipping) < (len(passes) - 1) * len(sipping)
        for task in sipping:
            task.cancel()
        await asyncio.wait(sipping)


@pytest.mark.parametrize("reads", [False, True], ids=["reads nothing", "reads ten bytes at a time"])
async def test_who_does_not_read_is_cut_off_and_everything_is_free(tmp_path: Path, reads: bool) -> None:
    async with endless(tmp_path, client_stall_s=0.3) as front, contextlib.AsyncExitStack() as stack:
        connections = [await stack.enter_async_context(front.connect(receive_bytes=RECEIVE_BYTES)) for _ in range(5)]
        sipping = []
        for connection in connections:
            await connection.send(long_stream())
            sipping += [asyncio.create_task(sip(connection))] if reads else []
        await until(lambda: front.fleet.gateway.sessions.num_running == 5)
        # They are still there, and hold nothing: no session, no page, no connection.
        await front.idle()
        await until(lambda: front.num_connections <= 1)  # the one that asked for the metrics
        for task in sipping:
            task.cancel()
        for connection in connections:
            assert b"[DONE]" not in await connection.rest()


@pytest.mark.parametrize("head", ["Content-Length: 100", "Transfer-Encoding: chunked"])
async def test_who_does_not_send_what_was_announced_is_cut_off(tmp_path: Path, head: str) -> None:
    async with endless(tmp_path, client_stall_s=0.2) as front, front.connect() as connection:
        await connection.send(f"POST /v1/completions HTTP/1.1\r\nHost: test\r\n{head}\r\n\r\n".encode())
        async with asyncio.timeout(10):
            answer = await connection.rest()
        assert not answer.startswith(b"HTTP/1.1 5")
        await until(lambda: front.num_connections == 0)
