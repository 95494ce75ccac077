"""Refuses environment variables that look like settings of a service and are none.

A misspelt variable would otherwise go unnoticed: a gateway that is meant to ask for keys would ask for none.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from paceline.errors import ConfigurationError

_LINK_NAME = re.compile(r"(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_LINK_URL = re.compile(r"(tcp|udp|sctp)://")
"""Kubernetes tells a pod of each Service `paceline-gateway`: PACELINE_GATEWAY_SERVICE_HOST, PACELINE_GATEWAY_PORT=tcp://…"""


def check_environment(prefix: str, fields: Collection[str], environment: Mapping[str, str]) -> None:
    """Refuses every variable that begins with the prefix and names no field.

    Args:
        prefix: of the service's variables, such as PACELINE_GATEWAY_.
        fields: names of its settings.
        environment: variables by name; their case does not count.

    Raises:
        ConfigurationError: names each such variable and the nearest one that exists, or says that Kubernetes set it.
    """
    given = {name: name.upper().removeprefix(prefix) for name in environment if name.upper().startswith(prefix)}
    known = {field.upper() for field in fields}
    links = sorted(name for name, rest in given.items() if _is_service_link(rest, environment[name], known))
    if links:
        raise ConfigurationError(
            f"{', '.join(links)}: set by Kubernetes for a Service of that name, and no setting; give the pod's spec "
            "`enableServiceLinks: false`"
        )
    unknown = sorted(name for name, rest in given.items() if rest not in known)
    if unknown:
        raise ConfigurationError("; ".join(_no_setting(name, given[name], prefix, known) for name in unknown))


def _is_service_link(rest: str, value: str, known: Collection[str]) -> bool:
    if rest.endswith("PORT") and _LINK_URL.match(value):
        return True
    return rest not in known and _LINK_NAME.fullmatch(rest) is not None


def _no_setting(name: str, rest: str, prefix: str, known: Collection[str]) -> str:
    nearest = get_close_matches(rest, sorted(known), n=1)
    return f"{name} is no setting: " + (f"did you mean {prefix}{nearest[0]}?" if nearest else "unset it, or see --help")
