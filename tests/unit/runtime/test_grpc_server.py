"""The server as every service boots it: health, reflection, TLS, limits, errors at start."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped]

from paceline.errors import ConfigurationError
from paceline.runtime.grpc_client import ClientTls, open_channel
from paceline.runtime.grpc_server import LIVENESS, GrpcServer
from paceline.runtime.settings import ServiceSettings, load_settings
from paceline.runtime.supervisor import Supervisor

CERTIFICATES = Path(__file__).parent / "certificates"
NAME = "paceline.v1.Verifier"
SERVER_TLS = ["--tls-cert-file", f"{CERTIFICATES}/server.pem", "--tls-key-file", f"{CERTIFICATES}/server.key"]
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@contextlib.asynccontextmanager
async def serving(*arguments: str) -> AsyncIterator[tuple[GrpcServer, str]]:
    server = GrpcServer(load_settings(ServiceSettings, list(arguments)), [NAME])
    async with Supervisor("test") as supervisor:
        address = await server.start()
        supervisor.spawn("health", server.run_health)
        try:
            yield server, address
        finally:
            await server.stop(0)


async def _health(address: str, tls: ClientTls | None = None) -> int:
    async with open_channel(address, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=NAME), timeout=5)
        return int(answer.status)


async def test_health_turns_for_the_server_and_its_service() -> None:
    async with serving() as (server, address), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", NAME):
            watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
            server.set_serving(False)
            assert (await watch.read()).status == NOT_SERVING
            server.set_serving(True)
            assert (await watch.read()).status == SERVING
            server.set_serving(False)
            assert (await watch.read()).status == NOT_SERVING
            watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="unknown"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_readiness_and_liveness_are_two_questions() -> None:
    """Loading and draining are no reason to restart a process; that it does not work is, and it is not ready then."""
    async with serving() as (server, address), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def told(name: str) -> int:
            return int((await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status)

        async def after(change: Callable[[], None]) -> tuple[int, int, int]:
            change()
            await asyncio.sleep(0)  # `run_health` publishes before it waits again
            return await told(""), await told(NAME), await told(LIVENESS)

        assert await after(lambda: None) == (NOT_SERVING, NOT_SERVING, SERVING)
        assert await after(lambda: server.set_serving(True)) == (SERVING, SERVING, SERVING)
        assert await after(lambda: server.set_healthy(False)) == (NOT_SERVING, NOT_SERVING, NOT_SERVING)
        assert await after(lambda: server.set_healthy(True)) == (SERVING, SERVING, SERVING)
        assert await after(lambda: server.set_serving(False)) == (NOT_SERVING, NOT_SERVING, SERVING)
        # Well again while it drains: still not ready.
        server.set_healthy(False)
        assert await after(lambda: server.set_healthy(True)) == (NOT_SERVING, NOT_SERVING, SERVING)


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, address), open_channel(address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        names = {service.name for service in answer.list_services_response.service}
        assert {NAME, "grpc.health.v1.Health"} <= names
        call.cancel()


async def test_tls() -> None:
    async with serving(*SERVER_TLS) as (_, address):
        assert await _health(address, ClientTls(ca_file=CERTIFICATES / "ca.pem")) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await _health(address)


async def test_tls_checks_the_name_that_it_is_told() -> None:
    async with serving(*SERVER_TLS) as (_, address):
        authority = CERTIFICATES / "ca.pem"
        assert await _health(address, ClientTls(authority, server_name="localhost")) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await _health(address, ClientTls(authority, server_name="elsewhere"))


async def test_mutual_tls_wants_a_client_certificate() -> None:
    async with serving(*SERVER_TLS, "--tls-client-ca-file", f"{CERTIFICATES}/ca.pem") as (_, address):
        authority = CERTIFICATES / "ca.pem"
        tls = ClientTls(authority, CERTIFICATES / "client.pem", CERTIFICATES / "client.key")
        assert await _health(address, tls) == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError):
            await _health(address, ClientTls(ca_file=authority))


async def test_port_that_is_taken_is_refused() -> None:
    async with serving() as (_, address):
        with pytest.raises(ConfigurationError) as caught:
            async with serving("--port", address.rsplit(":", 1)[1]):
                pass
        assert caught.value.field == "port"


async def test_certificate_that_is_missing_is_refused(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigurationError, match=r"none\.pem"):
        async with serving("--tls-cert-file", missing, "--tls-key-file", missing):
            pass
    with pytest.raises(ConfigurationError, match=r"none\.pem"):
        open_channel("localhost:1", tls=ClientTls(ca_file=Path(missing)))


async def test_message_above_the_limit_is_refused() -> None:
    async with serving("--max-message-bytes", "65536") as (_, address), open_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="x" * 70_000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_is_not_serving_after_the_end() -> None:
    server = GrpcServer(ServiceSettings(), [NAME])
    address = await server.start()
    async with open_channel(address) as channel, Supervisor("test") as supervisor:
        supervisor.spawn("health", server.run_health)
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=NAME))
        await watch.read()
        server.set_serving(True)
        assert (await watch.read()).status == SERVING
        supervisor.spawn("stop", lambda: server.stop(5.0))
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()
        await server.server.wait_for_termination()
