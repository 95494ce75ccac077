"""How `generate` and `chat` reach a gateway, and what they say when they do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from paceline.cli.fleet_options import DEFAULT_ADDRESS
from paceline.client import AsyncClient
from paceline.errors import InvalidArgument, Unauthenticated, Unavailable
from paceline.runtime.grpc_client import ClientTls

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):([0-9]{1,5})")
_UNREACHABLE = ("failed to connect", "errors resolving", "address lookup failed", "dns resolution failed")
"""Parts of gRPC's messages, in lower case, when nobody listens at an address or its host has no such name."""
_HTTP_SPEAKS = ("failed parsing http/2", "http1.x server", "missing selected alpn property")
"""Parts of such a message when a server of HTTP/1 listens there, the last one over TLS."""
_HOW_KEY = "--api-key or PACELINE_API_KEY"
_TLS_TROUBLE = ("tls handshake", "security handshaker", "socket closed")
"""Parts of such a message when somebody listens there and TLS does not come about."""


@dataclass(frozen=True, slots=True)
class Connection:
    """One gateway or several of one fleet, and how to speak to them.

    Attributes:
        address: host:port, or several of them separated by commas: what breaks on one goes on over another.
        api_key: the key to show; empty for a gateway that asks for none.
        tls: speak TLS.
        ca_file: PEM authorities that the gateway's certificate must come from; None takes the system's.
        cert_file: PEM certificate chain of this client (mutual TLS).
        key_file: PEM private key of `cert_file`.
    """

    address: str
    api_key: str = field(default="", repr=False)
    tls: bool = False
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    def open(self) -> AsyncClient:
        """A client; it connects at its first call.

        Raises:
            InvalidArgument: the address is none, no header can hold the key, or the TLS options do not fit together.
            ConfigurationError: a TLS file cannot be read.
        """
        addresses = self.address.split(",")
        for address in addresses:
            match = _ADDRESS.fullmatch(address)
            if match is None or not 0 < int(match[2]) <= 65535:
                raise InvalidArgument(f"--address {address!r} is no address; write host:port", field="address")
        if not self.tls and (self.ca_file or self.cert_file or self.key_file):
            raise InvalidArgument("--tls-ca-file, --tls-cert-file and --tls-key-file need --tls", field="tls")
        if (self.cert_file is None) != (self.key_file is None):
            raise InvalidArgument("--tls-cert-file and --tls-key-file belong together", field="tls_cert_file")
        if not self.api_key.isascii() or not self.api_key.isprintable() or " " in self.api_key:
            raise InvalidArgument(f"{_HOW_KEY} must be visible ASCII characters without spaces", field="api_key")
        tls = ClientTls(self.ca_file, self.cert_file, self.key_file) if self.tls else None
        return AsyncClient(addresses, tls=tls, api_key=self.api_key or None)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Makes what went wrong with the connection or the key into what a user of the command line can act on.

        Raises:
            Unauthenticated: the gateway takes no call without a key, or not with this one.
            Unavailable: nobody listens at the address, or no gRPC or TLS comes about; a gateway's own words stay.
        """
        try:
            yield
        except Unauthenticated as error:
            wants = "does not know this API key: check" if self.api_key else "asks for an API key: give"
            raise Unauthenticated(f"{self.address} {wants} {_HOW_KEY}", field="api_key") from error
        except Unavailable as error:
            explanation = self._explanation(error)
            if explanation is None:
                raise
            raise Unavailable(explanation) from error

    def _explanation(self, error: Unavailable) -> str | None:
        """None where the gateway itself has spoken: it may use the same words about a replica, but sends trailers."""
        cause = error.__cause__
        if not isinstance(cause, grpc.aio.AioRpcError) or cause.trailing_metadata():
            return None
        said = error.message.lower()
        if not any(part in said for part in _UNREACHABLE):
            return None
        if any(part in said for part in _HTTP_SPEAKS):
            return (
                f"{self.address} looks like HTTP, and this command speaks gRPC: give the gateway's gRPC port with "
                f"--address, such as {DEFAULT_ADDRESS} (`paceline up` prints it)"
            )
        if self.tls and any(part in said for part in _TLS_TROUBLE):
            return (
                f"{self.address} does not come to terms over TLS. Does it speak TLS, does its certificate name this "
                "host and come from --tls-ca-file, does it want --tls-cert-file and --tls-key-file? "
                f"gRPC says: {error.message}"
            )
        if "socket closed" in said:
            return f"{self.address} closes the connection; if it speaks TLS, add --tls"
        return f"no gateway answers at {self.address}: start one with `paceline up`, or name another with --address"
