"""Channels to other services, with the limits and keepalive that the servers state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from paceline.errors import ConfigurationError
from paceline.runtime.grpc_server import channel_options

DEFAULT_MAX_MESSAGE_BYTES = 16 * 2**20
"""What the services' settings say too, unless they are told otherwise."""
_FIRST_RECONNECT_BACKOFF_MS = 100
_MAX_RECONNECT_BACKOFF_MS = 2_000


@dataclass(frozen=True, slots=True)
class ClientTls:
    """PEM files of a client: whom to trust, and for mutual TLS its own certificate and key.

    `server_name` is the name that the server's certificate must carry; empty takes the host of the address.
    """

    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str = ""

    def credentials(self) -> grpc.ChannelCredentials:
        """What the files hold now.

        Raises:
            ConfigurationError: a file cannot be read.
        """
        try:
            return grpc.ssl_channel_credentials(_read(self.ca_file), _read(self.key_file), _read(self.cert_file))
        except OSError as error:
            raise ConfigurationError(f"cannot read a TLS file: {error}", field="tls") from error


def open_channel(
    address: str, *, tls: ClientTls | None = None, max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
) -> grpc.aio.Channel:
    """A channel to `host:port`; it connects when used and again when broken.

    Raises:
        ConfigurationError: a certificate cannot be read.
    """
    options: list[tuple[str, int | str]] = [
        *channel_options(max_message_bytes),
        # The library's own first pause is a second: too long for a peer that was restarted.
        ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_BACKOFF_MS),
        ("grpc.max_reconnect_backoff_ms", _MAX_RECONNECT_BACKOFF_MS),
    ]
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    credentials = tls.credentials()
    if tls.server_name:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    return grpc.aio.secure_channel(address, credentials, options=options)


def _read(path: Path | None) -> bytes | None:
    return None if path is None else path.read_bytes()
