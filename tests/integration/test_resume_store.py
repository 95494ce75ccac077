"""Resuming while Redis is killed, stopped, or back with nothing in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paceline_gateway.service import GatewayService
from pydantic import SecretStr

from paceline.client import AsyncClient, ResumePolicy
from paceline.errors import Fenced, NotFound, Unavailable
from paceline.generation import Chunk, GenerationEvent, Started
from paceline.session.redis_store import RedisStore
from paceline.session.store import SessionState
from tests.integration.fleet import Fleet, perfect_method, until
from tests.integration.paced import EXPECTED, LAW, MAX_TOKENS, PROMPT, Pace, PacedRunner, Stream, request_of, streaming
from tests.integration.session_stores import RECORD, Server, start_server
from tests.integration.test_resume import point, text_of, tokens_of

START = len(PROMPT)
EXPIRY_S = 60.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server("valkey")
    yield running
    running.process.stop()


@pytest.fixture
async def store(server: Server) -> AsyncIterator[RedisStore]:
    """The record as another process would see it."""
    if server.process.ended:
        server.process.restart()
    with server.client() as client:
        client.flushall()
    reader = RedisStore.from_url(server.url, expiry_s=EXPIRY_S, timeout_s=5.0)
    yield reader
    await reader.close()


def kill(server: Server) -> None:
    """kill -9; returns when it is gone."""
    assert server.process.pid is not None
    os.kill(server.process.pid, signal.SIGKILL)
    while not server.process.ended:
        pass


@contextlib.asynccontextmanager
async def two_gateways(
    folder: Path, server: Server, **options: Any
) -> AsyncIterator[tuple[Fleet, Stream, GatewayService, AsyncClient]]:
    settings = {"redis_url": SecretStr(server.url), "session_ttl_s": EXPIRY_S, "redis_timeout_ms": 300}
    async with (
        streaming(folder, settings=settings, request={"session": "s"}, **options) as (fleet, stream),
        fleet.another_gateway() as (other, address),
        AsyncClient(address, resume=None) as client,
    ):
        yield fleet, stream, other, client


async def appears(store: RedisStore) -> list[int]:
    """The tokens of the record as it is seen first."""
    async with asyncio.timeout(10):
        while (record := await store.get("s")) is None:
            pass
    return list(record.tokens)


async def test_while_redis_is_dead_streams_go_on_and_nothing_is_resumed(
    tmp_path: Path, server: Server, store: RedisStore
) -> None:
    async with two_gateways(tmp_path, server) as (_fleet, stream, _other, client):
        await stream.tokens(6)
        before = await store.get("s")
        assert before is not None
        kill(server)
        await stream.tokens(26)
        assert not [event for event in stream.events if isinstance(event, Chunk)][-1].durable
        had = tokens_of(stream.events)
        with pytest.raises(Unavailable, match="no session can be resumed"):
            await anext(client.resume(point(had)))
        server.process.restart()  # with nothing in it
        # The owner writes all that is missing in one call: the record is never seen without it.
        assert (await appears(store))[: START + len(had)] == PROMPT + had
        resumed = client.resume(point(had))
        assert isinstance(await anext(resumed), Started)
        with pytest.raises(Fenced):
            await stream.rest()
        assert had + tokens_of([event async for event in resumed]) == EXPECTED
        record = await store.get("s")
        assert record is not None
        assert (list(record.tokens), record.state) == (PROMPT + EXPECTED, SessionState.FINISHED)
        assert record.epoch > before.epoch


async def test_tokens_that_redis_never_got_are_made_again_elsewhere(
    tmp_path: Path, server: Server, store: RedisStore
) -> None:
    async with two_gateways(tmp_path, server) as (fleet, stream, _other, client):
        await stream.tokens(6)
        assert server.process.pid is not None
        os.kill(server.process.pid, signal.SIGSTOP)
        try:
            await stream.tokens(26)
            had = tokens_of(stream.events)
            # As if this gateway died now: it writes nothing of what it has sent.
            for actor in fleet.gateway.sessions.actors:
                actor.cancel(Fenced("dead"))
        finally:
            os.kill(server.process.pid, signal.SIGCONT)
        stream.pace.open()
        await until(lambda: not fleet.gateway.sessions.actors)
        assert had + tokens_of([event async for event in client.resume(point(had))]) == EXPECTED
        record = await store.get("s")
        assert record is not None
        assert list(record.tokens) == PROMPT + EXPECTED


async def test_the_client_waits_for_redis_and_goes_on(tmp_path: Path, server: Server, store: RedisStore) -> None:
    pace = Pace()
    settings = {"redis_url": SecretStr(server.url), "redis_timeout_ms": 200}
    options: dict[str, Any] = {"method": perfect_method(LAW), "runner": lambda law: PacedRunner(law, pace)}
    patient = ResumePolicy(give_up_after_s=20.0, first_pause_s=0.01, max_pause_s=0.05)
    async with (
        Fleet.start(tmp_path, LAW, settings=settings, **options) as fleet,
        fleet.another_gateway() as (_, address),
        AsyncClient([fleet.address, address], resume=patient) as client,
        AsyncClient(address, resume=None) as second,
    ):
        client._chosen = 0
        stream = client.generate(request_of(fleet, session="s"), timeout_s=60.0)
        events: list[GenerationEvent] = [await anext(stream)]
        while len(tokens_of(events)) < 6:
            await pace.entered()
            pace.allow()
            events.append(await anext(stream))
        kill(server)
        pace.open()
        refused = 0
        ending = asyncio.create_task(fleet.gateway.sessions.stop(0.1))  # its gateway shuts down
        rest = asyncio.create_task(collect(stream))
        while not refused:
            try:
                await second.get_session("s")
            except Unavailable:
                refused += 1
        await ending
        server.process.restart()
        # The record is lost and so is the gateway that could write it again: it is begun again, and nobody sees it.
        events += await rest
        assert tokens_of(events) == EXPECTED
        assert text_of(events) == fleet.tokenizer.decode(EXPECTED)
        assert len(tokens_of(events)) == MAX_TOKENS


async def test_a_turn_that_the_store_has_forgotten_shares_its_epoch_with_nobody(
    tmp_path: Path, server: Server, store: RedisStore
) -> None:
    """A failover has brought back the turn before: the next one, of another gateway, begins from the same record."""
    before = replace(RECORD, session="s", epoch=7, owner="gateway-0", tenant="", state=SessionState.FINISHED)
    await store.create(before)
    async with two_gateways(tmp_path, server) as (fleet, stream, _other, client):
        await stream.tokens(6)
        forgotten = await store.get("s")
        assert forgotten is not None
        with server.client() as redis:
            redis.flushall()
        await store.create(before)
        later = client.generate(request_of(fleet, session="s"), timeout_s=60.0)
        events = [await anext(later)]
        now = await store.get("s")
        assert now is not None
        assert now.owner != forgotten.owner
        assert now.epoch > forgotten.epoch > before.epoch
        with pytest.raises(Fenced):
            await stream.rest()
        events += [event async for event in later]
        assert tokens_of(events) == EXPECTED


async def test_a_take_over_that_the_store_has_forgotten_shares_its_epoch_with_nobody(
    tmp_path: Path, server: Server, store: RedisStore
) -> None:
    async with two_gateways(tmp_path, server) as (fleet, stream, _other, client), fleet.client() as first:
        await stream.tokens(6)
        had = tokens_of(stream.events)
        before = await store.get("s")
        assert before is not None
        resumed = client.resume(point(had))
        await anext(resumed)
        forgotten = await store.get("s")
        assert forgotten is not None
        with server.client() as redis:
            redis.flushall()
        await store.create(before)
        again = first.resume(point(had))
        await anext(again)
        now = await store.get("s")
        assert now is not None
        assert now.owner == before.owner
        assert now.epoch > forgotten.epoch > before.epoch
        for fenced in (stream.rest(), collect(resumed)):
            with pytest.raises(Fenced):
                await fenced
        assert had + tokens_of(await collect(again)) == EXPECTED


async def collect(stream: AsyncIterator[GenerationEvent]) -> list[GenerationEvent]:
    return [event async for event in stream]


async def test_an_empty_redis_and_a_dead_owner_is_not_found(tmp_path: Path, server: Server, store: RedisStore) -> None:
    async with two_gateways(tmp_path, server) as (_fleet, stream, _other, client):
        run = await stream.rest()
        kill(server)
        server.process.restart()
        with pytest.raises(NotFound):
            await anext(client.resume(point(run.tokens)))
