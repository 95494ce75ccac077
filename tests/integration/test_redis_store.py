"""What is particular to the store on a server: grouping, expiry, restarts, silence, and errors that help."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator

import pytest

from paceline.errors import ConfigurationError, DataLoss, Unavailable
from paceline.session.embedded import EmbeddedRedis
from paceline.session.redis_store import RedisStore
from paceline.session.store import AppendOutcome, SessionState
from tests.integration.session_stores import EXPIRY_S, RECORD, Server, append, record, redis_store, server

__all__ = ["redis_store", "server"]

KEYS = ("paceline:{chat.1}", "paceline:{chat.1}:tokens")


async def test_keys_are_as_documented(redis_store: RedisStore, server: Server) -> None:
    await redis_store.create(RECORD)
    await redis_store.append(append(258, at=3))
    with server.client() as client:
        assert set(client.keys("*")) == set(KEYS)
        assert client.type(KEYS[0]) == "hash"
        assert client.hget(KEYS[0], "committed_len") == "4"
        assert client.hget(KEYS[0], "seed") == str(-(2**63))
        assert client.getrange(KEYS[1], 12, -1) == "\x02\x01\x00\x00"


async def test_every_write_extends_both_keys(redis_store: RedisStore, server: Server) -> None:
    await redis_store.create(RECORD)
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: redis_store.append(append(21, at=3)),
        lambda: redis_store.append(append(21, at=3)),
        lambda: redis_store.put(record(tokens=(*RECORD.tokens, 21))),
        lambda: redis_store.finish("chat.1", 3, RECORD.owner, SessionState.FINISHED, "stop"),
        lambda: redis_store.finish("chat.1", 3, RECORD.owner, SessionState.FINISHED, "stop"),
        lambda: redis_store.touch("chat.1", 3, RECORD.owner),
        lambda: redis_store.take_over(RECORD, "gateway-2", 4),
    ]
    with server.client() as client:
        for write in writes:
            for key in KEYS:
                client.pexpire(key, 1000)
            await write()
            for key in KEYS:
                assert EXPIRY_S * 900 < client.pttl(key) <= EXPIRY_S * 1000


async def test_records_expire(server: Server) -> None:
    store = RedisStore.from_url(server.url, expiry_s=0.001)
    await store.create(record(session="short"))
    while await store.get("short") is not None:
        pass
    assert await store.append(append(1, at=3, session="short")) is AppendOutcome.MISSING
    await store.close()


async def test_appends_of_one_turn_share_one_pipeline(redis_store: RedisStore) -> None:
    names = [f"s{index}" for index in range(256)]
    await asyncio.gather(*[redis_store.create(record(session=name)) for name in names])
    before = redis_store.num_pipelines
    outcomes = await asyncio.gather(*[redis_store.append(append(21, 22, at=3, session=name)) for name in names])
    assert set(outcomes) == {AppendOutcome.APPLIED}
    assert redis_store.num_pipelines == before + 1


async def test_writes_of_every_kind_share_the_pipeline(redis_store: RedisStore) -> None:
    names = [f"s{index}" for index in range(40)]
    await asyncio.gather(*[redis_store.create(record(session=name)) for name in names])
    before = redis_store.num_pipelines
    outcomes = await asyncio.gather(
        *[redis_store.touch(name, 3, RECORD.owner) for name in names[:10]],
        *[redis_store.take_over(record(session=name), "gateway-2", 4) for name in names[10:20]],
        *[redis_store.append(append(21, at=3, session=name)) for name in names[20:30]],
        *[redis_store.finish(name, 3, RECORD.owner, SessionState.FINISHED, "stop") for name in names[30:]],
    )
    assert set(outcomes) == {AppendOutcome.APPLIED}
    assert redis_store.num_pipelines == before + 1


async def test_calls_made_while_a_group_is_under_way_form_the_next_in_order(redis_store: RedisStore) -> None:
    await redis_store.create(RECORD)
    before = redis_store.num_pipelines
    calls = [asyncio.create_task(redis_store.append(append(step, at=3 + step))) for step in range(5)]
    for _ in range(2):  # the calls are made in the first turn, the group is sent in the second
        await asyncio.sleep(0)
    assert redis_store.num_pipelines == before + 1
    calls += [asyncio.create_task(redis_store.append(append(step, at=3 + step))) for step in range(5, 9)]
    assert set(await asyncio.gather(*calls)) == {AppendOutcome.APPLIED}
    assert redis_store.num_pipelines == before + 2


async def test_a_caller_that_gives_up_disturbs_nobody(redis_store: RedisStore) -> None:
    await redis_store.create(RECORD)
    given_up = asyncio.create_task(redis_store.append(append(21, at=3)))
    other = asyncio.create_task(redis_store.append(append(22, at=4)))
    await asyncio.sleep(0)
    given_up.cancel()
    assert await other is AppendOutcome.APPLIED


async def test_scripts_that_the_server_has_forgotten_are_loaded_again(redis_store: RedisStore, server: Server) -> None:
    await redis_store.create(RECORD)
    with server.client() as client:
        client.script_flush()
    outcomes = await asyncio.gather(*[redis_store.append(append(step, at=3 + step)) for step in range(8)])
    assert set(outcomes) == {AppendOutcome.APPLIED}


async def test_a_restarted_server_is_used_again_and_gets_the_record_back(
    redis_store: RedisStore, server: Server
) -> None:
    await redis_store.create(RECORD)
    await redis_store.append(append(21, at=3))
    server.restart()
    assert await redis_store.append(append(22, at=4)) is AppendOutcome.MISSING
    whole = record(tokens=(*RECORD.tokens, 21, 22))
    assert await redis_store.put(whole) is AppendOutcome.APPLIED
    assert await redis_store.append(append(23, at=5)) is AppendOutcome.APPLIED
    assert await redis_store.get("chat.1") == record(tokens=(*RECORD.tokens, 21, 22, 23))


async def test_a_record_can_be_created_right_after_a_restart(redis_store: RedisStore, server: Server) -> None:
    await redis_store.create(RECORD)
    server.restart()
    await redis_store.create(RECORD)
    assert await redis_store.get("chat.1") == RECORD


class LossyProxy:
    """Stands before a server; once `lose_next_answer` is set it breaks a connection instead of passing an answer on."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.lose_next_answer = False
        self.lost = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._port)
        forward = asyncio.create_task(self._forward(reader, upstream_writer))
        while answer := await upstream_reader.read(65536):
            if self.lose_next_answer:
                self.lose_next_answer, self.lost = False, self.lost + 1
                break
            writer.write(answer)
        for end in (writer, upstream_writer):
            end.close()
        await forward

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


async def test_calls_whose_answers_are_lost_are_repeated_and_take_effect_once(
    redis_store: RedisStore, server: Server
) -> None:
    await redis_store.create(record(session="loads-the-scripts"))
    proxy = LossyProxy(server.process.port)
    async with await asyncio.start_server(proxy.handle, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1]
        store = RedisStore.from_url(f"redis://127.0.0.1:{port}", expiry_s=EXPIRY_S, timeout_s=5.0)
        await store.ping()
        proxy.lose_next_answer = True
        await store.create(RECORD)
        proxy.lose_next_answer = True
        assert await store.append(append(21, at=3)) is AppendOutcome.ALREADY_APPLIED
        proxy.lose_next_answer = True
        assert await store.get("chat.1") == record(tokens=(*RECORD.tokens, 21))
        assert proxy.lost == 3
        await store.close()


async def test_while_the_server_is_down_calls_fail_clearly_and_afterwards_work(
    redis_store: RedisStore, server: Server
) -> None:
    await redis_store.create(RECORD)
    server.process.stop()
    for call in (redis_store.append(append(21, at=3)), redis_store.get("chat.1"), redis_store.ping()):
        with pytest.raises(Unavailable, match="Redis not reachable at redis://127"):
            await call
    server.process.start()
    assert await redis_store.put(RECORD) is AppendOutcome.APPLIED


@pytest.fixture
def silent_server(server: Server) -> Iterator[Server]:
    """The server, stopped in mid-air: it accepts what is sent and answers nothing."""
    pid = server.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    yield server
    os.kill(pid, signal.SIGCONT)


async def test_a_silent_server_is_unavailable_in_time(silent_server: Server) -> None:
    store = RedisStore.from_url(silent_server.url, timeout_s=0.05)
    calls = [store.append(append(21, at=3)), store.append(append(22, at=4)), store.get("chat.1"), store.ping()]
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, Unavailable)
        assert "no answer in time" in result.message
    await store.close()


async def test_answers_are_not_mixed_up_after_a_silence(server: Server) -> None:
    """What the server answers too late must not be taken for the answer to a later call."""
    store = RedisStore.from_url(server.url, timeout_s=0.2)
    await store.put(RECORD)
    pid = server.process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        lost = await asyncio.gather(
            store.append(append(21, at=3)), store.get("chat.1"), store.ping(), return_exceptions=True
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    assert all(isinstance(result, Unavailable) for result in lost)
    assert await store.get("nobody") is None
    assert await store.append(append(21, 22, at=3)) is AppendOutcome.APPLIED
    found = await store.get("chat.1")
    assert found is not None
    assert found.tokens == (*RECORD.tokens, 21, 22)
    await store.close()


async def test_an_error_names_the_server_and_what_to_do_but_no_password() -> None:
    with EmbeddedRedis() as gone:
        port = gone.port
    store = RedisStore.from_url(f"redis://user:hunter2@127.0.0.1:{port}/0")
    with pytest.raises(Unavailable) as caught:
        await store.ping()
    assert f"Redis not reachable at redis://127.0.0.1:{port}" in caught.value.message
    assert "paceline up" in caught.value.message
    assert "hunter2" not in caught.value.message
    assert store.address == f"redis://127.0.0.1:{port}"
    await store.close()


async def test_a_wrong_password_is_said_to_be_one(server: Server) -> None:
    with server.client() as client:
        client.config_set("requirepass", "right")
        client.auth("right")
        try:
            store = RedisStore.from_url(server.url.replace("//", "//:hunter2@"))
            for call in (store.ping(), store.put(RECORD)):
                with pytest.raises(Unavailable, match="refuses calls") as caught:
                    await call
                assert "hunter2" not in caught.value.message
            await store.close()
        finally:
            client.config_set("requirepass", "")


async def test_a_refused_write_says_why(redis_store: RedisStore, server: Server) -> None:
    with server.client() as client:
        client.set(KEYS[0], "no hash", ex=10)
        with pytest.raises(Unavailable, match="refuses calls: WRONGTYPE"):
            await redis_store.append(append(1, at=3))
        client.delete(KEYS[0])


async def test_a_record_of_nonsense_is_data_loss(redis_store: RedisStore, server: Server) -> None:
    await redis_store.create(RECORD)
    with server.client() as client:
        client.hset(KEYS[0], "sampling", "{")
        with pytest.raises(DataLoss, match=r"session 'chat\.1' cannot be read"):
            await redis_store.get("chat.1")
        client.delete(KEYS[1])
    assert await redis_store.get("chat.1") is None
    assert await redis_store.append(append(1, at=3)) is AppendOutcome.MISSING


async def test_a_closed_store_answers(server: Server) -> None:
    store = RedisStore.from_url(server.url)
    waiting = asyncio.create_task(store.append(append(1, at=3, session="nobody")))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    with pytest.raises(Unavailable, match="closed"):
        await store.append(append(1, at=3))


@pytest.mark.parametrize("url", ["127.0.0.1:6379", "http://host", "redis://host:port"])
def test_a_url_that_is_none_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(ConfigurationError, match="redis_url must look like"):
        RedisStore.from_url(url)


@pytest.mark.parametrize(("expiry_s", "timeout_s"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)])
def test_times_must_be_positive(expiry_s: float, timeout_s: float) -> None:
    with pytest.raises(ConfigurationError, match="must be above 0"):
        RedisStore.from_url("redis://localhost", expiry_s=expiry_s, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("redis://:secret@db.example:6380/2", "redis://db.example:6380"),
        ("rediss://u:secret@db.example", "redis://db.example:6379"),
        ("unix:///run/redis.sock?password=secret", "unix:///run/redis.sock"),
    ],
)
def test_the_address_shows_no_secret(url: str, address: str) -> None:
    assert RedisStore.from_url(url).address == address
