"""A fixed list of endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from paceline_gateway.discovery.endpoint import Endpoint, Tell


class StaticDiscovery:
    """Tells its addresses once.

    Args:
        addresses: host:port of each replica.
    """

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = tuple([Endpoint(address) for address in addresses])
        self.name = ",".join(addresses)

    async def run(self, tell: Tell) -> None:
        """Tells the addresses."""
        tell(self._endpoints)
