"""Logs: one JSON object per record with its fields, or one readable line."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from paceline.runtime.logs import JsonFormatter, TextFormatter, bind_log_context, configure_logging, log_context


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


def test_text_stays_one_line_whatever_is_in_it() -> None:
    line = TextFormatter("verifier").format(record("two\nlines \x1b[2J é 🚲", user="x\r\n12:00:00 ERROR \u2028 y"))
    assert len(line.splitlines()) == 1
    assert line.endswith(r"verifier: two\nlines \x1b[2J é 🚲 user=x\r\n12:00:00 ERROR \u2028 y")


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


# --- the context ------------------------------------------------------------------------------------------------------


def logged(**fields: str) -> dict[str, object]:
    """The fields of a record that is made now, beyond those that every record has."""
    entry: dict[str, object] = json.loads(JsonFormatter("x").format(record(**fields)))
    return {name: entry[name] for name in entry.keys() - {"time", "level", "service", "logger", "message"}}


def test_the_context_is_in_both_formats() -> None:
    with log_context(request_id="r-1"):
        assert logged() == {"request_id": "r-1"}
        assert TextFormatter("x").format(record(epoch=3)).endswith("session closed request_id=r-1 epoch=3")
    assert logged() == {}


def test_contexts_add_up_and_a_records_own_field_wins() -> None:
    with log_context(request_id="r-1", session="outer"), log_context(session="inner"):
        assert logged() == {"request_id": "r-1", "session": "inner"}
        assert logged(session="own") == {"request_id": "r-1", "session": "own"}
    assert logged() == {}


def test_a_context_ends_with_an_error_too() -> None:
    with pytest.raises(RuntimeError), log_context(session="s"):
        raise RuntimeError("scripted")
    assert logged() == {}


async def test_what_is_bound_stays_in_the_task_and_in_those_that_it_starts() -> None:
    seen: dict[str, dict[str, object]] = {}

    async def child(name: str) -> None:
        seen[name] = logged()

    async def request(name: str) -> None:
        bind_log_context(request_id=name)
        await asyncio.sleep(0)
        bind_log_context(session=f"s of {name}")
        await asyncio.create_task(child(name))
        await asyncio.to_thread(lambda: seen.update({f"{name} in a thread": logged()}))

    await asyncio.gather(request("a"), request("b"))
    for name in ("a", "b"):
        expected = {"request_id": name, "session": f"s of {name}"}
        assert seen[name] == seen[f"{name} in a thread"] == expected
    assert logged() == {}
