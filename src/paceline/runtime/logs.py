"""Structured logs on stderr: one JSON object or one readable line per record.

Fields come from `extra=`: `logger.info("session closed", extra={"session": name, "epoch": 3})`, and from the context: a
door names the request that its task works on, a session actor its session, and every record that is made in there, by
whatever part, has them. Prompts and generated text are logged only where `log_prompts` says so; what identifies a
request is its id and its session.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


_context: ContextVar[Mapping[str, str]] = ContextVar("paceline_log_context", default=MappingProxyType({}))


def bind_log_context(**fields: str) -> None:
    """Adds fields to every record of the running task from now on, and of tasks that it starts."""
    _context.set({**_context.get(), **fields})


@contextmanager
def log_context(**fields: str) -> Iterator[None]:
    """Adds fields to every record that is made inside; for a part of a task that serves many."""
    token = _context.set({**_context.get(), **fields})
    try:
        yield
    finally:
        _context.reset(token)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """Fields of the context and of the record; the record's win."""
    return {**_context.get(), **{name: value for name, value in vars(record).items() if name not in _STANDARD}}


class JsonFormatter(logging.Formatter):
    """One JSON object per record: time, level, logger, message, the service, the extra fields, the traceback."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {
            "time": time,
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class TextFormatter(logging.Formatter):
    """The same for people: time, level, service, message, then name=value.

    What a client has sent may be in any of them, so line ends and other control characters are spelt out: nobody writes
    a line that looks like another record's.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        """The record as one line, followed by the traceback if there is one."""
        time = datetime.datetime.fromtimestamp(record.created).strftime("%H:%M:%S.%f")[:-3]
        fields = "".join(f" {name}={value}" for name, value in _fields(record).items())
        line = f"{time} {record.levelname:<7} {self._service}: {_one_line(record.getMessage() + fields)}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _one_line(text: str) -> str:
    if text.isprintable():
        return text
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def configure_logging(service: str, level: str, log_format: Literal["json", "text"]) -> None:
    """Sets the root logger's level and its one handler, replacing what was there."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
