"""Verifiers that break, restart, hang and drain in the middle of a stream: the tokens are the same as without."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from paceline.engine.target import TargetOptions
from paceline.errors import CapacityExceeded, Unavailable
from paceline.generation import Finished
from paceline.runtime.replica_actor import ActorLimits
from tests.fakes.scripted_drafter import StepGate
from tests.fakes.toy_runner import ToyRunner
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method, until
from tests.integration.paced import EXPECTED, LAW, PROMPT, kill, request_of, streaming, used_verifier

SOON = {"return_window_ms": 20}


async def test_a_link_broken_in_mid_round_and_back_runs_the_round_once(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        await stream.tokens(3)
        node = fleet.verifiers[0]
        await node.cut()
        await until(lambda: not fleet.verifier_pool.snapshot.ready)
        stream.pace.allow(2)  # and its follow-up, if that had come
        await until(lambda: not node.alive.actor.pass_due())  # the answers went nowhere
        await node.listen()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert len(node.model.passes) == run.evidence.target_passes


async def test_a_link_that_breaks_in_every_round_costs_no_pass(tmp_path: Path) -> None:
    # In turn: a verdict that is asked for again waits for the pass of a follow-up, which here waits for the test.
    async with streaming(tmp_path, settings={"draft_ahead": False}) as (fleet, stream):
        node = fleet.verifiers[0]
        for count in (3, 10, 20, 30):
            await stream.tokens(count)
            await node.cut()
            await node.listen()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert len(node.model.passes) == run.evidence.target_passes


async def test_a_restarted_verifier_is_told_everything_again(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        node = fleet.verifiers[0]
        for count in (3, 14, 29):
            await stream.tokens(count)
            await kill(node, stream)
            await node.boot()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.verifier == node.address
        assert node.model.passes[0][0] > len(PROMPT) + 29  # the new life was fed all committed tokens


async def test_a_verifier_that_is_back_with_too_small_a_context_is_left_at_once(tmp_path: Path) -> None:
    settings = {"return_window_ms": 60_000}
    async with streaming(tmp_path, num_verifiers=2, settings=settings) as (fleet, stream):
        await stream.tokens(3)
        used = used_verifier(fleet)
        await kill(fleet.verifiers[used], stream)
        fleet.options.runner = lambda law: ToyRunner(law, VOCAB, max_model_len=32)
        await fleet.verifiers[used].boot()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.verifier == fleet.verifiers[1 - used].address


async def test_the_session_moves_when_its_verifier_dies(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_verifiers=2, settings=SOON) as (fleet, stream):
        await stream.tokens(3)
        used = used_verifier(fleet)
        await kill(fleet.verifiers[used], stream)
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.verifier == fleet.verifiers[1 - used].address


async def test_the_session_moves_to_and_fro(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_verifiers=2, settings=SOON) as (fleet, stream):
        for count in (3, 12, 21, 30):
            await stream.tokens(count)
            used = used_verifier(fleet)
            await kill(fleet.verifiers[used], stream)
            await until(lambda used=used: fleet.verifiers[1 - used].num_sessions == 1)  # type: ignore[misc]
            await fleet.verifiers[used].boot()
        assert (await stream.rest()).tokens == EXPECTED


async def test_an_orphan_is_closed_when_its_session_has_moved(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_verifiers=2, settings=SOON) as (fleet, stream):
        await stream.tokens(3)
        used = used_verifier(fleet)
        await fleet.verifiers[used].cut()
        await until(lambda: fleet.verifiers[1 - used].num_sessions == 1)
        await fleet.verifiers[used].listen()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        # Long before orphan_ttl_s, which is ten seconds.
        await until(lambda: fleet.verifiers[used].num_sessions == 0, timeout_s=5.0)


async def test_no_verifier_left_is_unavailable_after_its_time(tmp_path: Path) -> None:
    settings = {"return_window_ms": 20, "verifier_patience_ms": 200}
    async with streaming(tmp_path, settings=settings) as (fleet, stream):
        await stream.tokens(3)
        await kill(fleet.verifiers[0], stream)
        with pytest.raises(Unavailable, match="no verifier"):
            await stream.rest()
        assert not any(isinstance(event, Finished) for event in stream.events)


async def test_a_verifier_killed_before_the_first_token(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        await stream.tokens(0)
        await kill(fleet.verifiers[0], stream)
        await fleet.verifiers[0].boot()
        assert (await stream.rest()).tokens == EXPECTED


async def test_a_draining_verifier_ends_its_sessions_and_gets_no_new_one(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_verifiers=2) as (fleet, stream):
        await stream.tokens(3)
        used = used_verifier(fleet)
        draining = asyncio.create_task(fleet.verifiers[used].alive.actor.drain())
        run = await stream.rest()
        assert (run.tokens, run.evidence.verifier) == (EXPECTED, fleet.verifiers[used].address)
        await draining
        async with fleet.client() as client:
            again = await generate(client, request_of(fleet))
            assert (again.tokens, again.evidence.verifier) == (EXPECTED, fleet.verifiers[1 - used].address)


async def test_sessions_spread_over_verifiers(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_verifiers=2) as (fleet, stream), fleet.client() as client:
        runs = [asyncio.create_task(generate(client, request_of(fleet))) for _ in range(4)]
        await until(lambda: list(fleet.verifier_pool.loads.values()) == [2, 2])
        stream.pace.open()
        assert all(run.tokens == EXPECTED for run in await asyncio.gather(*runs))


async def test_a_verifier_without_room_refuses_and_others_go_on(tmp_path: Path) -> None:
    gate = StepGate()
    options: dict[str, Any] = {
        "limits": ActorLimits(max_sessions=1),
        "target": TargetOptions(max_sessions=1),
        "method": perfect_method(LAW, gate=gate),
        # The first session waits for its draft and keeps its place meanwhile.
        "settings": {"draft_wait_floor_ms": 60_000, "draft_wait_ceiling_ms": 60_000},
    }
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        first = client.generate(request_of(fleet))
        events = [await anext(first), await anext(first)]
        with pytest.raises(CapacityExceeded):
            await generate(client, request_of(fleet))
        gate.open()
        events += [event async for event in first]
        assert isinstance(events[-1], Finished)


async def test_an_evicted_session_is_opened_again(tmp_path: Path) -> None:
    # In turn, so that no follow-up is in a pass when the session goes.
    async with streaming(tmp_path, settings={"draft_ahead": False}) as (fleet, stream):
        for count in (3, 15, 30):
            await stream.tokens(count)
            actor = fleet.verifiers[0].alive.actor
            stream.pace.allow()
            await until(lambda actor=actor: not actor.pass_due())  # type: ignore[misc]
            for session in actor.sessions():
                actor.close_session(session, Unavailable("the test evicts it"))
        assert (await stream.rest()).tokens == EXPECTED


async def test_everything_breaks_again_and_again(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_verifiers=2, num_drafters=2, settings=SOON) as (fleet, stream):
        for step, count in enumerate((2, 8, 14, 20, 26, 32)):
            await stream.tokens(count)
            await kill(fleet.verifiers[step % 2], stream)
            await fleet.drafters[step % 2].kill()
            await fleet.verifiers[step % 2].boot()
            await fleet.drafters[step % 2].boot()
        assert (await stream.rest()).tokens == EXPECTED
