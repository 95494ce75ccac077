"""Translates the drafter's rpcs for its actor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc.aio

from paceline import wire
from paceline.errors import InvalidArgument
from paceline.messages import DrafterCommand, DrafterEvent
from paceline.runtime.connect import ConnectCodec, ConnectLimits
from paceline.runtime.replica_service import ReplicaDoor, ReplicaService
from paceline.text.vocabulary import split_vocabulary
from paceline.v1 import drafter_pb2, drafter_pb2_grpc
from paceline_drafter.draft_actor import DraftActor

DrafterDoor = ReplicaDoor[DrafterCommand, DrafterEvent]


def _frame(events: Sequence[drafter_pb2.DrafterEvent]) -> drafter_pb2.DrafterConnectResponse:
    return drafter_pb2.DrafterConnectResponse(events=events)


def drafter_door(limits: ConnectLimits | None = None) -> DrafterDoor:
    """A door that reads and writes the drafter's frames."""
    codec: ConnectCodec[DrafterCommand, DrafterEvent] = ConnectCodec(
        wire.command_ref, wire.drafter_command_from_pb, wire.drafter_event_to_pb, _frame
    )
    return ReplicaDoor(codec, limits)


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """The rpc service `paceline.v1.Drafter`."""

    def __init__(self, door: DrafterDoor) -> None:
        self._door = door

    async def GetModelInfo(  # noqa: N802
        self, request: drafter_pb2.DrafterGetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> drafter_pb2.DrafterGetModelInfoResponse:
        """Describes the drafting method."""
        return drafter_pb2.DrafterGetModelInfoResponse(info=wire.model_info_to_pb(self._door.info))

    async def GetVocabulary(  # noqa: N802
        self, request: drafter_pb2.DrafterGetVocabularyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[drafter_pb2.DrafterGetVocabularyResponse]:
        """Tells the tokenizer's tokens."""
        for chunk in split_vocabulary(self._door.vocabulary):
            yield drafter_pb2.DrafterGetVocabularyResponse(chunk=wire.vocabulary_chunk_to_pb(chunk))

    async def WriteFeatures(  # noqa: N802
        self,
        request_iterator: AsyncIterator[drafter_pb2.WriteFeaturesRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> drafter_pb2.WriteFeaturesResponse:
        """Takes in features that a session lacks; one chunk after another, so that a slow drafter slows the sender."""
        num_rows = 0
        async for request in request_iterator:
            actor = self._door.actor
            if not isinstance(actor, DraftActor):
                raise InvalidArgument("this replica takes no features", field="features")
            features = wire.features_from_pb(request.features)
            num_rows = await actor.write_features(request.session, request.epoch, features)
        return drafter_pb2.WriteFeaturesResponse(num_rows=num_rows)

    async def Connect(  # type: ignore[override]  # noqa: N802  # writes through the context
        self,
        request_iterator: AsyncIterator[drafter_pb2.DrafterConnectRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Carries many sessions."""
        await self._door.streams.serve(request_iterator, context)


class DrafterService(ReplicaService[DrafterCommand, DrafterEvent]):
    """The drafter as a process."""

    name = "drafter"

    @property
    def grpc_services(self) -> Sequence[str]:
        """Full names of its rpc services."""
        return (drafter_pb2.DESCRIPTOR.services_by_name["Drafter"].full_name,)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        drafter_pb2_grpc.add_DrafterServicer_to_server(DrafterServicer(self.door), server)
