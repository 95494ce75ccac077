"""Whether a port of this machine can be taken, and where somebody on it finds who listens."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"
"""Where the services of a fleet on one machine listen."""
_ALL_INTERFACES = {"0.0.0.0": HOST, "[::]": "[::1]", "::": "[::1]"}  # noqa: S104 - nobody listens here


def why_not_free(port: int) -> str:
    """Why a service could not listen on this port of `HOST`; empty when it could. Port 0 is any free one.

    Args:
        port: 0 to 65535.
    """
    with socket.socket() as probe:
        # As the services bind: connections of an earlier one that are still closing do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            return error.strerror or str(error)
    return ""


def reachable(address: str) -> str:
    """The address to give to a client on this machine: this machine's own one in place of "all interfaces".

    Args:
        address: host:port on which somebody listens.
    """
    host, _, port = address.rpartition(":")
    return f"{_ALL_INTERFACES.get(host, host)}:{port}"
