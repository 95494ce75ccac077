"""uvicorn inside the gateway's event loop: no signal handlers of its own, and a bounded end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from paceline.errors import ConfigurationError
from paceline.runtime.settings import ServiceSettings
from paceline.runtime.supervisor import OnError, Supervisor
from paceline_gateway.http.connection import Connection

_BACKLOG = 2048
_SEND_BUFFER_BYTES = 128 * 1024
"""What the system takes of an answer whose client does not read; left alone it takes megabytes."""
_KEEP_ALIVE_S = 75
"""Longer than the idle time of usual load balancers, which must be the first to close."""


class HttpServer:
    """The HTTP server of one service.

    Args:
        settings: address and TLS files.
        port: to listen on; 0 takes a free one.
        app: what it serves.
        stop_grace_s: at the end, how long running answers may take to end, in seconds.
        keep_alive_s: how long a connection may be without a request, in seconds.
    """

    def __init__(
        self,
        settings: ServiceSettings,
        port: int,
        app: ASGIApp,
        *,
        stop_grace_s: float,
        keep_alive_s: int = _KEEP_ALIVE_S,
    ) -> None:
        self._settings = settings
        self._port = port
        self._stop_grace_s = stop_grace_s
        self._server = _Server(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=keep_alive_s,
                timeout_graceful_shutdown=max(1, round(stop_grace_s)),
                ssl_certfile=settings.tls_cert_file,
                ssl_keyfile=settings.tls_key_file,
                ssl_ca_certs=None if settings.tls_client_ca_file is None else str(settings.tls_client_ca_file),
                ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca_file is None else ssl.CERT_REQUIRED,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self, supervisor: Supervisor) -> str:
        """Takes the port and serves.

        Returns:
            The address, with the port that was taken.

        Raises:
            ConfigurationError: the address cannot be bound or a certificate cannot be read.
        """
        try:
            self._server.config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigurationError(f"cannot read a TLS file: {error}", field="tls_cert_file") from error
        listener = self._bind()

        async def run() -> None:
            try:
                await self._server.serve(sockets=[listener])
            finally:
                listener.close()

        self._task = supervisor.spawn("http server", run, on_error=OnError.FAIL)
        return f"{self._settings.host}:{listener.getsockname()[1]}"

    def _bind(self) -> socket.socket:
        host = self._settings.host
        try:
            family, _, _, _, address = socket.getaddrinfo(
                host.strip("[]"), self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            listener = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{self._port} for HTTP: {error}; is the port taken?", field="http_port"
            ) from error
        # Connections inherit these.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        # asyncio does so for sockets that name their protocol; else a small write waits for the last one's ACK.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener

    async def stop(self) -> None:
        """Ends the server: no new request, running answers may take `stop_grace_s` more and are cancelled then."""
        if self._task is not None:
            self._server.should_exit = True
            await asyncio.wait({self._task}, timeout=self._stop_grace_s + 2.0)


class _Server(uvicorn.Server):
    """uvicorn without signal handlers: the process has its own."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
