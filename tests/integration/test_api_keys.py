"""API keys and request ids over real gRPC: who is let in, and how a request is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from paceline.client import AsyncClient
from paceline.errors import ConfigurationError, InvalidArgument, Unauthenticated
from paceline.runtime.grpc_client import open_channel
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.v1 import gateway_pb2
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet, generate, plain_tokens

LAW = hash_law(VOCAB, seed=5)
PROMPT = [1, 2, 3]
ALICE = "sk-alice-0123456789abcdef"
RPCS = {method.name: method for method in gateway_pb2.DESCRIPTOR.services_by_name["Generation"].methods}


def keys_file(folder: Path, text: str = f"alice: {ALICE}\n") -> Path:
    path = folder / "api-keys"
    path.write_text(text)
    return path


def call(channel: grpc.aio.Channel, rpc: str, *metadata: tuple[str, str]) -> Any:
    """One rpc of the service with an empty request, whatever its shape."""
    # the stubs do not know of calls without a serializer
    make: Any = channel.unary_stream if RPCS[rpc].server_streaming else channel.unary_unary
    return make(f"/paceline.v1.Generation/{rpc}")(b"", metadata=metadata)


async def answer(call: Any, rpc: str) -> Any:
    return await (call.read() if RPCS[rpc].server_streaming else call)


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize(
    "metadata", [(), (("authorization", "Bearer sk-mallory-0123456789"),), (("authorization", ALICE),)]
)
async def test_every_rpc_asks_for_a_key(tmp_path: Path, rpc: str, metadata: tuple[tuple[str, str], ...]) -> None:
    settings = {"api_keys_file": keys_file(tmp_path)}
    async with Fleet.start(tmp_path, LAW, settings=settings) as fleet, open_channel(fleet.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answer(call(channel, rpc, *metadata), rpc)
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        error = error_from_rpc(caught.value)
        assert isinstance(error, Unauthenticated)
        assert "authorization: Bearer KEY" in error.message
        assert "sk-" not in error.message
        assert fleet.gateway.sessions.num_running == 0


async def test_a_valid_key_is_served_and_health_and_reflection_are_open(tmp_path: Path) -> None:
    settings = {"api_keys_file": keys_file(tmp_path)}
    async with Fleet.start(tmp_path, LAW, settings=settings) as fleet, fleet.client(ALICE) as client:
        assert (await generate(client, fleet.request(PROMPT))).tokens == plain_tokens(LAW, PROMPT, 20)
        assert [model.model for model in await client.list_models()] == ["toy"]
        async with open_channel(fleet.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            await health.Check(health_pb2.HealthCheckRequest(service=""))
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            listed = [service.name async for reply in asked for service in reply.list_services_response.service]
            assert "paceline.v1.Generation" in listed


async def test_without_keys_nobody_is_asked(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client("anything-goes-here") as client:
        await generate(client, fleet.request(PROMPT))


async def test_a_wrong_file_ends_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="line 1") as caught:
        async with Fleet.start(tmp_path, LAW, settings={"api_keys_file": keys_file(tmp_path, "alice\n")}):
            pytest.fail("the gateway must not start")
    assert caught.value.field == "api_keys_file"


@pytest.mark.parametrize("key", ["", "with space-0123456789", "new\nline-0123456789", "schlüssel-0123456789"])
async def test_a_client_refuses_a_key_that_no_header_holds(key: str) -> None:
    with pytest.raises(InvalidArgument, match="visible ASCII"):
        AsyncClient("127.0.0.1:1", api_key=key)


# --- request ids ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rpc", RPCS)
@pytest.mark.parametrize("with_keys", [False, True])
async def test_a_request_is_named_by_its_client_or_by_the_gateway(tmp_path: Path, rpc: str, with_keys: bool) -> None:
    """Errors have the name too, and with keys this is one: none is shown."""
    settings = {"api_keys_file": keys_file(tmp_path)} if with_keys else {}
    async with Fleet.start(tmp_path, LAW, settings=settings) as fleet, open_channel(fleet.address) as channel:
        for sent, kept in (("a:B_c.d-9", True), ("x" * 128, True), ("x" * 129, False), ("no spaces", False)):
            named = call(channel, rpc, ("x-request-id", sent))
            got = dict(await named.initial_metadata())["x-request-id"]
            assert (got == sent) is kept
            assert re.fullmatch(r"[A-Za-z0-9_.:-]{1,128}", got)
            named.cancel()
        drawn = [dict(await call(channel, rpc).initial_metadata())["x-request-id"] for _ in range(2)]
        assert drawn[0] != drawn[1]


async def test_a_request_id_of_the_client_class(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        events = [event async for event in client.generate(fleet.request(PROMPT), request_id="mine:1")]
        assert events
        with pytest.raises(InvalidArgument, match="request_id"):
            [event async for event in client.generate(fleet.request(PROMPT), request_id="a b")]
