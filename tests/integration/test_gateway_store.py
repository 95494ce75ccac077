"""The session's record in a real Redis, and what happens to streams when Redis stalls, fails or forgets."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from paceline.errors import Fenced, Unavailable
from paceline.generation import Chunk, Started
from paceline.session.embedded import EmbeddedRedis
from paceline.session.memory_store import MemoryStore
from paceline.session.redis_store import RedisStore
from paceline.session.store import Append, AppendOutcome, SessionState
from tests.fakes.scripted_drafter import StepGate
from tests.integration.fleet import Fleet, Run, generate, perfect_method, until
from tests.integration.paced import EXPECTED, LAW, MAX_TOKENS, PROMPT, request_of, streaming
from tests.integration.session_stores import Server, start_server

EXPIRY_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server("valkey")
    yield running
    running.process.stop()


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    """The record as another process would see it. Afterwards every key must have an expiry."""
    with server.client() as client:
        client.flushall()
    reader = RedisStore.from_url(server.url, expiry_s=EXPIRY_S, timeout_s=5.0)
    yield reader
    await reader.close()
    with server.client() as client:
        for key in client.keys("*"):
            assert 0 < client.pttl(key) <= EXPIRY_S * 1000, f"{key} has no expiry"


def on(server: Server, **settings: Any) -> dict[str, Any]:
    return {"redis_url": SecretStr(server.url), "session_ttl_s": EXPIRY_S, "redis_timeout_ms": 300, **settings}


def durable(run: Run) -> list[bool]:
    return [chunk.durable for chunk in run.chunks for _ in chunk.token_ids]


class Frozen:
    """The server's process stopped in the middle of whatever it does."""

    def __init__(self, process: EmbeddedRedis) -> None:
        assert process.pid is not None
        self._pid = process.pid

    def __enter__(self) -> Frozen:
        os.kill(self._pid, signal.SIGSTOP)
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()

    def thaw(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


async def recorded(store: RedisStore, session: str) -> list[int]:
    record = await store.get(session)
    assert record is not None
    return list(record.tokens)


async def test_each_token_is_recorded_before_it_is_sent(tmp_path: Path, server: Server, store: RedisStore) -> None:
    # A machine that is busy is no silent store.
    settings = on(server, redis_ack_timeout_ms=10_000, redis_timeout_ms=10_000)
    async with streaming(tmp_path, settings=settings, request={"session": "s"}) as (_fleet, stream):
        for count in (1, 6, 11, 21):
            await stream.tokens(count)
            sent = [token for event in stream.events if isinstance(event, Chunk) for token in event.token_ids]
            tokens = await recorded(store, "s")
            assert tokens[: len(PROMPT) + len(sent)] == PROMPT + sent
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert all(durable(run))


async def test_the_record_says_where_the_session_stands(tmp_path: Path, server: Server, store: RedisStore) -> None:
    async with streaming(tmp_path, settings=on(server), request={"session": "s"}) as (fleet, stream):
        await stream.tokens(11)
        record = await store.get("s")
        assert record is not None
        assert (record.state, record.finish_reason) == (SessionState.RUNNING, "")
        assert record.owner
        assert (record.generation_start, record.model, record.sampling.seed) == (3, "toy", 4)
        positions = record.positions
        assert (positions.verifier, positions.drafter) == (fleet.verifiers[0].address, fleet.drafters[0].address)
        assert 0 < positions.verifier_kv_len <= record.committed_len
        assert 0 < positions.drafter_kv_len <= record.committed_len + 10
        assert positions.acceptance_ewma > 0
        await stream.rest()
        record = await store.get("s")
        assert record is not None
        assert (record.state, record.finish_reason) == (SessionState.FINISHED, "length")
        assert list(record.tokens) == PROMPT + EXPECTED


async def test_a_stalled_store_does_not_stop_a_stream(tmp_path: Path, server: Server, store: RedisStore) -> None:
    async with streaming(tmp_path, settings=on(server), request={"session": "s"}) as (fleet, stream):
        await stream.tokens(6)
        with Frozen(server.process):
            await stream.tokens(26)
        run = await stream.rest()
        assert run.tokens == EXPECTED
        states = durable(run)
        assert states[0]
        assert not all(states)
        # The whole missing suffix is written, and the end.
        await fleet.quiet()
        assert await recorded(store, "s") == PROMPT + EXPECTED
        record = await store.get("s")
        assert record is not None
        assert record.state is SessionState.FINISHED


async def test_a_stream_is_durable_again_when_the_store_is_back(
    tmp_path: Path, server: Server, store: RedisStore
) -> None:
    async with streaming(tmp_path, settings=on(server), request={"session": "s"}) as (_fleet, stream):
        await stream.tokens(6)
        with Frozen(server.process):
            await stream.tokens(16)
        await until_recorded(store, "s", len(PROMPT) + 16)
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert durable(run)[-1]
        assert not all(durable(run))


async def until_recorded(store: RedisStore, session: str, length: int) -> None:
    async with asyncio.timeout(10):
        while len(await recorded(store, session)) < length:
            pass


async def test_a_restarted_store_gets_the_whole_record_again(tmp_path: Path, server: Server, store: RedisStore) -> None:
    async with streaming(tmp_path, settings=on(server), request={"session": "s"}) as (fleet, stream):
        await stream.tokens(6)
        before = await store.get("s")
        server.restart()  # nothing is left in it, its scripts neither
        run = await stream.rest()
        assert run.tokens == EXPECTED
        await fleet.quiet()
        assert await recorded(store, "s") == PROMPT + EXPECTED
        record = await store.get("s")
        assert record is not None
        assert before is not None
        assert (record.state, record.epoch, record.sampling.seed) == (SessionState.FINISHED, before.epoch, 4)


async def test_a_store_that_comes_back_after_the_end_is_repaired(
    tmp_path: Path, server: Server, store: RedisStore
) -> None:
    async with streaming(tmp_path, settings=on(server), request={"session": "s"}) as (fleet, stream):
        await stream.tokens(6)
        frozen = Frozen(server.process).__enter__()
        try:
            run = await stream.rest()
            assert run.tokens == EXPECTED
            assert not durable(run)[-1]
            assert fleet.gateway.sessions.actors  # it stays for the record's sake
        finally:
            frozen.thaw()
        await fleet.quiet()
        record = await store.get("s")
        assert record is not None
        assert (list(record.tokens), record.state) == (PROMPT + EXPECTED, SessionState.FINISHED)


async def test_without_the_store_a_new_session_warns(tmp_path: Path, server: Server, store: RedisStore) -> None:
    async with streaming(tmp_path, settings=on(server)) as (fleet, stream), fleet.client() as client:
        with Frozen(server.process):
            run = await stream.rest()
            assert run.tokens == EXPECTED
            assert not any(durable(run))
            assert "store" in run.started.warnings[0]
            # A name that the client chose may be taken: nobody can tell.
            with pytest.raises(Unavailable):
                await generate(client, request_of(fleet, session="mine"))
        await fleet.quiet()
        assert await recorded(store, run.started.session) == PROMPT + EXPECTED


@pytest.mark.parametrize("count", [6, MAX_TOKENS - 6])
async def test_a_newer_owner_stops_this_one(tmp_path: Path, server: Server, store: RedisStore, count: int) -> None:
    async with streaming(tmp_path, settings=on(server), request={"session": "s"}) as (fleet, stream):
        await stream.tokens(count)
        with server.client() as client:
            newer = client.hincrby("paceline:{s}", "epoch", 1)
        with pytest.raises(Fenced):
            await stream.rest()
        await fleet.quiet()
        record = await store.get("s")
        assert record is not None
        assert (record.epoch, record.state) == (newer, SessionState.RUNNING)


class SilentAtTheStart(MemoryStore):
    """It goes away right after it was found to be there."""

    async def beat(self, owner: str, life_s: float) -> None:
        raise Unavailable("no answer in time")


async def test_a_store_that_goes_away_during_the_start_does_not_end_the_gateway(tmp_path: Path) -> None:
    async with streaming(tmp_path, store=SilentAtTheStart()) as (_fleet, stream):
        run = await stream.rest()
        assert run.tokens == EXPECTED


class FencedAtTheEnd(MemoryStore):
    """Another gateway takes the session over just before its last tokens are recorded."""

    async def append(self, append: Append) -> AppendOutcome:
        if append.from_len + len(append.tokens) == len(PROMPT) + MAX_TOKENS:
            return AppendOutcome.FENCED
        return await super().append(append)


async def test_a_newer_owner_at_the_last_moment_is_no_clean_end(tmp_path: Path) -> None:
    async with streaming(tmp_path, store=FencedAtTheEnd()) as (fleet, stream):
        with pytest.raises(Fenced):
            await stream.rest()
        await fleet.quiet()


async def test_a_session_that_waits_keeps_its_record_alive(tmp_path: Path, server: Server, store: RedisStore) -> None:
    gate = StepGate()
    settings = on(server, session_ttl_s=0.6, draft_wait_floor_ms=60_000, draft_wait_ceiling_ms=60_000)
    options: dict[str, Any] = {"method": perfect_method(LAW, gate=gate), "settings": settings}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        stream = client.generate(request_of(fleet, session="s"))
        assert isinstance(await anext(stream), Started)
        await anext(stream)
        with server.client() as reader:
            # Twice the expiry, without a round.
            for _ in range(6):
                await until(lambda: reader.pttl("paceline:{s}") < 450)
                await until(lambda: reader.pttl("paceline:{s}") > 450)
        gate.open()
        rest = [event async for event in stream]
        assert sum(len(event.token_ids) for event in rest if isinstance(event, Chunk)) >= MAX_TOKENS - 5
