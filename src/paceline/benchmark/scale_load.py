"""N sessions that write without end, through one gateway of a fleet of simulated devices.

The client is the bare stub: it shares the machine with the fleet, and what it costs is missing there. One channel,
messages that are only counted, nothing that resumes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc.aio

from paceline.messages import SamplingParams
from paceline.runtime.grpc_client import open_channel
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.text.request import GenerationRequest, SpeculationOptions, TokenPrompt
from paceline.v1 import gateway_pb2
from paceline.v1.gateway_pb2_grpc import GenerationStub
from paceline.wire.generation import generate_request_to_pb

if TYPE_CHECKING:
    from paceline.v1.gateway_pb2_grpc import GenerationAsyncStub  # in the stub file only

_PROMPT_TOKENS = 16
_START_TIMEOUT_S = 120.0


def prompts(num_sessions: int, vocab_size: int) -> list[tuple[int, ...]]:
    """A prompt for each session, no two alike; the same at each call."""
    source = random.Random(0)  # noqa: S311 - no secret
    return [tuple(source.choices(range(vocab_size), k=_PROMPT_TOKENS)) for _ in range(num_sessions)]


class Load:
    """Sessions that run until the end of the block; use as an async context manager.

    Args:
        address: host:port of the gateway.
        prompts: one for each session.
        num_speculative_tokens: block size; 0 decodes plainly; None leaves it to the gateway.
        max_tokens: more than a session will write.

    Attributes:
        tokens: that have come so far, of all sessions.
        newest_s: when the newest of them came, on the clock of `time.perf_counter`.
    """

    def __init__(
        self, address: str, prompts: Sequence[tuple[int, ...]], num_speculative_tokens: int | None, max_tokens: int
    ) -> None:
        self._channel = open_channel(address)
        self._stub: GenerationAsyncStub = GenerationStub(self._channel)
        self._requests = [
            generate_request_to_pb(
                GenerationRequest(
                    TokenPrompt(prompt),
                    sampling=SamplingParams(temperature=0.0),
                    max_tokens=max_tokens,
                    speculation=SpeculationOptions(num_speculative_tokens != 0, "", num_speculative_tokens),
                )
            )
            for prompt in prompts
        ]
        self._tasks: list[asyncio.Task[None]] = []
        self._silent = len(self._requests)
        self._all_began = asyncio.Event()
        self.tokens = 0
        self.newest_s = 0.0

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._session(request)) for request in self._requests]
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._all_began.wait()
            self.check()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop()

    def check(self) -> None:
        """Finds out whether all sessions still write.

        Raises:
            PacelineError: what ended one.
            RuntimeError: one came to its end, so that less than the stated load was there.
        """
        for task in self._tasks:
            if task.done():
                task.result()
                raise RuntimeError("a session came to its end while it was measured: raise max_model_len")

    async def _session(self, request: gateway_pb2.GenerateRequest) -> None:
        began = False
        try:
            async for response in self._stub.Generate(request):
                count = len(response.chunk.token_ids)
                if count:
                    self.tokens += count
                    self.newest_s = time.perf_counter()
                if count and not began:
                    began = True
                    self._began()
        except grpc.aio.AioRpcError as error:
            self._all_began.set()
            raise error_from_rpc(error) from error
        except BaseException:
            self._all_began.set()  # whoever waits for a beginning should hear of this
            raise

    def _began(self) -> None:
        self._silent -= 1
        if not self._silent:
            self._all_began.set()

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._channel.close()
