"""More work than there is room for is refused with the numbers, soon, and never left hanging; over real gRPC."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.client import AsyncClient
from paceline.engine.target import TargetOptions
from paceline.errors import CapacityExceeded
from paceline.generation import Chunk, Started
from paceline.runtime.replica_actor import ActorLimits
from tests.fakes.scripted_drafter import StepGate
from tests.fakes.toy_runner import ToyRunner
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method, plain_tokens
from tests.integration.paced import EXPECTED, LAW, PROMPT, SAMPLING, streaming

SOON_S = 6.0
NARROW: dict[str, dict[str, Any]] = {
    "sessions": {"limits": ActorLimits(max_sessions=1)},
    "slots": {"target": TargetOptions(max_sessions=1)},
}


@pytest.mark.parametrize("narrow", NARROW)
@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_a_session_that_no_verifier_has_room_for_is_refused(
    tmp_path: Path, narrow: str, num_verifiers: int
) -> None:
    """The verifiers' only places are taken by generations that wait for their drafts."""
    gate = StepGate()
    settings = {"draft_wait_ceiling_ms": 60_000, "draft_wait_floor_ms": 60_000}
    options = {"method": perfect_method(LAW, gate=gate), "num_verifiers": num_verifiers, "settings": settings}
    async with Fleet.start(tmp_path, LAW, **options, **NARROW[narrow]) as fleet, fleet.client() as client:
        holders = [client.generate(fleet.request([5, index])) for index in range(num_verifiers)]
        for holder in holders:
            assert isinstance(await anext(holder), Started)
            assert isinstance(await anext(holder), Chunk)
        plain = fleet.request(PROMPT, num_speculative_tokens=0)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(CapacityExceeded, match="all 1 session") as caught:
                await generate(client, plain)
        assert caught.value.retry_after_s == 1
        gate.open()
        for holder in holders:
            assert [event async for event in holder]
        assert (await generate(client, plain)).tokens == plain_tokens(LAW, PROMPT, 20)


async def test_a_place_that_becomes_free_in_time_is_taken(tmp_path: Path) -> None:
    async with streaming(tmp_path, **NARROW["sessions"]) as (fleet, stream), fleet.client() as client:
        await stream.tokens(5)
        second = asyncio.create_task(generate(client, fleet.request(PROMPT)))
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert (await second).tokens == plain_tokens(LAW, PROMPT, 20)


@contextlib.asynccontextmanager
async def few_pages(folder: Path, num_verifiers: int) -> AsyncIterator[tuple[Fleet, AsyncClient]]:
    """Verifiers with room for 32 tokens of all sessions together."""
    options: dict[str, Any] = {
        "runner": lambda law: ToyRunner(law, VOCAB, max_model_len=256, num_pages=8, page_tokens=4),
        "num_verifiers": num_verifiers,
    }
    async with Fleet.start(folder, LAW, **options) as fleet, fleet.client() as client:
        yield fleet, client


@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_a_session_that_no_pool_has_pages_for_is_refused(tmp_path: Path, num_verifiers: int) -> None:
    async with few_pages(tmp_path, num_verifiers) as (fleet, client):
        async with asyncio.timeout(SOON_S):
            with pytest.raises(CapacityExceeded, match="page"):
                await generate(client, fleet.request([1] * 100))
        assert (await generate(client, fleet.request(PROMPT))).tokens == plain_tokens(LAW, PROMPT, 20)


async def test_a_session_that_outgrows_the_pool_ends_as_well(tmp_path: Path) -> None:
    async with few_pages(tmp_path, 1) as (fleet, client):
        endless = fleet.request(PROMPT, max_tokens=100, sampling=SAMPLING)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(CapacityExceeded, match="page"):
                await generate(client, endless)
        await fleet.quiet()
        assert fleet.verifiers[0].model.pool.pages_in_use == 0
