"""`paceline serve gateway|drafter|verifier`: one service in this process, with its own flags."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NoReturn

from paceline.errors import ConfigurationError

GRPC_CORE: Mapping[str, str] = {"GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener"}
"""What gRPC reads when it is imported: who waits for its completions reads the sockets too, so that each frame wakes a
thread less. See docs/adr/0024-grpc-threads.md; images set the same."""


class ServiceName(Enum):
    """The services."""

    GATEWAY = "gateway"
    DRAFTER = "drafter"
    VERIFIER = "verifier"


def service_command(service: ServiceName, arguments: Sequence[str]) -> tuple[str, ...]:
    """The command line that starts a service.

    Raises:
        ConfigurationError: its package is not installed here.
    """
    package = f"paceline_{service.value}"
    if importlib.util.find_spec(package) is None:
        raise ConfigurationError(
            f"the {service.value} is not installed here: run `pip install paceline-{service.value}`, or in a clone "
            f"`pip install -e services/{service.value}`"
        )
    return (sys.executable, "-m", package, *arguments)


def service_environment() -> dict[str, str]:
    """The variables of a service: this process's own, and what they do not say of gRPC."""
    return {**GRPC_CORE, **os.environ}


def serve(service: ServiceName, arguments: Sequence[str]) -> NoReturn:
    """Becomes the service: signals and exit status are the service's own."""
    command = service_command(service, arguments)
    os.execve(command[0], command, service_environment())  # noqa: S606 - the interpreter that runs this
