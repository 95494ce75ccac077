"""Translates the verifier's rpcs for its actor."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol, runtime_checkable

import grpc.aio

from paceline import wire
from paceline.errors import InvalidArgument
from paceline.messages import Features, VerifierCommand, VerifierEvent
from paceline.runtime.connect import ConnectCodec, ConnectLimits
from paceline.runtime.replica_service import ReplicaDoor, ReplicaService
from paceline.text.vocabulary import split_vocabulary
from paceline.v1 import verifier_pb2, verifier_pb2_grpc

VerifierDoor = ReplicaDoor[VerifierCommand, VerifierEvent]


def _frame(events: Sequence[verifier_pb2.VerifierEvent]) -> verifier_pb2.VerifierConnectResponse:
    return verifier_pb2.VerifierConnectResponse(events=events)


def verifier_door(limits: ConnectLimits | None = None) -> VerifierDoor:
    """A door that reads and writes the verifier's frames."""
    codec: ConnectCodec[VerifierCommand, VerifierEvent] = ConnectCodec(
        wire.command_ref, wire.verifier_command_from_pb, wire.verifier_event_to_pb, _frame
    )
    return ReplicaDoor(codec, limits)


@runtime_checkable
class ReadsFeatures(Protocol):
    """What is asked of the verify actor beside the streams; importing it takes as long as importing torch."""

    async def read_features(self, session: str, epoch: int, first_row: int, num_rows: int) -> list[Features]:
        """Features of rows [first_row, first_row + num_rows), from the first on as many as a few messages hold."""


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    """The rpc service `paceline.v1.Verifier`."""

    def __init__(self, door: VerifierDoor) -> None:
        self._door = door

    async def GetModelInfo(  # noqa: N802
        self, request: verifier_pb2.VerifierGetModelInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> verifier_pb2.VerifierGetModelInfoResponse:
        """Describes the target model."""
        return verifier_pb2.VerifierGetModelInfoResponse(info=wire.model_info_to_pb(self._door.info))

    async def GetVocabulary(  # noqa: N802
        self, request: verifier_pb2.VerifierGetVocabularyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verifier_pb2.VerifierGetVocabularyResponse]:
        """Tells the tokenizer's tokens."""
        for chunk in split_vocabulary(self._door.vocabulary):
            yield verifier_pb2.VerifierGetVocabularyResponse(chunk=wire.vocabulary_chunk_to_pb(chunk))

    async def ReadFeatures(  # noqa: N802
        self, request: verifier_pb2.ReadFeaturesRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[verifier_pb2.ReadFeaturesResponse]:
        """Reads features of a session's rows, a few chunks at a time; passes go on between them."""
        next_row, stop = request.first_row, request.first_row + request.num_rows
        while next_row < stop:
            actor = self._door.actor
            if not isinstance(actor, ReadsFeatures):
                raise InvalidArgument("this replica has no features")
            messages = await actor.read_features(request.session, request.epoch, next_row, stop - next_row)
            for features in messages:
                yield verifier_pb2.ReadFeaturesResponse(features=wire.features_to_pb(features))
            next_row = messages[-1].end

    async def Connect(  # type: ignore[override]  # noqa: N802  # writes through the context
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifierConnectRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Carries many sessions."""
        await self._door.streams.serve(request_iterator, context)


class VerifierService(ReplicaService[VerifierCommand, VerifierEvent]):
    """The verifier as a process."""

    name = "verifier"

    @property
    def grpc_services(self) -> Sequence[str]:
        """Full names of its rpc services."""
        return (verifier_pb2.DESCRIPTOR.services_by_name["Verifier"].full_name,)

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the servicer."""
        verifier_pb2_grpc.add_VerifierServicer_to_server(VerifierServicer(self.door), server)
