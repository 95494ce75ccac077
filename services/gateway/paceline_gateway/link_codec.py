"""What is particular to links to verifiers and to drafters: the rpcs, and how their messages are read and written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import grpc.aio

from paceline.messages import DrafterCommand, ModelInfo, VerifierCommand
from paceline.v1 import drafter_pb2, verifier_pb2
from paceline.v1.drafter_pb2_grpc import DrafterStub
from paceline.v1.verifier_pb2_grpc import VerifierStub
from paceline.wire import (
    drafter_command_to_pb,
    drafter_event_from_pb,
    model_info_from_pb,
    verifier_command_to_pb,
    verifier_event_from_pb,
)
from paceline_gateway.commands import ReplicaCommand, ReplicaEvent
from paceline_gateway.effects import Lane


@dataclass(frozen=True, slots=True)
class LinkCodec:
    """How one kind of replica is spoken to.

    Attributes:
        lane: the kind.
        get_info: asks for what it serves, within a time in seconds.
        connect: opens the stream.
        command_to_pb: makes one command.
        event_from_pb: reads one event; raises `InvalidArgument`.
        frame: makes a request frame of commands.
    """

    lane: Lane
    get_info: Callable[[grpc.aio.Channel, float], Awaitable[ModelInfo]]
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


VERIFIER_CODEC = LinkCodec(
    lane=Lane.VERIFIER,
    get_info=_verifier_info,
    connect=lambda channel: VerifierStub(channel).Connect(),
    command_to_pb=lambda command: verifier_command_to_pb(cast("VerifierCommand", command)),
    event_from_pb=verifier_event_from_pb,
    frame=lambda commands: verifier_pb2.VerifierConnectRequest(commands=commands),
)
DRAFTER_CODEC = LinkCodec(
    lane=Lane.DRAFTER,
    get_info=_drafter_info,
    connect=lambda channel: DrafterStub(channel).Connect(),
    command_to_pb=lambda command: drafter_command_to_pb(cast("DrafterCommand", command)),
    event_from_pb=drafter_event_from_pb,
    frame=lambda commands: drafter_pb2.DrafterConnectRequest(commands=commands),
)
