"""What discovery tells a pool, and how. Knows nothing of links and sessions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address at which a replica listens.

    Attributes:
        address: host:port; an IPv6 host is in brackets.
        draining: the replica is about to end: running sessions go on, new ones go elsewhere.
    """

    address: str
    draining: bool = False


Tell = Callable[[tuple[Endpoint, ...]], None]
"""Told the complete present set, each address once; whoever is not in it is gone."""


class Discovery(Protocol):
    """Watches over the endpoints of one pool.

    While its source cannot be reached it says nothing, so that the last known set stays in force.
    """

    @property
    def name(self) -> str:
        """Where it looks, for people; empty when nothing is configured."""

    async def run(self, tell: Tell) -> None:
        """Tells the set at first and whenever it has changed; ends only if it can never change.

        Raises:
            ConfigurationError: at the start, when the source can never be used as it is configured.
        """


def join_host_port(host: str, port: int) -> str:
    """The address host:port, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
