"""Clients that leave, verifiers that die, and more work than there is room for; at every door."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import CapacityExceeded, Unavailable
from tests.fakes.scripted_drafter import StepGate
from tests.fakes.toy_runner import ToyRunner
from tests.integration.fleet import VOCAB, perfect_method, plain_tokens, until
from tests.integration.front_door import Door, FrontDoor, body_of, content_of, error_of, front_door, post_bytes
from tests.integration.http_calls import COMPLETIONS
from tests.integration.paced import EXPECTED, LAW, PROMPT, Pace, PacedRunner, request_of

DOORS = ("grpc", "http", "http stream")
SOON_S = 6.0


@contextlib.asynccontextmanager
async def paced(folder: Path, **options: Any) -> AsyncIterator[tuple[FrontDoor, Pace]]:
    """Doors of a fleet whose verifiers go at the test's pace."""
    pace = Pace()
    merged: dict[str, Any] = {"runner": lambda law: PacedRunner(law, pace), **options}
    async with front_door(folder, LAW, **merged) as front:
        try:
            yield front, pace
        finally:
            pace.open()


# --- clients that leave; what each phase holds is in test_leaving.py --------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_all_its_choices(tmp_path: Path, stream: bool) -> None:
    async with paced(tmp_path) as (front, pace):
        content = content_of(body_of(request_of(front.fleet), n=5, stream=stream))
        async with front.connect() as connection:
            await connection.send(post_bytes(COMPLETIONS, content))
            await pace.entered()
            await until(lambda: front.fleet.gateway.sessions.num_running == 5)
        await until(lambda: not front.fleet.gateway.sessions.num_running)
        pace.allow()
        await front.idle()
        assert len(front.fleet.verifiers[0].model.passes) == 1


# --- verifiers that die -----------------------------------------------------------------------------------------------


async def kill(front: FrontDoor, pace: Pace, index: int = 0) -> None:
    """Ends a verifier in the middle of a pass; the pass itself cannot be interrupted, so it is let through."""
    stopping = asyncio.create_task(front.fleet.verifiers[index].kill())
    await asyncio.sleep(0)
    pace.allow()
    await stopping


def used(front: FrontDoor) -> int:
    return next(index for index, load in enumerate(front.fleet.verifier_pool.loads.values()) if load)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("rounds", [0, 3], ids=["before the first token", "after it"])
@pytest.mark.parametrize("num_verifiers", [1, 2])
async def test_a_verifier_is_killed(tmp_path: Path, door: str, rounds: int, num_verifiers: int) -> None:
    """With another one the answer is what it would have been; without, it is an error and never a clean end."""
    settings = {"return_window_ms": 20} | ({"verifier_patience_ms": 200} if num_verifiers == 1 else {})
    async with paced(tmp_path, num_verifiers=num_verifiers, settings=settings) as (front, pace):
        asking = asyncio.create_task(front.door(door).generate(request_of(front.fleet)))
        for _ in range(rounds):
            await pace.entered()
            pace.allow()
        await pace.entered()
        await kill(front, pace, used(front))
        pace.open()
        if num_verifiers == 2:
            assert list((await asking).token_ids) == EXPECTED
            return
        # The door's own check: 503 with Retry-After, UNAVAILABLE with RetryInfo, or an error event and no [DONE].
        with pytest.raises(Unavailable, match="no verifier"):
            await asking
        await front.fleet.verifiers[0].boot()
        assert list((await front.door(door).generate(request_of(front.fleet))).token_ids) == EXPECTED


@pytest.mark.parametrize("door", DOORS)
async def test_no_verifier_at_all_is_said_soon(tmp_path: Path, door: str) -> None:
    async with front_door(tmp_path, LAW, settings={"verifier_wait_ms": 30}) as front:
        await front.fleet.verifiers[0].kill()
        await until(lambda: not front.fleet.verifier_pool.snapshot.ready)
        async with asyncio.timeout(SOON_S):
            with pytest.raises(Unavailable, match="no verifier of model 'toy'"):
                await front.door(door).generate(request_of(front.fleet))


# --- more than there is room for --------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def full(folder: Path, room: int, **options: Any) -> AsyncIterator[tuple[FrontDoor, Callable[[], Any]]]:
    """Doors with room for `room` generations, all of which but two are taken; and what frees the others."""
    gate = StepGate()
    waiting = {"draft_wait_ceiling_ms": 60_000, "draft_wait_floor_ms": 60_000, "max_concurrent_generations": room}
    async with front_door(folder, LAW, method=perfect_method(LAW, gate=gate), settings=waiting, **options) as front:
        requests = [front.fleet.request([5, index]) for index in range(room - 2)]
        holders = [asyncio.create_task(front.door("http").generate(request)) for request in requests]
        await until(lambda: front.fleet.gateway.sessions.num_running == room - 2)

        async def free() -> None:
            gate.open()
            for answer, request in zip(await asyncio.gather(*holders), requests, strict=True):
                assert list(answer.token_ids) == plain_tokens(LAW, request.prompt.ids, 20)  # type: ignore[union-attr]

        try:
            yield front, free
        finally:
            gate.open()


async def test_generations_beyond_the_limit_are_refused_at_once_at_every_door(tmp_path: Path) -> None:
    async with full(tmp_path, 4) as (front, free):
        held = [asyncio.create_task(front.door("http stream").generate(front.fleet.request([6, i]))) for i in range(2)]
        await until(lambda: front.fleet.gateway.sessions.num_running == 4)
        plain = front.fleet.request(PROMPT, num_speculative_tokens=0)
        for door in front.doors:
            async with asyncio.timeout(SOON_S):
                with pytest.raises(CapacityExceeded, match="4 of 4 generations") as caught:
                    await door.generate(plain)
            assert caught.value.retry_after_s == 1
        # Those who are served, and those who only look, are not kept out.
        assert (await front.http.get("/v1/models")).status_code == 200
        await free()
        await asyncio.gather(*held)
        for door in front.doors:
            assert list((await door.generate(plain)).token_ids) == plain_tokens(LAW, PROMPT, 20)


@pytest.mark.parametrize("stream", [False, True])
async def test_more_choices_than_are_free_are_refused_as_a_whole(tmp_path: Path, stream: bool) -> None:
    async with full(tmp_path, 4) as (front, free):
        plain = front.fleet.request(PROMPT, num_speculative_tokens=0)

        async def ask(choices: int) -> httpx.Response:
            content = content_of(body_of(plain, n=choices, stream=stream))
            return await front.http.post(f"/v1/{COMPLETIONS}", content=content)

        for choices in (3, 32):
            async with asyncio.timeout(SOON_S):
                error = error_of(await ask(choices))
            assert isinstance(error, CapacityExceeded)
            # Those that had begun are ended, and their places are free.
            assert front.fleet.gateway.sessions.num_running == 2
            await until(lambda: len(front.fleet.gateway.sessions.actors) == 2)
        assert (await ask(2)).status_code == 200
        await free()


async def test_a_verifier_without_room_refuses_at_every_door(tmp_path: Path) -> None:
    few_pages = lambda law: ToyRunner(law, VOCAB, max_model_len=256, num_pages=8, page_tokens=4)  # noqa: E731
    async with front_door(tmp_path, LAW, runner=few_pages) as front:

        async def refused(door: Door) -> None:
            with pytest.raises(CapacityExceeded, match="page"):
                await door.generate(front.fleet.request([1] * 100))

        async with asyncio.timeout(SOON_S):
            await asyncio.gather(*[refused(door) for door in front.doors])
        for door in front.doors:
            answer = await door.generate(front.fleet.request(PROMPT, max_tokens=9))
            assert list(answer.token_ids) == plain_tokens(LAW, PROMPT, 9)
