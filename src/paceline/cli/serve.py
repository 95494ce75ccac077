"""`paceline serve gateway|drafter|verifier`: one service in this process, with its own flags."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from enum import Enum
from typing import NoReturn

from paceline.errors import ConfigurationError


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


def serve(service: ServiceName, arguments: Sequence[str]) -> NoReturn:
    """Becomes the service: signals and exit status are the service's own."""
    command = service_command(service, arguments)
    os.execv(command[0], command)  # noqa: S606 - the interpreter that runs this
