"""What is particular to links to verifiers and to drafters: the rpcs, and how their messages are read and written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from paceline.errors import InvalidArgument
from paceline.messages import DrafterCommand, ModelInfo, VerifierCommand
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.v1 import drafter_pb2, verifier_pb2
from paceline.v1.drafter_pb2_grpc import DrafterStub
from paceline.v1.verifier_pb2_grpc import VerifierStub
from paceline.wire import (
    drafter_command_to_pb,
    drafter_event_from_pb,
    model_info_from_pb,
    verifier_command_to_pb,
    verifier_event_from_pb,
    vocabulary_chunk_from_pb,
)
from paceline_gateway.commands import ReplicaCommand, ReplicaEvent
from paceline_gateway.effects import Lane

_MAX_PIECES = 2**22
_MAX_VOCABULARY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class LinkCodec:
    """How one kind of replica is spoken to.

    Attributes:
        lane: the kind.
        get_info: asks for what it serves, within a time in seconds.
        get_vocabulary: asks for its tokens by id, within a time in seconds; raises `PacelineError`.
        connect: opens the stream.
        command_to_pb: makes one command.
        event_from_pb: reads one event; raises `InvalidArgument`.
        frame: makes a request frame of commands.
    """

    lane: Lane
    get_info: Callable[[grpc.aio.Channel, float], Awaitable[ModelInfo]]
    get_vocabulary: Callable[[grpc.aio.Channel, float], Awaitable[Mapping[int, str]]]
    connect: Callable[[grpc.aio.Channel], Any]
    command_to_pb: Callable[[ReplicaCommand], Any]
    event_from_pb: Callable[[Any], ReplicaEvent]
    frame: Callable[[Sequence[Any]], Any]


async def _verifier_info(channel: grpc.aio.Channel, timeout_s: float) -> ModelInfo:
    request = verifier_pb2.VerifierGetModelInfoRequest()
    return model_info_from_pb((await VerifierStub(channel).GetModelInfo(request, timeout=timeout_s)).info)


async def _drafter_info(channel: grpc.aio.Channel, timeout_s: float) -> ModelInfo:
    request = drafter_pb2.DrafterGetModelInfoRequest()
    return model_info_from_pb((await DrafterStub(channel).GetModelInfo(request, timeout=timeout_s)).info)


async def _read_vocabulary(responses: Any) -> Mapping[int, str]:
    """Gathers the chunks of a peer, which may send nonsense.

    Raises:
        PacelineError: it fails, or sends what cannot be a vocabulary.
    """
    vocabulary: dict[int, str] = {}
    size_bytes = 0
    try:
        async for response in responses:
            chunk = vocabulary_chunk_from_pb(response.chunk)
            vocabulary.update(enumerate(chunk.pieces, chunk.first_id))
            size_bytes += response.ByteSize()
            if len(vocabulary) > _MAX_PIECES or size_bytes > _MAX_VOCABULARY_BYTES:
                raise InvalidArgument(
                    f"the vocabulary has more than {_MAX_PIECES} tokens or {_MAX_VOCABULARY_BYTES} bytes"
                )
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error) from error
    finally:
        responses.cancel()
    return vocabulary


async def _verifier_vocabulary(channel: grpc.aio.Channel, timeout_s: float) -> Mapping[int, str]:
    request = verifier_pb2.VerifierGetVocabularyRequest()
    return await _read_vocabulary(VerifierStub(channel).GetVocabulary(request, timeout=timeout_s))


async def _drafter_vocabulary(channel: grpc.aio.Channel, timeout_s: float) -> Mapping[int, str]:
    request = drafter_pb2.DrafterGetVocabularyRequest()
    return await _read_vocabulary(DrafterStub(channel).GetVocabulary(request, timeout=timeout_s))


VERIFIER_CODEC = LinkCodec(
    lane=Lane.VERIFIER,
    get_info=_verifier_info,
    get_vocabulary=_verifier_vocabulary,
    connect=lambda channel: VerifierStub(channel).Connect(),
    command_to_pb=lambda command: verifier_command_to_pb(cast("VerifierCommand", command)),
    event_from_pb=verifier_event_from_pb,
    frame=lambda commands: verifier_pb2.VerifierConnectRequest(commands=commands),
)
DRAFTER_CODEC = LinkCodec(
    lane=Lane.DRAFTER,
    get_info=_drafter_info,
    get_vocabulary=_drafter_vocabulary,
    connect=lambda channel: DrafterStub(channel).Connect(),
    command_to_pb=lambda command: drafter_command_to_pb(cast("DrafterCommand", command)),
    event_from_pb=drafter_event_from_pb,
    frame=lambda commands: drafter_pb2.DrafterConnectRequest(commands=commands),
)
