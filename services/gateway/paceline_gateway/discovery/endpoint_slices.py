"""What the EndpointSlices of one service say together. Pure; sees the client's models and never calls it.

A service has any number of slices: one for each address family and set of ports, and more when there are many pods.
While the control plane moves a pod from one slice to another it is in both, and in a cluster with two address families
it always is. Two laws make one endpoint of it:

* copies of one pod (same uid) are one endpoint, with its IPv4 address if it has one. Termination cannot be undone, so a
  copy that says `terminating` is newer than one that does not; otherwise one ready copy is enough.
* pods with one address (the address of a dead pod was given to a new one) are one endpoint, and a usable one wins.

| ready | serving | terminating | endpoint |
|---|---|---|---|
| true or null | any | false or null | takes sessions |
| false | any | false or null | none |
| any | true | true | draining |
| any | false | true | none |

A null `serving` equals `ready`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline_gateway.discovery.endpoint import Endpoint, join_host_port

if TYPE_CHECKING:
    from kubernetes.aio.client import V1Endpoint, V1EndpointSlice

_USUAL_PORT_NAME = "grpc"
_IPV6 = "IPv6"


@dataclass(frozen=True, slots=True)
class _Copy:
    """A pod as one slice has it."""

    pod: str
    is_ipv6: bool
    address: str
    ready: bool
    serving: bool
    terminating: bool


class SliceTable:
    """The slices of one service.

    Args:
        port: name or number of the port, as in `KubernetesTarget`.
    """

    def __init__(self, port: str | int | None) -> None:
        self._port = port
        self._slices: dict[str, V1EndpointSlice] = {}

    def replace(self, slices: Iterable[V1EndpointSlice]) -> None:
        """Forgets all and takes these."""
        self._slices = {_name(one): one for one in slices}

    def put(self, changed: V1EndpointSlice) -> None:
        """Adds a slice or takes its new state."""
        self._slices[_name(changed)] = changed

    def remove(self, gone: V1EndpointSlice) -> None:
        """Forgets a slice."""
        self._slices.pop(_name(gone), None)

    @property
    def portless(self) -> tuple[str, ...]:
        """Names of slices that have endpoints but not the port."""
        return tuple(sorted(name for name, one in self._slices.items() if one.endpoints and self._port_of(one) is None))

    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints of all slices, each once, sorted by address."""
        pods: dict[str, list[_Copy]] = {}
        for copy in self._copies():
            pods.setdefault(copy.pod, []).append(copy)
        found: dict[str, Endpoint] = {}
        for copies in pods.values():
            endpoint = _merged(copies)
            if endpoint is not None and (endpoint.address not in found or not endpoint.draining):
                found[endpoint.address] = endpoint
        return tuple([found[address] for address in sorted(found)])

    def _copies(self) -> Iterator[_Copy]:
        for one in self._slices.values():
            port = self._port_of(one)
            if port is None:
                continue
            for endpoint in one.endpoints or []:
                if endpoint.addresses:
                    yield _copy(endpoint, port, one.address_type == _IPV6)

    def _port_of(self, one: V1EndpointSlice) -> int | None:
        if isinstance(self._port, int):
            return self._port
        ports = {item.name or "": item.port for item in one.ports or [] if (item.protocol or "TCP") == "TCP"}
        if self._port is None and len(ports) == 1:
            return next(iter(ports.values()))
        return ports.get(self._port or _USUAL_PORT_NAME)


def _name(one: V1EndpointSlice) -> str:
    name = one.metadata.name if one.metadata else None
    if not name:
        raise ValueError("the API sent an EndpointSlice without a name")
    return str(name)


def _copy(endpoint: V1Endpoint, port: int, is_ipv6: bool) -> _Copy:
    # Addresses beyond the first have no meaning: the API's reference says so.
    address = join_host_port(endpoint.addresses[0], port)
    conditions = endpoint.conditions
    ready = conditions is None or conditions.ready is None or conditions.ready
    serving = ready if conditions is None or conditions.serving is None else conditions.serving
    return _Copy(
        pod=(endpoint.target_ref.uid if endpoint.target_ref else None) or address,
        is_ipv6=is_ipv6,
        address=address,
        ready=ready,
        serving=serving,
        terminating=conditions is not None and bool(conditions.terminating),
    )


def _merged(copies: list[_Copy]) -> Endpoint | None:
    address = min(copies, key=lambda copy: (copy.is_ipv6, copy.address)).address
    ending = [copy for copy in copies if copy.terminating]
    if ending:
        return Endpoint(address, draining=True) if any(copy.serving for copy in ending) else None
    return Endpoint(address) if any(copy.ready for copy in copies) else None
