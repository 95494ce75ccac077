"""A gRPC server as every service boots it: health, reflection, TLS, stated limits, errors with details.

Two questions are answered by health, under different names:

| name | SERVING | for |
|---|---|---|
| "" and each rpc service | after `set_serving(True)`, unless `set_healthy(False)` | readiness: send work here |
| `liveness` | from the start, unless `set_healthy(False)` | liveness: else restart the process |
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from paceline.errors import ConfigurationError
from paceline.runtime.grpc_errors import ErrorInterceptor
from paceline.runtime.settings import ServiceSettings

MAX_CONCURRENT_STREAMS = 4096
LIVENESS = "liveness"
"""Health service that says whether the process works at all, ready or not."""
_KEEPALIVE_TIME_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 10_000
_LEAST_PING_INTERVAL_MS = 5_000


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Options shared by servers and clients: message limits and keepalive, so that a dead peer is noticed."""
    return [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]


class GrpcServer:
    """The server of one service.

    Args:
        settings: address, TLS and limits.
        service_names: full names of the rpc services it offers, for health and reflection.
    """

    def __init__(self, settings: ServiceSettings, service_names: Sequence[str]) -> None:
        self._settings = settings
        self._names = ("", *service_names)
        self._health = health.aio.HealthServicer()
        self._serving = False
        self._healthy = True
        self._changed = asyncio.Event()
        self.server = grpc.aio.server(
            interceptors=[ErrorInterceptor()],
            options=[
                *channel_options(settings.max_message_bytes),
                ("grpc.max_concurrent_streams", MAX_CONCURRENT_STREAMS),
                ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_INTERVAL_MS),
                # Two processes on one port would share its connections: better an error at start.
                ("grpc.so_reuseport", 0),
            ],
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        reflection.enable_server_reflection((*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.server)

    async def start(self) -> str:
        """Listens and answers; health says NOT_SERVING, for `liveness` SERVING.

        Returns:
            The address, with the port that was taken.

        Raises:
            ConfigurationError: the address cannot be bound or a certificate cannot be read.
        """
        await self._apply()
        address = f"{self._settings.host}:{self._settings.port}"
        try:
            credentials = self._credentials()
            port = (
                self.server.add_insecure_port(address)
                if credentials is None
                else self.server.add_secure_port(address, credentials)
            )
        except OSError as error:
            raise ConfigurationError(f"cannot read a TLS file: {error}", field="tls_cert_file") from error
        except RuntimeError as error:
            raise ConfigurationError(
                f"cannot listen on {address}: {error}; is the port taken or the certificate bad?", field="port"
            ) from error
        await self.server.start()
        return f"{self._settings.host}:{port}"

    def _credentials(self) -> grpc.ServerCredentials | None:
        settings = self._settings
        if settings.tls_cert_file is None or settings.tls_key_file is None:
            return None
        pair = (settings.tls_key_file.read_bytes(), settings.tls_cert_file.read_bytes())
        authorities = settings.tls_client_ca_file.read_bytes() if settings.tls_client_ca_file else None
        return grpc.ssl_server_credentials([pair], authorities, authorities is not None)

    def set_serving(self, serving: bool) -> None:
        """Says whether the services take work; takes effect through `run_health`."""
        self._serving = serving
        self._changed.set()

    def set_healthy(self, healthy: bool) -> None:
        """Says whether the process works; while it does not it is neither ready nor alive."""
        self._healthy = healthy
        self._changed.set()

    async def run_health(self) -> None:
        """Publishes the health whenever it changes; a supervised task."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            await self._apply()

    async def _apply(self) -> None:
        await self._health.set(LIVENESS, _status(self._healthy))
        for name in self._names:
            await self._health.set(name, _status(self._serving and self._healthy))

    async def stop(self, grace_s: float) -> None:
        """Ends the server: no new rpc, running ones may take `grace_s` more and are cancelled then."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace_s)


def _status(good: bool) -> health_pb2.HealthCheckResponse.ServingStatus:
    return health_pb2.HealthCheckResponse.SERVING if good else health_pb2.HealthCheckResponse.NOT_SERVING
