"""Logs: one JSON object per record with its fields, or one readable line."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator

import pytest

from paceline.runtime.logs import JsonFormatter, TextFormatter, configure_logging


def record(message: str = "session closed", **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("paceline.test", logging.WARNING, __file__, 1, message, (), None)
    vars(made).update(fields)
    return made


def test_json_has_message_service_and_fields() -> None:
    entry = json.loads(JsonFormatter("verifier").format(record(session="s-1", epoch=3)))
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "service": "verifier",
        "logger": "paceline.test",
        "message": "session closed",
        "session": "s-1",
        "epoch": 3,
    }


def test_json_stays_one_line_whatever_is_in_it() -> None:
    line = JsonFormatter("verifier").format(record("two\nlines \u2028 é", odd=object()))
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == "two\nlines \u2028 é"


def test_text_line() -> None:
    line = TextFormatter("verifier").format(record(session="s-1"))
    assert line.endswith("WARNING verifier: session closed session=s-1")


@pytest.mark.parametrize("formatter", [JsonFormatter("x"), TextFormatter("x")])
def test_traceback_is_kept(formatter: logging.Formatter) -> None:
    made = record()
    try:
        raise ValueError("scripted")
    except ValueError:
        made.exc_info = sys.exc_info()
    assert "ValueError: scripted" in formatter.format(made)


@pytest.fixture
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = handlers
    root.setLevel(level)


def test_configure_sets_level_and_the_only_handler(root_logger: logging.Logger) -> None:
    configure_logging("verifier", "error", "json")
    configure_logging("verifier", "warning", "text")
    assert root_logger.level == logging.WARNING
    assert len(root_logger.handlers) == 1
    assert isinstance(root_logger.handlers[0].formatter, TextFormatter)
