"""Where a pool's replicas are to be found, as a user writes it.

host:port,host:port                     a fixed list; static://host:port,host:port means the same
dns:///host:port                        every address of a name
k8s://namespace/service[:port]          the pods behind a Kubernetes service; port is a name or a number of the pods
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_ADDRESS = re.compile(r"(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_.-]+):(?P<port>[0-9]{1,5})")
_LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
_KUBERNETES = re.compile(rf"(?P<namespace>{_LABEL})/(?P<service>{_LABEL})(?::(?P<port>[-a-z0-9]{{1,15}}))?")
_STATIC_SCHEME = "static://"
_DNS_SCHEME = "dns:///"
_KUBERNETES_SCHEME = "k8s://"
FORMS = "host:port,host:port or dns:///host:port or k8s://namespace/service[:port]"


@dataclass(frozen=True, slots=True)
class StaticTarget:
    """Fixed addresses, host:port each; none at all where a pool is not used."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """All addresses of a name."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_DNS_SCHEME}{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class KubernetesTarget:
    """The pods behind a service.

    Attributes:
        namespace: of the service.
        service: its name.
        port: name of the port in its EndpointSlices, or the number at which the pods listen; None for the only port,
            or the one named grpc.
    """

    namespace: str
    service: str
    port: str | int | None = None

    def __str__(self) -> str:
        port = "" if self.port is None else f":{self.port}"
        return f"{_KUBERNETES_SCHEME}{self.namespace}/{self.service}{port}"


Target = StaticTarget | DnsTarget | KubernetesTarget


def split_target(text: str) -> list[str]:
    """Parts of "a:1,b:2", "static://a:1,b:2" or "[a:1,b:2]"; brackets around IPv6 hosts stay."""
    if text.startswith("[") and text.endswith("]"):
        text = text[1:-1]
    return [part.strip().removeprefix(_STATIC_SCHEME) for part in text.split(",") if part.strip()]


def parse_target(parts: Sequence[str]) -> Target:
    """The target that parts, as `split_target` gives them, name together.

    Raises:
        ValueError: a part makes no sense, is named twice, or does not go with the others.
    """
    if len(set(parts)) < len(parts):
        raise ValueError("an address is named twice")
    if len(parts) > 1 and any("://" in part for part in parts):
        raise ValueError(
            f"{','.join(parts)!r} mixes targets; a pool takes one list of host:port, or one dns:/// or k8s://"
        )
    if len(parts) == 1 and parts[0].startswith(_DNS_SCHEME):
        host, port = _address(parts[0].removeprefix(_DNS_SCHEME), parts[0])
        return DnsTarget(host, port)
    if len(parts) == 1 and parts[0].startswith(_KUBERNETES_SCHEME):
        return _kubernetes(parts[0])
    for part in parts:
        _address(part, part)
    return StaticTarget(tuple(parts))


def _address(text: str, shown: str) -> tuple[str, int]:
    match = _ADDRESS.fullmatch(text)
    if match is None or not 0 < int(match["port"]) <= 65535:
        raise ValueError(f"{shown!r} is no address; write {FORMS}")
    return match["host"], int(match["port"])


def _kubernetes(text: str) -> KubernetesTarget:
    match = _KUBERNETES.fullmatch(text.removeprefix(_KUBERNETES_SCHEME))
    if match is None:
        raise ValueError(
            f"{text!r} names no service; write k8s://namespace/service, with :port-name or :number if need be"
        )
    port: str | int | None = match["port"]
    if isinstance(port, str) and port.isdigit():
        port = int(port)
        if not 0 < port <= 65535:
            raise ValueError(f"{text!r} has no valid port; a number is 1 to 65535")
    return KubernetesTarget(match["namespace"], match["service"], port)
