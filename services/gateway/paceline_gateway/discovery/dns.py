"""Endpoints behind a DNS name, looked up again and again.

A lookup that fails or finds nothing changes nothing: an empty answer of a resolver means more often that a name server
is in trouble than that a whole pool is gone, and links to dead replicas cost little.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
from collections.abc import Awaitable, Callable

from paceline.errors import ConfigurationError
from paceline_gateway.discovery.endpoint import Endpoint, Tell, join_host_port
from paceline_gateway.discovery.targets import DnsTarget

logger = logging.getLogger(__name__)

Resolve = Callable[[str], Awaitable[frozenset[str]]]
"""Finds the IPv4 and IPv6 addresses of a host; raises `OSError`."""


async def resolve(host: str) -> frozenset[str]:
    """Asks the system's resolver, in a thread.

    Raises:
        OSError: the name does not exist, or nobody answers.
        ConfigurationError: there can be no such name.
    """
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConfigurationError(f"{host!r} is no host name: each part between dots has 1 to 63 characters") from error
    return frozenset(str(sockaddr[0]) for _, _, _, _, sockaddr in found)


class DnsDiscovery:
    """Tells the A and AAAA records of a name, and the changes.

    Args:
        target: the name, and the port of all its addresses.
        interval_s: pause between two lookups, in seconds.
        resolve: how to look up.
    """

    def __init__(self, target: DnsTarget, interval_s: float, resolve: Resolve = resolve) -> None:
        self.name = str(target)
        self._target = target
        self._interval_s = interval_s
        self._resolve = resolve

    async def run(self, tell: Tell) -> None:
        """Looks up until it is cancelled.

        Raises:
            ConfigurationError: there can be no such name.
        """
        known: frozenset[str] = frozenset()
        trouble = ""
        while True:
            was, trouble = trouble, ""
            try:
                found = await self._resolve(self._target.host)
            except OSError as error:
                found, trouble = frozenset(), str(error)
            if not found:
                trouble = trouble or "no address"
                if trouble != was:
                    logger.warning("%s: %s; the %d known addresses stay in use", self.name, trouble, len(known))
            elif found != known:
                known = found
                addresses = sorted(join_host_port(host, self._target.port) for host in found)
                tell(tuple([Endpoint(address) for address in addresses]))
            await asyncio.sleep(self._interval_s * random.uniform(0.9, 1.0))  # noqa: S311  (spreads gateways)
