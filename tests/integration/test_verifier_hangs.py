"""A pass of the verifier's model that takes longer than any pass should."""

from __future__ import annotations

import asyncio
import contextlib

import grpc.aio
import pytest

from paceline.errors import Unavailable
from paceline.messages import Opened, Verified
from paceline.runtime import replica_service
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.runtime.replica_actor import ActorLimits
from paceline.v1 import verifier_pb2, verifier_pb2_grpc
from tests.fakes.toy_runner import cycle_law
from tests.integration.replicas import RECEIVE_TIMEOUT_S, GatedRunner, Writer, verifier_replica, wait_for

PROMPT = (1, 2, 4)


def toy() -> GatedRunner:
    return GatedRunner(cycle_law((3, 5, 7, 11, 13)))


async def test_hanging_pass_is_unhealthy_until_it_ends() -> None:
    runner = toy()
    limits = ActorLimits(stall_timeout_s=0.01)
    async with verifier_replica(runner, limits=limits) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await link.send(writer.open())
        await link.receive(Opened)
        runner.gate.clear()
        await link.send(writer.verify())
        await runner.pass_entered()
        await replica.until(lambda: not replica.actor.healthy)
        runner.gate.set()
        await link.receive(Verified)
        await replica.until(lambda: replica.actor.healthy)


async def test_hanging_pass_turns_every_peer_away_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a gateway can move its sessions instead of waiting for a verdict that may never come."""
    monkeypatch.setattr(replica_service, "_HEALTH_POLL_S", 0.01)
    runner = toy()
    async with verifier_replica(runner, limits=ActorLimits(stall_timeout_s=0.05)) as replica:
        stub = verifier_pb2_grpc.VerifierStub(replica.channel)
        writer = Writer.start("s", PROMPT)
        async with replica.connect() as link:
            await link.send(writer.open())
            await link.receive(Opened)
            runner.gate.clear()
            command = writer.verify()
            await link.send(command)
            await runner.pass_entered()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await wait_for(link.call.read())
            assert "hangs" in error_from_rpc(caught.value).message
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(verifier_pb2.VerifierGetModelInfoRequest())
        assert isinstance(error_from_rpc(caught.value), Unavailable)

        async def serves() -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.GetModelInfo(verifier_pb2.VerifierGetModelInfoRequest())
                return True
            return False

        runner.gate.set()
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            while not await serves():
                pass
        async with replica.connect() as link:
            assert (await link.ask(command, Verified)).round == command.round  # from memory
