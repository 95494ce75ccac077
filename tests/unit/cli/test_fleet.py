"""A fleet's watch over its Redis, and what it checks before it starts anything."""

from __future__ import annotations

import asyncio
import signal
import socket
from dataclasses import replace
from os import kill
from pathlib import Path

import pytest

from paceline.cli import fleet as fleet_module
from paceline.cli.fleet import Fleet
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import ConfigurationError, InvalidArgument


class Told:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.changes: asyncio.Queue[tuple[str, str, str]] = asyncio.Queue()

    def changed(self, part: str, state: str, detail: str = "") -> None:
        self.changes.put_nowait((part, state, detail))

    async def next(self, part: str) -> tuple[str, str]:
        while True:
            name, state, detail = await asyncio.wait_for(self.changes.get(), 20)
            if name == part:
                return state, detail


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


@pytest.mark.parametrize(("field", "flag"), [("port", "--port"), ("http_port", "--http-port")])
async def test_a_taken_port_is_found_before_anything_is_prepared(field: str, flag: str) -> None:
    told = Told()
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        fleet = Fleet(replace(FleetOptions(port=0, http_port=0), **{field: port}), told)
        with pytest.raises(InvalidArgument, match=f"{flag} {port} of 127.0.0.1 cannot be used") as caught:
            await fleet.start()
        await fleet.stop()
    assert caught.value.field == field
    assert told.changes.empty()


async def test_a_log_folder_has_one_fleet_at_a_time(tmp_path: Path) -> None:
    options = FleetOptions(port=0, http_port=0, log_dir=tmp_path / "logs")
    first, told = Fleet(options), Told()
    first._take_log_dir()
    log = options.log_dir / "gateway.log"
    log.write_text("what the first fleet says")
    second = Fleet(options, told)
    with pytest.raises(ConfigurationError, match="--log-dir") as caught:
        await second.start()
    await second.stop()
    assert caught.value.field == "log_dir"
    assert told.changes.empty()
    assert log.read_text() == "what the first fleet says"
    third = Fleet(options)
    with pytest.raises(ConfigurationError, match="--log-dir"):  # the refused one's end does not free it
        third._take_log_dir()
    await first.stop()
    third._take_log_dir()
    await third.stop()
