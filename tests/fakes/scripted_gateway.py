"""A gateway that says what it was told to say, on a real port: for tests of clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc.aio

from paceline.errors import NotFound, PacelineError
from paceline.generation import Chunk, Evidence, Finished, GenerationEvent, ServedModel, Started
from paceline.messages import FinishReason, TokenOrigin
from paceline.runtime.grpc_errors import abort
from paceline.text.request import GenerationRequest, ResumeRequest
from paceline.v1 import gateway_pb2
from paceline.v1.gateway_pb2_grpc import GenerationServicer, add_GenerationServicer_to_server
from paceline.wire.generation import (
    generate_request_from_pb,
    generation_event_to_pb,
    resume_event_to_pb,
    resume_request_from_pb,
    served_model_to_pb,
)

ANSWER: tuple[GenerationEvent, ...] = (
    Started("s-1", "tiny", prompt_tokens=5, seed=7),
    Chunk("日本é😀", (1,), (TokenOrigin.PLAIN,), 6, True, (4,)),
    Finished(FinishReason.LENGTH, prompt_tokens=5, completion_tokens=1, evidence=Evidence(total_ms=100.0)),
)
"""A whole stream: one token, of letters that a terminal of ASCII does not have."""


@dataclass
class ScriptedGateway(GenerationServicer):
    """Answers each Generate with the same events, or an error after them, and keeps the requests.

    Attributes:
        events: what every stream says.
        error: what it ends with; None for a clean end.
        hangs: streams go on saying nothing after the events.
        breaks_after: of the first stream alone: it ends with the error after so many events, later ones well.
        resumed: what streams of Resume say.
        resume_error: what these end with; None for a clean end.
        requests: what was asked.
        resumes: where clients wanted to go on.
        metadata: what came with each of them.
    """

    events: Sequence[GenerationEvent] = ()
    error: PacelineError | None = None
    hangs: bool = False
    breaks_after: int | None = None
    resumed: Sequence[GenerationEvent] = ()
    resume_error: PacelineError | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    resumes: list[ResumeRequest] = field(default_factory=list)
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)

    async def Generate(  # noqa: N802 - the rpc's name
        self,
        request: gateway_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        self.requests.append(generate_request_from_pb(request))
        self.metadata.append(dict(context.invocation_metadata() or ()))
        breaks = self.breaks_after is None or len(self.requests) == 1
        for event in self.events[: self.breaks_after if breaks else None]:
            yield generation_event_to_pb(event)
        if self.hangs:
            await asyncio.Event().wait()
        if self.error is not None and breaks:
            await abort(context, self.error)

    async def Resume(  # noqa: N802 - the rpc's name
        self,
        request: gateway_pb2.ResumeRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[gateway_pb2.ResumeResponse]:
        self.resumes.append(resume_request_from_pb(request))
        self.metadata.append(dict(context.invocation_metadata() or ()))
        for event in self.resumed:
            yield resume_event_to_pb(event)
        if self.resume_error is not None:
            await abort(context, self.resume_error)

    async def GetSession(  # noqa: N802 - the rpc's name
        self,
        request: gateway_pb2.GetSessionRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> gateway_pb2.GetSessionResponse:
        await abort(context, NotFound(f"there is no session {request.session}", field="session"))
        return gateway_pb2.GetSessionResponse()

    async def ListModels(  # noqa: N802 - the rpc's name
        self,
        request: gateway_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> gateway_pb2.ListModelsResponse:
        return gateway_pb2.ListModelsResponse(models=[served_model_to_pb(ServedModel("tiny", 128, ("ngram",)))])


@contextmanager
def serving(gateway: ScriptedGateway, credentials: grpc.ServerCredentials | None = None) -> Iterator[str]:
    """Serves on a free port of loopback, with TLS if told so, in a thread with a loop of its own; the address."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server()
        add_GenerationServicer_to_server(gateway, server)
        where = "127.0.0.1:0"
        port = server.add_secure_port(where, credentials) if credentials else server.add_insecure_port(where)
        await server.start()
        return server, port

    server, port = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(None), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
        loop.close()
