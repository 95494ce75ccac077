"""HTTP clients that leave, read slowly or not at all, and streams whose replicas or gateway go."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.messages import SamplingParams
from paceline.session.store import SessionState
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.fleet import VOCAB, Fleet, until
from tests.integration.http_calls import CHAT, COMPLETIONS, ENDPOINTS, ask, asking, http_client, http_fleet, post
from tests.integration.paced import EXPECTED, LAW, MAX_TOKENS, PROMPT, Pace, PacedRunner, used_verifier

ENDLESS = cycle_law([3, 5, 7, 11], VOCAB)
SAMPLED: dict[str, Any] = {"temperature": 0.7, "ignore_eos": True, "seed": 4, "max_tokens": MAX_TOKENS}


def long_runner(law: Any) -> ToyRunner:
    return ToyRunner(law, VOCAB, max_model_len=8192, num_pages=4096)


@contextlib.asynccontextmanager
async def paced_fleet(folder: Path, **options: Any) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient, Pace]]:
    """A fleet whose passes the test lets through."""
    pace = Pace()
    async with http_fleet(folder, LAW, runner=lambda law: PacedRunner(law, pace), **options) as (fleet, http):
        try:
            yield fleet, http, pace
        finally:
            pace.open()


def passes(fleet: Fleet) -> int:
    return len(fleet.verifiers[0].model.passes)


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_during_the_prompts_pass(tmp_path: Path, endpoint: str, stream: bool) -> None:
    async with paced_fleet(tmp_path) as (fleet, http, pace):
        asking_for = post(http, endpoint, asking(endpoint, "bcd", n=3, stream=stream, **SAMPLED))
        request = asyncio.create_task(asking_for)
        await pace.entered()
        await until(lambda: fleet.gateway.sessions.num_running == 3)
        request.cancel()
        # The permits are given back while the pass still runs.
        await until(lambda: fleet.gateway.sessions.num_running == 0)
        pace.allow()
        await fleet.quiet()
        assert passes(fleet) <= 1


@pytest.mark.parametrize("count", [1, 5, 20])
async def test_leaving_in_the_middle_of_a_stream(tmp_path: Path, count: int) -> None:
    async with paced_fleet(tmp_path) as (fleet, http, pace):
        body = {"prompt": PROMPT, "stream": True, "return_token_ids": True, **SAMPLED}
        pace.allow()
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines, tokens = response.aiter_lines(), 0
            while tokens < count:
                line = await anext(lines)
                if line:
                    tokens += len(json.loads(line.removeprefix("data: "))["choices"][0]["token_ids"])
                    pace.allow()
        begun = passes(fleet)
        await until(lambda: fleet.gateway.sessions.num_running == 0)
        pace.allow(3)
        await fleet.quiet()
        # One pass was let through and may have run, one was under way, and its follow-up may have begun.
        assert passes(fleet) <= begun + 3
        assert fleet.verifiers[0].model.pool.pages_in_use == 0


async def test_leaving_while_waiting_for_a_verifier(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW, settings={"verifier_wait_ms": 60_000}) as (fleet, http):
        await fleet.verifiers[0].kill()
        await until(lambda: not fleet.verifier_pool.snapshot.ready)
        requests = [
            asyncio.create_task(post(http, endpoint, asking(endpoint, "bcd", stream=stream)))
            for endpoint in ENDPOINTS
            for stream in (False, True)
        ]
        await until(lambda: fleet.gateway.sessions.num_running == 4)
        for request in requests:
            request.cancel()
        await until(lambda: fleet.gateway.sessions.num_running == 0)


async def test_leaving_while_queued_behind_others(tmp_path: Path) -> None:
    async with paced_fleet(tmp_path) as (fleet, http, pace):
        first = asyncio.create_task(post(http, COMPLETIONS, {"prompt": PROMPT, **SAMPLED}))
        await pace.entered()
        # These come while a pass is held: their prompts wait in the verifier.
        waiting = [
            asyncio.create_task(post(http, COMPLETIONS, {"prompt": [5], "stream": stream})) for stream in (False, True)
        ]
        await until(lambda: fleet.gateway.sessions.num_running == 3)
        for request in waiting:
            request.cancel()
        await until(lambda: fleet.gateway.sessions.num_running == 1)
        pace.open()
        assert (await first).json()["usage"]["completion_tokens"] == MAX_TOKENS
        await fleet.quiet()


async def test_leaving_is_recorded(tmp_path: Path) -> None:
    async with paced_fleet(tmp_path) as (fleet, http, pace):
        request = asyncio.create_task(post(http, COMPLETIONS, {"prompt": PROMPT, "session_id": "left", **SAMPLED}))
        await pace.entered()
        request.cancel()
        pace.open()
        await fleet.quiet()
        record = await fleet.gateway.store.get("left")
        assert record is not None
        assert record.state is SessionState.CANCELLED


async def test_leaving_in_the_middle_of_the_body(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http):
        host, _, port = fleet.gateway.addresses["http"].rpartition(":")
        for sent in (b"", b'{"prompt": "ab'):
            _, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n" + sent)
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        assert (await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=3)).usage


async def test_a_storm_of_clients_half_of_which_leave(tmp_path: Path) -> None:
    source = random.Random(7)
    options: dict[str, Any] = {"num_verifiers": 2, "num_drafters": 2}
    async with http_fleet(tmp_path, LAW, **options) as (fleet, http):

        async def stay(index: int) -> None:
            body: dict[str, Any] = {"prompt": PROMPT, "return_token_ids": True, **SAMPLED}
            assert (await ask(http, COMPLETIONS, n=1 + index % 2, **body)).choices[0].token_ids == EXPECTED

        async def leave_after(lines: int, endpoint: str) -> None:
            body = asking(endpoint, "bcd", stream=True, n=source.choice([1, 3]), **SAMPLED)
            async with http.stream("POST", f"/v1/{endpoint}", json=body) as response:
                async for _ in response.aiter_lines():
                    lines -= 1
                    if lines <= 0:
                        break

        async def leave_unheard(turns: int) -> None:
            request = asyncio.create_task(post(http, CHAT, asking(CHAT, "bcd", **SAMPLED)))
            for _ in range(turns):
                await asyncio.sleep(0)
            request.cancel()

        await asyncio.gather(
            *[stay(index) for index in range(16)],
            *[leave_after(source.randint(1, 30), source.choice(ENDPOINTS)) for _ in range(10)],
            *[leave_unheard(source.randint(1, 300)) for _ in range(6)],
        )
        await fleet.quiet()
        health = (await http.get("/health")).json()
        assert health["status"] == "ok"


# --- not reading ------------------------------------------------------------------------------------------------------


async def slow_reader(fleet: Fleet, body: dict[str, Any]) -> socket.socket:
    """A connection that has asked for a stream and takes next to nothing of it."""
    host, _, port = fleet.gateway.addresses["http"].rpartition(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    content = json.dumps({"stream": True, **body}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    await asyncio.get_running_loop().sock_sendall(connection, head.encode() + content)
    return connection


WORDY: dict[str, Any] = {
    "prompt": PROMPT,
    "temperature": 0,
    "logprobs": 20,
    "max_tokens": 8000,
    "return_token_ids": True,
}
"""A kilobyte for each token: more than sockets take for a client that does not read."""


async def test_slow_readers_are_bounded_and_freed_by_leaving(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": long_runner,
        "settings": {"max_buffered_chunks": 4, "num_speculative_tokens": 8},
    }
    async with http_fleet(tmp_path, ENDLESS, **options) as (fleet, http):
        readers = [await slow_reader(fleet, WORDY) for _ in range(3)]
        sessions, verifier = fleet.gateway.sessions, fleet.verifiers[0]
        await until(lambda: len(sessions.actors) == 3 and all(actor.client.full for actor in sessions.actors))
        await until(lambda: not verifier.alive.actor.pass_due())
        stopped_at = len(verifier.model.passes)
        assert stopped_at < 3 * 8000 / 9 / 2  # far from done
        # Whoever reads is served meanwhile.
        assert (await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=20)).usage
        for reader in readers:
            reader.close()
        await fleet.quiet()


async def test_a_reader_that_stops_is_cut_off(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": long_runner,
        "settings": {"max_buffered_chunks": 4, "num_speculative_tokens": 8, "client_stall_s": 0.3},
    }
    async with http_fleet(tmp_path, ENDLESS, **options) as (fleet, _):
        reader = await slow_reader(fleet, WORDY)
        await until(lambda: fleet.gateway.sessions.num_running == 1)
        # It is there, and holds nothing any more.
        await fleet.quiet()
        assert len(fleet.verifiers[0].model.passes) < 8000 / 9 / 2
        received, loop = b"", asyncio.get_running_loop()
        with contextlib.suppress(ConnectionResetError):
            while part := await asyncio.wait_for(loop.sock_recv(reader, 65536), 10):
                received += part
        assert b"[DONE]" not in received
        assert not received.endswith(b"0\r\n\r\n"), "the answer must not look whole"
        reader.close()


# --- replicas and gateways that go ------------------------------------------------------------------------------------


async def events_until_killed(
    fleet: Fleet, http: httpx.AsyncClient, pace: Pace, endpoint: str, count: int
) -> list[dict[str, Any]]:
    """Streams, kills the verifier in use after `count` events, and reads to the end."""
    body = asking(endpoint, "bcd", stream=True, return_token_ids=True, **SAMPLED)
    events: list[dict[str, Any]] = []
    async with http.stream("POST", f"/v1/{endpoint}", json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line:
                continue
            assert line != "data: [DONE]" or len(events) > count
            if line == "data: [DONE]":
                break
            events.append(json.loads(line.removeprefix("data: ")))
            if len(events) == count:
                killing = asyncio.create_task(fleet.verifiers[used_verifier(fleet)].kill())
                await asyncio.sleep(0)
                pace.open()
                await killing
            else:
                pace.allow()
    return events


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_the_only_verifier_dies_after_the_first_token(tmp_path: Path, endpoint: str) -> None:
    settings = {"verifier_patience_ms": 200, "return_window_ms": 50}
    async with paced_fleet(tmp_path, settings=settings) as (fleet, http, pace):
        pace.allow()
        *chunks, last = await events_until_killed(fleet, http, pace, endpoint, 3)
        assert last.keys() == {"error"}
        assert (last["error"]["type"], last["error"]["code"]) == ("server_error", "unavailable")
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        await fleet.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_only_verifier_dies_before_the_first_token(tmp_path: Path, stream: bool) -> None:
    settings = {"verifier_patience_ms": 200, "return_window_ms": 50}
    async with paced_fleet(tmp_path, settings=settings) as (fleet, http, pace):
        request = asyncio.create_task(post(http, COMPLETIONS, {"prompt": PROMPT, "stream": stream, **SAMPLED}))
        await pace.entered()
        # What the pass gives does not leave the verifier any more.
        await fleet.verifiers[0].cut()
        pace.open()
        await fleet.verifiers[0].kill()
        response = await request
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "unavailable"
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_stream_goes_on_on_another_verifier(tmp_path: Path, endpoint: str) -> None:
    async with paced_fleet(tmp_path, num_verifiers=2, settings={"return_window_ms": 50}) as (fleet, http, pace):
        pace.allow()
        events = await events_until_killed(fleet, http, pace, endpoint, 3)
        choices = [choice for event in events for choice in event["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids", [])] == EXPECTED
        assert [choice["finish_reason"] for choice in choices][-1] == "length"


async def test_stopping_ends_streams_with_an_error_event(tmp_path: Path) -> None:
    async with paced_fleet(tmp_path) as (fleet, http, pace):
        lines: list[str] = []
        pace.allow()
        async with http.stream(
            "POST", "/v1/completions", json={"prompt": PROMPT, "stream": True, **SAMPLED}
        ) as response:
            async for line in response.aiter_lines():
                lines += [line] if line else []
                if line and len(lines) == 1:
                    stopping = asyncio.create_task(fleet.gateway.stop())
                    await asyncio.sleep(0)
                    pace.open()
        await stopping
        error = json.loads(lines[-1].removeprefix("data: "))["error"]
        assert (error["code"], "shutting down" in error["message"]) == ("unavailable", True)
        with pytest.raises(httpx.ConnectError):
            async with http_client(fleet) as late:
                await late.get("/health")


async def test_stopping_does_not_wait_for_who_does_not_read(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": long_runner,
        "settings": {"max_buffered_chunks": 4, "num_speculative_tokens": 8},
    }
    async with http_fleet(tmp_path, ENDLESS, **options) as (fleet, _):
        reader = await slow_reader(fleet, WORDY)
        await until(lambda: any(actor.client.full for actor in fleet.gateway.sessions.actors))
        async with asyncio.timeout(15):
            await fleet.gateway.stop()
        await until(lambda: not fleet.gateway.sessions.num_running)
        reader.close()


def test_what_is_expected_is_sampled() -> None:
    """The streams above are compared with what plain decoding of these parameters gives."""
    assert len(EXPECTED) == MAX_TOKENS
    assert SamplingParams(temperature=SAMPLED["temperature"], ignore_eos=True, seed=SAMPLED["seed"]).greedy is False
