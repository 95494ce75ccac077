"""Gateways that are killed or stopped in the middle of streams: the client goes on, and its reader sees nothing."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import SecretStr

from paceline.client import AsyncClient
from paceline.engine.runner import SequencePass
from paceline.errors import Fenced
from paceline.generation import Chunk, Finished, GenerationEvent, Started
from paceline.messages import FinishReason, SamplingParams
from paceline.session.store import SessionState
from paceline.text.request import GenerationRequest
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.integration.fleet import VOCAB, Fleet, perfect_method, plain_tokens, until
from tests.integration.gateway_processes import GatewayProcess, gateways
from tests.integration.paced import Pace, PacedRunner
from tests.integration.session_stores import Server, start_server
from tests.integration.test_resume import point, text_of, tokens_of

LAW = hash_law(VOCAB, seed=31)
PROMPT = [1, 2, 3]
SAMPLING = SamplingParams(temperature=0.8, ignore_eos=True)
MAX_TOKENS = 90
NUM_STREAMS = 4
NUM_KILLS = 2
PASS_S = 0.01


def expected(seed: int) -> list[int]:
    return plain_tokens(LAW, PROMPT, MAX_TOKENS, SamplingParams(temperature=0.8, ignore_eos=True, seed=seed))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = start_server("valkey")
    yield running
    running.process.stop()


class SlowRunner(ToyRunner):
    """A toy target slow enough to be in the middle of something when its gateway dies."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        time.sleep(PASS_S)
        return super().forward(batch)


@contextlib.asynccontextmanager
async def world(
    folder: Path, server: Server, count: int, make_runner: Callable[[], ToyRunner]
) -> AsyncIterator[tuple[Fleet, list[GatewayProcess]]]:
    """Two verifiers, a gateway in this process, and some that are processes of their own."""
    options: dict[str, Any] = {
        "method": perfect_method(LAW),
        "num_verifiers": 2,
        "runner": lambda _law: make_runner(),
        "settings": {"redis_url": SecretStr(server.url)},
    }
    async with Fleet.start(folder, LAW, **options) as fleet, gateways(fleet, server.url, folder, count) as processes:
        yield fleet, processes
        for process in processes:
            process.kill()
        await until(lambda: all(node.num_sessions == 0 for node in fleet.nodes))


def request_of(fleet: Fleet, seed: int, session: str | None = None) -> GenerationRequest:
    return fleet.request(
        PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING, seed=seed, session=session, num_speculative_tokens=2
    )


async def test_streams_outlive_gateways_that_are_killed_at_random(tmp_path: Path, server: Server) -> None:
    dice = random.Random(7)
    kill_at = sorted(dice.sample(range(MAX_TOKENS - 20), NUM_KILLS))
    moves: list[str] = []

    async with (
        world(tmp_path, server, 2, lambda: SlowRunner(LAW, VOCAB, max_model_len=256)) as (fleet, processes),
        asyncio.TaskGroup() as restarts,
    ):

        async def read(seed: int) -> list[GenerationEvent]:
            """One stream; the first one kills the gateway that it reads from when it has got so many tokens."""
            events: list[GenerationEvent] = []
            async with AsyncClient([each.address for each in processes]) as client:
                async for event in client.generate(request_of(fleet, seed), timeout_s=60.0):
                    events.append(event)
                    if seed == 0 and kill_at and len(tokens_of(events)) >= kill_at[0]:
                        kill_at.pop(0)
                        moves.append(client.address)
                        victim = next(each for each in processes if each.address == client.address)
                        victim.kill()
                        if kill_at:  # it will hardly be back when the other one dies: then there is none for a while
                            restarts.create_task(victim.start())
            return events

        for seed, events in enumerate(await asyncio.gather(*[read(seed) for seed in range(NUM_STREAMS)])):
            check(events, expected(seed))
            assert text_of(events) == fleet.tokenizer.decode(expected(seed))
    assert len(moves) == NUM_KILLS
    assert len(set(moves)) == 2


async def test_a_stream_goes_on_whose_gateway_dies_and_whose_record_is_lost(tmp_path: Path, server: Server) -> None:
    """Verifiers still hold the dead gateway's session, under an epoch that no record tells of any more."""
    async with (
        world(tmp_path, server, 2, lambda: SlowRunner(LAW, VOCAB, max_model_len=256)) as (fleet, processes),
        AsyncClient([each.address for each in processes]) as client,
    ):
        events: list[GenerationEvent] = []
        victim = next(each for each in processes if each.address == client.address)
        # Far less than a verifier may take for a prompt before it is left.
        async for event in client.generate(request_of(fleet, 1, "s"), timeout_s=25.0):
            events.append(event)
            if len(tokens_of(events)) >= 10 and client.address == victim.address:
                victim.kill()
                with server.client() as redis:
                    redis.flushall()
        check(events, expected(1))
        assert client.address != victim.address


def check(events: list[GenerationEvent], tokens: list[int]) -> None:
    """What the reader of one stream has seen is what an undisturbed run shows."""
    started, *chunks, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert tokens_of(events) == tokens
    assert (finished.finish_reason, finished.completion_tokens) == (FinishReason.LENGTH, MAX_TOKENS)
    at = started.prompt_tokens
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        at += len(chunk.token_ids)
        assert chunk.next_token == at


async def test_a_gateway_that_was_stopped_and_continued_says_nothing_more(tmp_path: Path, server: Server) -> None:
    pace = Pace()
    async with (
        world(tmp_path, server, 1, lambda: PacedRunner(LAW, pace)) as (fleet, (process,)),
        AsyncClient(process.address, resume=None) as old,
        fleet.client() as new,
    ):
        stream = old.generate(request_of(fleet, 1, "s"), timeout_s=60.0)
        events = [await anext(stream)]
        while len(tokens_of(events)) < 6:
            await pace.entered()
            pace.allow()
            events.append(await anext(stream))
        await pace.entered()
        process.send(signal.SIGSTOP)
        try:
            pace.allow()  # its verdict goes to one who does not listen now
            epoch = (await new.get_session("s")).epoch
            pace.open()
            resumed = [event async for event in new.resume(point(tokens_of(events)), timeout_s=60.0)]
        finally:
            process.send(signal.SIGCONT)
        with pytest.raises(Fenced):
            await anext(stream)
        assert tokens_of(events) + tokens_of(resumed) == expected(1)
        record = await new.get_session("s")
        assert record.state is SessionState.FINISHED
        assert record.epoch > epoch
        assert list(record.tokens) == PROMPT + expected(1)
