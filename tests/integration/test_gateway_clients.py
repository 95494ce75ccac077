"""Clients that leave, stop reading, or come in crowds."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from paceline_gateway.caller import Caller
from paceline_gateway.door import Door
from paceline_gateway.generation import Generation

from paceline.errors import DeadlineExceeded, PacelineError, Unavailable
from paceline.generation import Chunk, Finished, Started
from paceline.messages import SamplingParams
from paceline.session.store import SessionState
from paceline.text.request import GenerationRequest, SpeculationOptions, TokenPrompt
from paceline.v1.gateway_pb2_grpc import GenerationStub
from paceline.wire.generation import generate_request_to_pb
from tests.fakes.scripted_drafter import ScriptedDrafter, StepGate, wrong_at
from tests.fakes.toy_runner import ToyRunner, cycle_law, hash_law
from tests.integration.fleet import (
    GREEDY,
    VOCAB,
    Fleet,
    generate,
    perfect_method,
    plain_tokens,
    scripted_methods,
    target_law,
    until,
)
from tests.integration.paced import streaming

LAW = hash_law(VOCAB, seed=21)
ENDLESS = cycle_law([3, 5, 7, 11], VOCAB)
PROMPT = [1, 2, 3]


def long_runner(law: Any) -> ToyRunner:
    return ToyRunner(law, VOCAB, max_model_len=8192, num_pages=4096)


def door_of(fleet: Fleet) -> Door:
    return fleet.gateway.servicer.door


async def read_all(generation: Generation) -> list[int]:
    """All tokens that the client still gets."""
    tokens: list[int] = []
    while (event := await generation.next()) is not None:
        if isinstance(event, Chunk):
            tokens.extend(event.token_ids)
    return tokens


# --- leaving ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 5, 20])
async def test_a_client_that_leaves_frees_everything_within_a_round(tmp_path: Path, count: int) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        await stream.tokens(count)
        await stream.leave()
        # One pass is under way; only its follow-up may begin before the verifier hears of it.
        stream.pace.allow(2)
        await fleet.quiet()
        verifier = fleet.verifiers[0].alive.actor
        assert verifier.num_sessions == 0
        assert len(fleet.verifiers[0].model.passes) <= len(stream.events) + 2
        assert fleet.verifiers[0].model.pool.pages_in_use == 0


async def test_a_client_that_leaves_is_recorded(tmp_path: Path) -> None:
    async with streaming(tmp_path, request={"session": "left"}) as (fleet, stream):
        await stream.tokens(5)
        await stream.leave()
        stream.pace.open()
        await fleet.quiet()
        async with fleet.client() as client:
            record = await client.get_session("left")
        assert (record.state, record.finish_reason) == (SessionState.CANCELLED, "cancelled")
        assert record.committed_len >= len(PROMPT) + 5


async def test_a_clients_deadline_ends_the_generation(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runner": long_runner, "method": perfect_method(ENDLESS)}
    async with Fleet.start(tmp_path, ENDLESS, **options) as fleet, fleet.client() as client:
        with pytest.raises(DeadlineExceeded):
            await generate(client, fleet.request(PROMPT, max_tokens=8000), timeout_s=0.3)
        await fleet.quiet()


async def test_the_gateways_own_time_limit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runner": long_runner, "settings": {"max_generation_s": 0.3}}
    async with Fleet.start(tmp_path, ENDLESS, **options) as fleet, fleet.client() as client:
        with pytest.raises(DeadlineExceeded, match=r"0\.3 s"):
            await generate(client, fleet.request(PROMPT, max_tokens=8000))


async def test_a_storm_of_clients_that_leave_at_any_moment(tmp_path: Path) -> None:
    source = random.Random(4)
    options: dict[str, Any] = {"method": perfect_method(LAW), "num_verifiers": 2, "num_drafters": 2}
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        request = fleet.request(PROMPT, max_tokens=60, sampling=SamplingParams(temperature=1.0, ignore_eos=True))

        async def leave_after(events: int) -> None:
            stream = client.generate(request)
            async for _ in stream:
                events -= 1
                if events <= 0:
                    break
            await stream.aclose()

        await asyncio.gather(*[leave_after(source.randint(1, 14)) for _ in range(40)])
        await fleet.quiet()
        assert (await generate(client, fleet.request(PROMPT))).tokens == plain_tokens(LAW, PROMPT, 20)


async def test_draining_lets_clients_finish_and_admits_nobody(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        await stream.tokens(3)
        draining = asyncio.create_task(fleet.gateway.drain())
        await asyncio.sleep(0)
        async with fleet.client() as client:
            with pytest.raises(Unavailable):
                await generate(client, fleet.request(PROMPT))
        assert not draining.done()
        run = await stream.rest()
        assert len(run.tokens) == 40
        await draining


async def test_stopping_ends_every_stream_with_an_error(tmp_path: Path) -> None:
    async with streaming(tmp_path, request={"session": "cut"}) as (fleet, stream):
        await stream.tokens(3)
        stopping = asyncio.create_task(fleet.gateway.sessions.stop(5.0))
        with pytest.raises(Unavailable, match="shutting down"):
            await stream.rest()
        await stopping
        record = await fleet.gateway.store.get("cut")
        assert record is not None
        assert record.state is SessionState.FAILED


# --- not reading ------------------------------------------------------------------------------------------------------


async def test_a_client_that_does_not_read_stops_the_rounds(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": long_runner,
        "method": perfect_method(ENDLESS),
        "settings": {"max_buffered_chunks": 8},
    }
    async with Fleet.start(tmp_path, ENDLESS, **options) as fleet:
        request = GenerationRequest(TokenPrompt((1, 2, 3)), sampling=GREEDY, max_tokens=1000)
        generation = await door_of(fleet).start(request, Caller())
        passes = fleet.verifiers[0].model.passes
        await until(lambda: fleet.gateway.sessions.actors[0].client.full)
        await until(lambda: not fleet.verifiers[0].alive.actor.pass_due())
        for _ in range(200):
            await asyncio.sleep(0)
        # Started and eight chunks, and at most the round that was on its way when the buffer became full, and the one
        # that followed it up.
        assert len(passes) <= 10
        # Reading on lets it go on, and nothing is missing.
        assert await read_all(generation) == [[3, 5, 7, 11][(3 + index) % 4] for index in range(1000)]
        generation.leave()


async def test_a_client_that_does_not_read_for_too_long_is_cut_off(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": long_runner,
        "settings": {"max_buffered_chunks": 8, "client_stall_s": 0.05},
    }
    async with Fleet.start(tmp_path, ENDLESS, **options) as fleet:
        request = GenerationRequest(TokenPrompt((1, 2, 3)), sampling=GREEDY, max_tokens=1000)
        generation = await door_of(fleet).start(request, Caller())
        await until(lambda: not fleet.gateway.sessions.actors)
        with pytest.raises(DeadlineExceeded, match="read faster"):
            await read_all(generation)
        generation.leave()


async def test_slow_clients_over_the_wire_are_bounded_and_freed_by_leaving(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "runner": long_runner,
        "method": perfect_method(ENDLESS),
        "settings": {"max_buffered_chunks": 4, "num_speculative_tokens": 8},
    }
    async with Fleet.start(tmp_path, ENDLESS, **options) as fleet:
        # Without probing, the transport takes 64 KiB for a client that does not read.
        channel = grpc.aio.insecure_channel(fleet.address, options=[("grpc.http2.bdp_probe", 0)])
        request = GenerationRequest(
            TokenPrompt((1, 2, 3)), sampling=SamplingParams(temperature=0.0, top_logprobs=20), max_tokens=8000
        )
        calls = [GenerationStub(channel).Generate(generate_request_to_pb(request)) for _ in range(3)]
        for call in calls:
            assert await call.read() is not grpc.aio.EOF
        sessions, verifier = fleet.gateway.sessions, fleet.verifiers[0]
        await until(lambda: len(sessions.actors) == 3 and all(actor.client.full for actor in sessions.actors))
        await until(lambda: not verifier.alive.actor.pass_due())
        assert len(verifier.model.passes) < 3 * 8000 / 9 / 2  # far from done: held back by the readers
        for call in calls:
            call.cancel()
        await fleet.quiet()
        await channel.close()


# --- crowds -----------------------------------------------------------------------------------------------------------


async def test_a_crowd_gets_what_each_would_get_alone(tmp_path: Path) -> None:
    source = random.Random(1)
    methods = dict(scripted_methods(LAW))
    requests: list[tuple[GenerationRequest, list[int]]] = []
    for index in range(50):
        prompt = [source.randrange(VOCAB - 1) for _ in range(source.randint(1, 40))]
        sampling = SamplingParams(temperature=source.choice([0.0, 0.8]), top_p=0.9, seed=index)
        max_tokens = source.randint(1, 30)
        requests.append(
            (
                GenerationRequest(
                    TokenPrompt(tuple(prompt)),
                    sampling=sampling,
                    seed=index,
                    max_tokens=max_tokens,
                    speculation=SpeculationOptions(num_speculative_tokens=source.choice([0, 0, 1, 4, 8])),
                ),
                plain_tokens(LAW, prompt, max_tokens, sampling),
            )
        )
    options: dict[str, Any] = {
        "method": methods["wrong_at_2"],
        "num_verifiers": 2,
        "num_drafters": 2,
        "runner": lambda law: ToyRunner(law, VOCAB, max_model_len=256, num_pages=2048),
    }
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        runs = await asyncio.gather(*[generate(client, request, timeout_s=60.0) for request, _ in requests])
        for run, (_, expected) in zip(runs, requests, strict=True):
            assert run.tokens == expected
        assert sum(run.evidence.accepted_tokens for run in runs) > 0


async def test_a_seed_belongs_to_its_request(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        sampling = SamplingParams(temperature=1.0)

        async def batch() -> list[list[int]]:
            requests = [fleet.request(PROMPT, sampling=sampling, seed=seed) for seed in (1, 2, None)]
            return [run.tokens for run in await asyncio.gather(*[generate(client, one) for one in requests])]

        first, second = await batch(), await batch()
        assert first[:2] == second[:2]
        assert first[0] == plain_tokens(LAW, PROMPT, 20, SamplingParams(temperature=1.0, seed=1))
        assert first[2] != second[2]


async def test_one_request_with_a_bad_drafter_hurts_no_other(tmp_path: Path) -> None:
    gate = StepGate()
    slow = lambda: ScriptedDrafter(wrong_at(target_law(LAW), 0, VOCAB), gate=gate)  # noqa: E731
    async with Fleet.start(tmp_path, LAW, method=slow) as fleet, fleet.client() as client:
        requests = [fleet.request(PROMPT, num_speculative_tokens=size) for size in (0, 4, 0, 8)]
        runs = await asyncio.gather(*[generate(client, request) for request in requests])
        gate.open()
        assert all(run.tokens == plain_tokens(LAW, PROMPT, 20) for run in runs)


async def test_exactly_one_terminal_event(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=perfect_method(LAW)) as fleet, fleet.client() as client:
        for max_tokens in (1, 2, 7):
            events = [event async for event in client.generate(fleet.request(PROMPT, max_tokens=max_tokens))]
            assert [isinstance(event, Started) for event in events] == [True] + [False] * (len(events) - 1)
            assert [isinstance(event, Finished) for event in events] == [False] * (len(events) - 1) + [True]
        with pytest.raises(PacelineError):
            await anext(client.generate(fleet.request([], max_tokens=3)))
