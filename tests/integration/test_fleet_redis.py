"""A fleet's watch over its Redis."""

from __future__ import annotations

import asyncio
import signal
import socket
from os import kill

import pytest

from paceline.cli import fleet as fleet_module
from paceline.cli.fleet import Fleet
from paceline.cli.fleet_options import FleetOptions
from tests.fakes.fleet_observer import Told


async def test_a_redis_that_ends_is_told_and_started_again_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "_MAX_REDIS_RESTARTS", 2)
    told = Told()
    fleet = Fleet(FleetOptions(port=0, http_port=0), told)
    try:
        url = await fleet._start_redis()
        assert await told.next("redis") == ("starting", "")
        assert await told.next("redis") == ("ready", url)
        watching = asyncio.create_task(fleet._watch_redis())
        redis = fleet._redis
        assert redis is not None
        for _ in range(2):
            assert redis.pid is not None
            kill(redis.pid, signal.SIGKILL)
            assert (await told.next("redis"))[0] == "ended"
            state, detail = await told.next("redis")
            assert state == "ready"
            assert detail.startswith(url)
        assert redis.pid is not None
        kill(redis.pid, signal.SIGKILL)
        state, detail = await told.next("redis")
        assert state == "ended"
        assert "once too often" in detail
        await asyncio.wait_for(watching, 10)
    finally:
        await fleet.stop()


async def test_a_redis_whose_port_was_taken_meanwhile_is_told_and_left() -> None:
    told = Told()
    fleet = Fleet(FleetOptions(port=0, http_port=0), told)
    try:
        await fleet._start_redis()
        redis = fleet._redis
        assert redis is not None
        assert redis.pid is not None
        port = redis.port
        kill(redis.pid, signal.SIGKILL)
        while not redis.ended:  # noqa: ASYNC110 - only its parent can tell
            await asyncio.sleep(0.01)
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            await asyncio.wait_for(fleet._watch_redis(), 20)
        assert [(await told.next("redis"))[0] for _ in range(3)] == ["starting", "ready", "ended"]
        assert "Address already in use" in (await told.next("redis"))[1]
    finally:
        await fleet.stop()
