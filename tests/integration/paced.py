"""A generation that a test reads step by step: the verifiers' passes wait until the test lets them through.

async with streaming(tmp_path) as (fleet, stream):
    await stream.tokens(5)          # now the next pass has begun and waits
    ...                             # break something
    run = await stream.rest()       # at full speed
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.client import AsyncClient
from paceline.engine.runner import SequencePass
from paceline.generation import Chunk, Finished, GenerationEvent, Started
from paceline.messages import SamplingParams
from paceline.text.request import GenerationRequest
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.integration.fleet import TIMEOUT_S, VOCAB, Fleet, Run, perfect_method, plain_tokens
from tests.integration.node import Node

LAW = hash_law(VOCAB, seed=8)
PROMPT = [1, 2, 3]
SAMPLING = SamplingParams(temperature=0.7, ignore_eos=True)
MAX_TOKENS = 40
EXPECTED = plain_tokens(LAW, PROMPT, MAX_TOKENS, SamplingParams(temperature=0.7, ignore_eos=True, seed=4))


class Pace:
    """Lets the verifiers' passes through one by one, so that the test knows where the generation stands."""

    def __init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)

    def allow(self, passes: int = 1) -> None:
        """Lets passes through."""
        self._permits.release(passes)

    def open(self) -> None:
        """Lets every pass through from now on."""
        self.allow(100_000)

    def pass_through(self) -> None:
        """Called by a runner in its thread."""
        self._entered.release()
        assert self._permits.acquire(timeout=TIMEOUT_S), "the test never let the pass through"

    async def entered(self) -> None:
        """Returns when one more pass has begun, let through or not."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=TIMEOUT_S), "no pass began"


class PacedRunner(ToyRunner):
    """A toy target at the test's pace."""

    def __init__(self, law: Any, pace: Pace) -> None:
        super().__init__(law, VOCAB, max_model_len=256)
        self._pace = pace

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        self._pace.pass_through()
        return super().forward(batch)


class Stream:
    """A generation that the test reads step by step."""

    def __init__(self, client: AsyncClient, request: GenerationRequest, pace: Pace) -> None:
        self.events: list[GenerationEvent] = []
        self.pace = pace
        self._iterator = client.generate(request, timeout_s=TIMEOUT_S)

    async def tokens(self, count: int) -> None:
        """Reads until at least `count` tokens have come; after that the next pass has begun and waits."""
        if not self.events:
            self.events.append(await anext(self._iterator))
        while sum(len(event.token_ids) for event in self.events if isinstance(event, Chunk)) < count:
            await self.pace.entered()
            self.pace.allow()
            self.events.append(await anext(self._iterator))
        await self.pace.entered()
        # Whoever comes next finds it as it was: begun, and counted by nobody.
        self.pace._entered.release()

    async def leave(self) -> None:
        """Ends the call in the middle, as a client that is not interested any more does."""
        await self._iterator.aclose()

    async def rest(self) -> Run:
        """Reads to the end, at full speed."""
        self.pace.open()
        async for event in self._iterator:
            self.events.append(event)
        started, *chunks, finished = self.events
        assert isinstance(started, Started)
        assert isinstance(finished, Finished)
        run = Run(started, tuple([chunk for chunk in chunks if isinstance(chunk, Chunk)]), finished)
        run.check_counts()
        return run


@contextlib.asynccontextmanager
async def streaming(
    folder: Path, *, request: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[Fleet, Stream]]:
    """A fleet with a perfect drafter and one generation at the test's pace."""
    pace = Pace()
    merged: dict[str, Any] = {
        "method": perfect_method(LAW),
        "runner": lambda law: PacedRunner(law, pace),
        **options,
    }
    async with Fleet.start(folder, LAW, **merged) as fleet, fleet.client() as client:
        try:
            yield fleet, Stream(client, request_of(fleet, **(request or {})), pace)
        finally:
            pace.open()


def request_of(fleet: Fleet, **fields: Any) -> GenerationRequest:
    return fleet.request(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING, seed=4, **fields)


async def kill(node: Node[Any], stream: Stream) -> None:
    """Ends the verifier in the middle of a pass, which cannot be interrupted: let through when nobody hears of it."""
    await node.cut()
    stopping = asyncio.create_task(node.kill())
    stream.pace.allow()
    await stopping


def used_verifier(fleet: Fleet) -> int:
    return next(index for index, load in enumerate(fleet.verifier_pool.loads.values()) if load)
