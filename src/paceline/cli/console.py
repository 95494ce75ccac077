"""Where the commands write, and how an error becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from paceline.errors import InvalidArgument, PacelineError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def out() -> Console:
    """What a command is asked for: standard output. Made anew, because tests replace the stream."""
    _write_what_it_cannot_as_escapes(sys.stdout)
    return Console(highlight=False, emoji=False, soft_wrap=True)


def err() -> Console:
    """Progress, warnings and errors: standard error."""
    _write_what_it_cannot_as_escapes(sys.stderr)
    return Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)


def print_error(error: PacelineError) -> None:
    """One line: what happened, the field at fault if there is one, and what to do."""
    console = err()
    named = error.field in error.message.replace("-", "_")
    field = "" if named else f" ({error.field})"
    console.print("[bold red]error:[/] ", end="")
    console.print(f"{error.message}{field}", markup=False)


@contextlib.contextmanager
def errors_as_json(wanted: bool) -> Iterator[None]:
    """Tells a typed error on standard output too, as `{"error": {"code", "message", "field"}}`, and passes it on."""
    try:
        yield
    except PacelineError as error:
        if wanted:
            out().print(_json({"error": asdict(error.to_failure())}), markup=False)
        raise


def print_os_error(error: OSError) -> None:
    """One line about a file or stream that failed; what waits for a full standard output is given up.

    Raises:
        OSError: the reader of standard output has left; that is no failure to tell.
    """
    if error.errno == errno.EPIPE:
        raise error
    print_error(PacelineError(str(error)))
    try:
        sys.stdout.flush()
    except OSError:
        # Else the interpreter tries again at its end, and complains.
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def read_stdin(*, line: bool = False) -> str:
    """Standard input to its end, or its next line with its end (empty at the end of the input).

    Raises:
        InvalidArgument: it is closed, or not text in its encoding.
    """
    stream: TextIO | None = sys.stdin
    if stream is None or stream.closed:
        raise InvalidArgument("standard input is closed: give the prompt as an argument or pipe it in", field="prompt")
    if isinstance(stream, io.TextIOWrapper) and stream.errors != "strict":
        stream.reconfigure(errors="strict")
    try:
        return stream.readline() if line else stream.read()
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise InvalidArgument(
            f"prompt is not valid {error.encoding}: byte 0x{wrong:02x} of standard input", field="prompt"
        ) from error


def to_json(value: DataclassInstance) -> str:
    """One line of JSON for machines."""
    return _json(asdict(value))


def _json(value: dict[str, Any]) -> str:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    return json.dumps(value, default=_plain, ensure_ascii=not encoding.lower().startswith("utf"))


def _write_what_it_cannot_as_escapes(stream: TextIO | None) -> None:
    """A terminal of ASCII gets what it has no letters for as escapes, rather than nothing at all."""
    if isinstance(stream, io.TextIOWrapper) and stream.errors != "backslashreplace":
        stream.reconfigure(errors="backslashreplace")


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Path):
        return str(value)
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
