"""Sessions belong to the API key that made them, and one generation at a time runs on each, on whatever gateway."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr

from paceline.client import AsyncClient
from paceline.errors import ModelError, NotFound, SessionBusy
from paceline.session.memory_store import MemoryStore
from paceline.session.redis_store import RedisStore
from paceline.session.store import AppendOutcome, SessionState, SessionStore
from tests.fakes.toy_runner import hash_law, poisoned_law
from tests.integration.fleet import VOCAB, Fleet, Run, generate, perfect_method, plain_tokens
from tests.integration.paced import request_of, streaming
from tests.integration.session_stores import Server, start_server
from tests.integration.test_api_keys import ALICE, keys_file

LAW = hash_law(VOCAB, seed=5)
PROMPT = [1, 2, 3]
BOB = "sk-bob-0123456789abcdefgh"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server("valkey")
    yield running
    running.process.stop()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """A gateway that knows alice and bob."""
    return {"api_keys_file": keys_file(tmp_path, f"alice: {ALICE}\nbob: {BOB}\n")}


@pytest.fixture
def shared(settings: dict[str, Any], server: Server) -> dict[str, Any]:
    """The same with a store that gateways share."""
    with server.client() as client:
        client.flushall()
    return settings | {"redis_url": SecretStr(server.url)}


@contextlib.asynccontextmanager
async def two_gateways(folder: Path, settings: dict[str, Any]) -> AsyncIterator[tuple[Fleet, Fleet]]:
    folders = [folder / "one", folder / "two"]
    for each in folders:
        each.mkdir()
    async with (
        Fleet.start(folders[0], LAW, settings=settings, method=perfect_method(LAW)) as one,
        Fleet.start(folders[1], LAW, settings=settings, method=perfect_method(LAW)) as two,
    ):
        yield one, two


async def refusal(client: AsyncClient, fleet: Fleet, session: str) -> str:
    """The words in which a generation is refused; the session's name is taken out of them."""
    with pytest.raises(NotFound) as caught:
        await generate(client, fleet.request(PROMPT, session=session))
    assert caught.value.field == "session"
    return caught.value.message.replace(repr(session), "NAME")


async def unknown(client: AsyncClient, session: str) -> str:
    with pytest.raises(NotFound) as caught:
        await client.get_session(session)
    assert caught.value.field == "session"
    return caught.value.message.replace(repr(session), "NAME")


async def test_a_session_of_somebody_else_is_as_if_it_did_not_exist(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with (
        streaming(tmp_path, settings=settings) as (fleet, stream),
        fleet.client(ALICE) as alice,
        fleet.client(BOB) as bob,
    ):
        words = await unknown(bob, "no-such-session")
        running = alice.generate(request_of(fleet, session="hers"))
        await anext(running)
        assert await unknown(bob, "hers") == words
        assert await refusal(bob, fleet, "hers") == words
        assert (await alice.get_session("hers")).state is SessionState.RUNNING
        stream.pace.open()
        assert [event async for event in running]
        await fleet.quiet()
        assert await unknown(bob, "hers") == words
        assert await refusal(bob, fleet, "hers") == words
        assert (await alice.get_session("hers")).state is SessionState.FINISHED
        # A name of his own, and a drawn one, are his.
        run = await generate(bob, fleet.request(PROMPT))
        assert (await bob.get_session(run.started.session)).session == run.started.session
        assert await unknown(alice, run.started.session) == words


async def test_a_second_generation_on_a_running_session_is_refused(tmp_path: Path) -> None:
    async with streaming(tmp_path, request={"session": "mine"}) as (fleet, stream), fleet.client() as client:
        await stream.tokens(5)
        with pytest.raises(SessionBusy, match=r"wait for its end, .* or use another name") as caught:
            await generate(client, fleet.request(PROMPT, session="mine"))
        assert caught.value.field == "session"
        run = await stream.rest()
        assert list((await client.get_session("mine")).tokens)[3:] == run.tokens


@pytest.mark.parametrize("on_redis", [False, True])
async def test_a_name_is_used_again_by_its_owner(tmp_path: Path, shared: dict[str, Any], on_redis: bool) -> None:
    """One generation right after the other: the end that a client has seen is the end."""
    settings = shared if on_redis else {"api_keys_file": shared["api_keys_file"]}
    async with (
        Fleet.start(tmp_path, LAW, settings=settings, method=perfect_method(LAW)) as fleet,
        fleet.client(ALICE) as client,
    ):
        epochs = []
        for turn in range(1, 13):
            prompt = [turn, 2, 3]
            run = await generate(client, fleet.request(prompt, session="chat"))
            assert run.tokens == plain_tokens(LAW, prompt, 20)
            info = await client.get_session("chat")
            assert info.state is SessionState.FINISHED
            assert list(info.tokens) == prompt + run.tokens
            epochs.append(info.epoch)
        assert epochs == sorted(set(epochs))


async def test_after_a_failure_and_after_a_client_that_left(tmp_path: Path) -> None:
    law = poisoned_law(LAW, lambda prefix: prefix[0] == 9 and len(prefix) > 5)
    async with Fleet.start(tmp_path, law, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        with pytest.raises(ModelError):
            await generate(client, fleet.request([9, 1, 2], session="s"))
        failed = await client.get_session("s")
        assert failed.state is SessionState.FAILED
        stream = client.generate(fleet.request(PROMPT, session="s", max_tokens=200))
        await anext(stream)
        await stream.aclose()
        await fleet.quiet()
        left = await client.get_session("s")
        assert left.epoch > failed.epoch
        assert (await generate(client, fleet.request(PROMPT, session="s"))).tokens == plain_tokens(LAW, PROMPT, 20)
        assert (await client.get_session("s")).epoch > left.epoch


async def test_two_gateways_and_one_session(tmp_path: Path, shared: dict[str, Any]) -> None:
    async with two_gateways(tmp_path, shared) as (one, two), one.client(ALICE) as here, two.client(ALICE) as there:
        await generate(here, one.request(PROMPT, session="s"))
        epoch = (await there.get_session("s")).epoch
        await generate(there, two.request([7, 7], session="s"))
        assert (await here.get_session("s")).epoch > epoch
        async with two.client(BOB) as bob:
            assert await refusal(bob, two, "s") == await unknown(bob, "nobody")


@pytest.mark.parametrize("used_before", [False, True])
async def test_of_two_gateways_that_race_for_a_session_one_wins(
    tmp_path: Path, shared: dict[str, Any], used_before: bool
) -> None:
    async with two_gateways(tmp_path, shared) as fleets, contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(fleet.client(ALICE)) for fleet in fleets]
        store = RedisStore.from_url(shared["redis_url"].get_secret_value(), timeout_s=5.0)
        stack.push_async_callback(store.close)
        for attempt in range(8):
            session = f"s{attempt}"
            epoch_before = None
            if used_before:
                await generate(clients[0], fleets[0].request(PROMPT, session=session))
                epoch_before = (await clients[1].get_session(session)).epoch
            prompts = [[1, attempt + 1], [2, attempt + 1]]
            outcomes: list[Run | BaseException] = await asyncio.gather(
                *[
                    generate(client, fleet.request(prompt, session=session, max_tokens=60))
                    for client, fleet, prompt in zip(clients, fleets, prompts, strict=True)
                ],
                return_exceptions=True,
            )
            runs = [outcome for outcome in outcomes if isinstance(outcome, Run)]
            assert len(runs) == 1, outcomes
            assert any(isinstance(outcome, SessionBusy) for outcome in outcomes)
            record = await store.get(session)
            assert record is not None
            assert (record.tenant, record.state) == ("alice", SessionState.FINISHED)
            assert epoch_before is None or record.epoch > epoch_before
            winner = prompts[outcomes.index(runs[0])]
            assert list(record.tokens) == winner + runs[0].tokens


async def left_running(store: SessionStore, owner: str | None = None) -> None:
    """Makes the record say that its generation still runs, or that another owner's does which came after it."""
    record = await store.get("s")
    assert record is not None
    running = replace(record, state=SessionState.RUNNING, finish_reason="")
    later = running if owner is None else replace(running, owner=owner, epoch=record.epoch + 1)
    assert await store.put(later) is AppendOutcome.APPLIED


async def test_the_session_of_a_dead_gateway_is_free_when_its_last_sign_of_life_is_old(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Fleet.start(tmp_path, LAW, store=store) as fleet, fleet.client() as client:
        await generate(client, fleet.request(PROMPT, session="s"))
        epoch = (await client.get_session("s")).epoch
        await left_running(store, owner="another-gateway")
        await store.beat("another-gateway", 60.0)
        with pytest.raises(SessionBusy, match="Resume"):
            await generate(client, fleet.request(PROMPT, session="s"))
        await store.beat("another-gateway", 0.0)
        run = await generate(client, fleet.request(PROMPT, session="s"))
        assert run.tokens == plain_tokens(LAW, PROMPT, 20)
        assert (await client.get_session("s")).epoch > epoch + 1  # which was the dead one's


async def test_a_record_whose_end_this_gateway_could_not_write_keeps_nobody_out(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Fleet.start(tmp_path, LAW, store=store) as fleet, fleet.client() as client:
        await generate(client, fleet.request(PROMPT, session="s"))
        epoch = (await client.get_session("s")).epoch
        await left_running(store)
        await generate(client, fleet.request(PROMPT, session="s"))
        assert (await client.get_session("s")).epoch > epoch


# --- over HTTP --------------------------------------------------------------------------------------------------------


async def complete_over_http(fleet: Fleet, key: str, session: str) -> httpx.Response:
    body = {"model": "toy", "prompt": "abc", "max_tokens": 4, "session_id": session}
    async with httpx.AsyncClient(base_url=f"http://{fleet.gateway.addresses['http']}") as http:
        return await http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"})


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def test_both_doors_know_the_same_sessions(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with (
        streaming(tmp_path, settings=settings | {"http_port": 0}) as (fleet, stream),
        fleet.client(ALICE) as alice,
        fleet.client(BOB) as bob,
    ):
        running = alice.generate(request_of(fleet, session="hers"))
        await anext(running)
        foreign = await complete_over_http(fleet, BOB, "hers")
        assert error_of(foreign) == (404, "not_found", "session_id")
        assert "no session 'hers', or it has expired" in foreign.json()["error"]["message"]
        assert error_of(await complete_over_http(fleet, ALICE, "hers")) == (409, "session_busy", "session_id")
        epoch = (await alice.get_session("hers")).epoch
        stream.pace.open()
        assert [event async for event in running]
        assert (await complete_over_http(fleet, ALICE, "hers")).status_code == 200
        assert (await alice.get_session("hers")).epoch > epoch
        assert error_of(await complete_over_http(fleet, BOB, "hers")) == (404, "not_found", "session_id")
        assert (await complete_over_http(fleet, BOB, "his")).status_code == 200
        assert (await bob.get_session("his")).state is SessionState.FINISHED
