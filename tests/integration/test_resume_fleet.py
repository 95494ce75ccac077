"""Resuming in a fleet that changes: verifiers that are used again, gone or back, rivals, and a gateway that drains."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from paceline.client import AsyncClient
from paceline.errors import Fenced, SessionBusy, Unavailable
from paceline.session.store import SessionState
from tests.integration.fleet import until
from tests.integration.paced import EXPECTED, PROMPT, used_verifier
from tests.integration.test_resume import point, read, tokens_of, two_gateways


async def test_the_verifier_that_holds_the_rows_is_used_again(tmp_path: Path) -> None:
    for count in (1, 2):
        async with two_gateways(tmp_path / str(count), num_verifiers=3) as (fleet, stream, other, client):
            await stream.tokens(6)
            used = fleet.verifiers[used_verifier(fleet)].address
            # Whatever else it has to do: the other gateway counts its own sessions only.
            resumed = client.resume(point(tokens_of(stream.events)))
            await anext(resumed)
            await until(lambda other=other: other.verifiers.num_sessions == 1)  # type: ignore[misc]
            assert other.verifiers is not None
            assert [address for address, load in other.verifiers.loads.items() if load] == [used]
            with pytest.raises(Fenced):
                await stream.rest()
            async for _ in resumed:
                pass


async def test_a_verifier_that_is_gone_is_replaced(tmp_path: Path) -> None:
    async with two_gateways(tmp_path, num_verifiers=2, settings={"return_window_ms": 1}) as world:
        fleet, stream, _other, client = world
        await stream.tokens(6)
        had = tokens_of(stream.events)
        index = used_verifier(fleet)
        await stream.leave()
        stream.pace.open()
        await fleet.verifiers[index].kill()
        _, chunks, finished = await read(client.resume(point(had)))
        assert had + tokens_of(chunks) == EXPECTED
        assert finished.evidence.verifier == fleet.verifiers[1 - index].address


async def test_a_session_that_failed_for_want_of_a_verifier_goes_on_when_one_is_back(tmp_path: Path) -> None:
    settings = {"verifier_patience_ms": 50, "return_window_ms": 20, "verifier_wait_ms": 50}
    async with two_gateways(tmp_path, settings=settings) as (fleet, stream, _other, client):
        await stream.tokens(11)
        stream.pace.open()
        await fleet.verifiers[0].kill()
        with pytest.raises(Unavailable):
            await stream.rest()
        had = tokens_of(stream.events)
        record = await client.get_session("s")
        assert (record.state, record.finish_reason) == (SessionState.FAILED, "unavailable")
        with pytest.raises(Unavailable, match="no verifier"):
            await read(client.resume(point(had)))
        # A try that came to nothing has taken nothing over.
        assert (await client.get_session("s")).epoch == record.epoch
        await fleet.verifiers[0].boot()
        await until(lambda: bool(_other.verifiers and _other.verifiers.snapshot.ready))
        _, chunks, _ = await read(client.resume(point(had)))
        assert had + tokens_of(chunks) == EXPECTED


async def test_two_who_resume_at_once_end_in_one_owner(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (fleet, stream, _other, client), fleet.client() as first:
        await stream.tokens(6)
        had = tokens_of(stream.events)
        stream.pace.open()

        async def attempt(by: AsyncClient) -> list[int] | None:
            try:
                return tokens_of((await read(by.resume(point(had))))[1])
            except (Fenced, SessionBusy):
                return None

        results = await asyncio.gather(*[attempt(by) for by in (client, first, client, first)])
        whole = [result for result in results if result is not None]
        assert whole
        assert all(had + result == EXPECTED for result in whole)
        record = await client.get_session("s")
        assert (record.state, list(record.tokens)) == (SessionState.FINISHED, PROMPT + EXPECTED)
        with contextlib.suppress(Fenced):
            await stream.rest()


async def test_a_draining_gateway_resumes_nothing(tmp_path: Path) -> None:
    async with two_gateways(tmp_path) as (_fleet, stream, other, client):
        await stream.tokens(6)
        other.sessions._draining = True
        with pytest.raises(Unavailable):
            await read(client.resume(point([])))
        run = await stream.rest()
        assert run.tokens == EXPECTED
