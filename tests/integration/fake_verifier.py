"""A verifier on the wire that says exactly what the test tells it to, and remembers what it was sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio

from paceline import wire
from paceline.messages import Hello, ModelInfo, VerifierCommand, VerifierEvent, VocabularyChunk
from paceline.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc


class FakeVerifier(verifier_pb2_grpc.VerifierServicer):
    """Serves one stream at a time.

    Attributes:
        info: what `GetModelInfo` says.
        vocabulary: what `GetVocabulary` says; None for what an older verifier says, which lacks it.
        num_vocabularies: how often it was asked.
        hello: boot_id that streams begin with; None for that of `info`.
        frames: frames of commands received on the present stream.
        reading: cleared, it reads no further frame.
        num_streams: streams begun so far.
    """

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.vocabulary: list[VocabularyChunk] | None = None
        self.num_vocabularies = 0
        self.hello: str | None = None
        self.frames: list[list[VerifierCommand]] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.num_streams = 0
        self._outgoing: asyncio.Queue[verifier_pb2.VerifierConnectResponse | None] = asyncio.Queue()

    @property
    def commands(self) -> list[VerifierCommand]:
        return [command for frame in self.frames for command in frame]

    def say(self, *events: VerifierEvent) -> None:
        """Sends the events in one frame."""
        self.say_raw([wire.verifier_event_to_pb(event) for event in events])

    def say_raw(self, events: Sequence[verifier_pb2.VerifierEvent]) -> None:
        self._outgoing.put_nowait(verifier_pb2.VerifierConnectResponse(events=events))

    def break_off(self) -> None:
        """Ends the stream."""
        self._outgoing.put_nowait(None)

    async def GetModelInfo(  # noqa: N802
        self, request: verifier_pb2.VerifierGetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.VerifierGetModelInfoResponse:
        return verifier_pb2.VerifierGetModelInfoResponse(info=wire.model_info_to_pb(self.info))

    async def GetVocabulary(  # noqa: N802
        self, request: verifier_pb2.VerifierGetVocabularyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verifier_pb2.VerifierGetVocabularyResponse]:
        self.num_vocabularies += 1
        if self.vocabulary is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        for chunk in self.vocabulary:
            yield verifier_pb2.VerifierGetVocabularyResponse(
                chunk=common_pb2.VocabularyChunk(first_id=chunk.first_id, pieces=chunk.pieces)
            )

    async def ReadFeatures(  # noqa: N802
        self, request: verifier_pb2.ReadFeaturesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verifier_pb2.ReadFeaturesResponse]:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        yield verifier_pb2.ReadFeaturesResponse()

    async def Connect(  # type: ignore[override]  # noqa: N802
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifierConnectRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        self.num_streams += 1
        self.frames = []
        self._outgoing = asyncio.Queue()
        self.say(Hello(self.info.boot_id if self.hello is None else self.hello))
        reader = asyncio.create_task(self._read(request_iterator))
        try:
            while (frame := await self._outgoing.get()) is not None:
                await context.write(frame)
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[verifier_pb2.VerifierConnectRequest]) -> None:
        while True:
            await self.reading.wait()
            frame = await anext(requests)
            self.frames.append([wire.verifier_command_from_pb(command) for command in frame.commands])


@contextlib.asynccontextmanager
async def fake_verifier(info: ModelInfo, port: int = 0) -> AsyncIterator[tuple[FakeVerifier, str]]:
    """A running one and its address."""
    servicer = FakeVerifier(info)
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServicer_to_server(servicer, server)
    taken = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{taken}"
    finally:
        await server.stop(0)
