"""Translates the gateway's rpcs: protobuf in, the door's and the session's answers out.

Each rpc begins with `_enter`: it names the request and asks for the client's API key. Health and reflection are other
services and stay open.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from paceline.errors import Unavailable
from paceline.generation import GenerationEvent, SessionInfo
from paceline.runtime.logs import bind_log_context
from paceline.session.store import SessionRecord
from paceline.v1 import gateway_pb2, gateway_pb2_grpc
from paceline.wire.generation import (
    generate_request_from_pb,
    generation_event_to_pb,
    resume_event_to_pb,
    resume_request_from_pb,
    served_model_to_pb,
    session_info_to_pb,
)
from paceline_gateway.api_keys import ApiKeys
from paceline_gateway.caller import REQUEST_ID_HEADER, Caller, request_id_of
from paceline_gateway.door import Door
from paceline_gateway.generation import EndedGeneration, Generation
from paceline_gateway.metrics import GatewayMetrics


class GenerationServicer(gateway_pb2_grpc.GenerationServicer):
    """The rpc service `paceline.v1.Generation`. Answers `Unavailable` until it is opened.

    Args:
        keys: who may call it.
        metrics: what it refuses by itself is counted there.
    """

    def __init__(self, keys: ApiKeys, metrics: GatewayMetrics) -> None:
        self._keys = keys
        self._metrics = metrics
        self._open_door: Door | None = None

    def open(self, door: Door) -> None:
        """Serves from now on."""
        self._open_door = door

    @property
    def door(self) -> Door:
        """What the rpcs are translated for.

        Raises:
            Unavailable: the gateway is starting.
        """
        if self._open_door is None:
            raise Unavailable("the gateway is starting; try again when health says SERVING")
        return self._open_door

    async def Generate(  # noqa: N802
        self, request: gateway_pb2.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Generates one completion and streams it."""
        caller = await self._enter(context)
        with self._metrics.counting_refusals():
            door, asked = self.door, generate_request_from_pb(request)
        async for event in _events(await door.start(asked, caller), context):
            yield generation_event_to_pb(event)

    async def Resume(  # noqa: N802
        self, request: gateway_pb2.ResumeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[gateway_pb2.ResumeResponse]:
        """Goes on with a session that the client made."""
        caller = await self._enter(context)
        with self._metrics.counting_refusals():
            door = self.door
        async for event in _events(await door.resume(resume_request_from_pb(request), caller), context):
            yield resume_event_to_pb(event)

    async def GetSession(  # noqa: N802
        self, request: gateway_pb2.GetSessionRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.GetSessionResponse:
        """Reads the record of a session that the client made."""
        caller = await self._enter(context)
        record = await self.door.record(request.session, caller)
        return session_info_to_pb(_session_info(record))

    async def ListModels(  # noqa: N802
        self, request: gateway_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> gateway_pb2.ListModelsResponse:
        """Lists the models that can be asked for."""
        await self._enter(context)
        return gateway_pb2.ListModelsResponse(models=[served_model_to_pb(model) for model in self.door.models()])

    async def _enter(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Names the request, in the logs and to the client, and finds out who sends it.

        Raises:
            Unauthenticated: keys are required, and no valid one came.
        """
        sent = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = request_id_of(sent.get(REQUEST_ID_HEADER))
        bind_log_context(request_id=request_id)
        await context.send_initial_metadata(((REQUEST_ID_HEADER, request_id),))
        with self._metrics.counting_refusals():
            tenant = self._keys.tenant(sent.get("authorization"))
        if tenant:
            bind_log_context(tenant=tenant)
        return Caller(tenant, request_id)


async def _events(
    generation: Generation | EndedGeneration, context: grpc.aio.ServicerContext[Any, Any]
) -> AsyncIterator[GenerationEvent]:
    """The events of a generation, which is left when the rpc ends, however it ends."""
    bind_log_context(session=generation.session)

    def ended(_context: object = None) -> None:
        generation.leave()

    # A generator that is left in the middle is closed some time later; the rpc's end is known at once.
    context.add_done_callback(ended)  # type: ignore[arg-type]  # the stubs want a class of their own
    try:
        while (event := await generation.next()) is not None:
            yield event
    finally:
        generation.leave()


def _session_info(record: SessionRecord) -> SessionInfo:
    positions = record.positions
    return SessionInfo(
        session=record.session,
        epoch=record.epoch,
        state=record.state,
        model=record.model,
        seed=record.sampling.seed,
        generation_start=record.generation_start,
        tokens=record.tokens,
        verifier=positions.verifier,
        verifier_kv_len=positions.verifier_kv_len,
        drafter=positions.drafter,
        drafter_kv_len=positions.drafter_kv_len,
        finish_reason=record.finish_reason,
    )
