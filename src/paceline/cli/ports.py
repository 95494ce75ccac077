"""Whether a port of this machine can be taken."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"
"""Where the services of a fleet on one machine listen."""


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
