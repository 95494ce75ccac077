"""Where the commands write, and how an error becomes one line and an exit code."""

from __future__ import annotations

import json
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from paceline.errors import ConfigurationError, InvalidArgument, NotFound, PacelineError, Unavailable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_INTERRUPTED = 130


def out() -> Console:
    """What a command is asked for: standard output. Made anew, because tests replace the stream."""
    return Console(highlight=False, emoji=False, soft_wrap=True)


def err() -> Console:
    """Progress, warnings and errors: standard error."""
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def exit_code(error: PacelineError) -> int:
    """2 for what the user can correct on the command line, 3 for what cannot be reached, 1 for all else."""
    if isinstance(error, (InvalidArgument, ConfigurationError, NotFound)):
        return EXIT_USAGE
    return EXIT_UNAVAILABLE if isinstance(error, Unavailable) else EXIT_FAILED


def print_error(error: PacelineError) -> None:
    """One line: what happened, the field at fault if there is one, and what to do."""
    console = err()
    named = error.field in error.message.replace("-", "_")
    field = "" if named else f" ({error.field})"
    console.print("[bold red]error:[/] ", end="")
    console.print(f"{error.message}{field}", markup=False)


def to_json(value: DataclassInstance) -> str:
    """One line of JSON for machines."""
    return json.dumps(asdict(value), default=_plain, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
