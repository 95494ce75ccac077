"""The program in a shell: streams that are closed, full, or no text are one line and an exit code, no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.exit_codes import EXIT_FAILED, EXIT_USAGE
from tests.fakes.scripted_gateway import ANSWER, ScriptedGateway, serving


@pytest.fixture
def address() -> Iterator[str]:
    with serving(ScriptedGateway(ANSWER)) as where:
        yield where


def shell(line: str, *arguments: str | bytes, **environment: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a line of sh in which `paceline` is the program and `$@` are the arguments."""
    line = line.replace("paceline", f"{sys.executable} -c 'from paceline.cli import main; main()'")
    command: list[str | bytes] = ["sh", "-c", line, "sh", *arguments]
    done = subprocess.run(command, capture_output=True, env={**os.environ, **environment}, timeout=60, check=False)
    assert b"Traceback" not in done.stderr
    assert b"Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize("encoding", ["utf-8:strict", "utf-8:surrogateescape"])
@pytest.mark.parametrize("line", ["generate -", "chat"])
def test_standard_input_that_is_no_text(address: str, line: str, encoding: str) -> None:
    command = f"printf '\\377\\376abc\\n' | paceline {line} --address {address}"
    done = shell(command, PYTHONIOENCODING=encoding)
    assert done.returncode == EXIT_USAGE
    assert b"error: prompt is not valid utf-8: byte 0xff of standard input" in done.stderr


def test_an_argument_that_is_no_text(address: str) -> None:
    done = shell('paceline generate "$@" --address ' + address, b"\xff\xfe")
    assert done.returncode == EXIT_USAGE
    assert b"messages[0].content is not valid Unicode: lone surrogate at character 0" in done.stderr


@pytest.mark.parametrize("line", ["generate -", "chat"])
def test_a_closed_standard_input(address: str, line: str) -> None:
    done = shell(f"paceline {line} --address {address} <&-")
    assert done.returncode == EXIT_USAGE
    assert b"error: standard input is closed" in done.stderr


def test_a_terminal_of_ascii_gets_escapes(address: str) -> None:
    done = shell(f"paceline generate hi --address {address}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert done.stdout == b"\\u65e5\\u672c\\xe9\\U0001f600\n"


def test_json_stays_json_in_ascii(address: str) -> None:
    done = shell(f"paceline generate hi --json --address {address}", PYTHONIOENCODING="ascii")
    assert done.returncode == 0
    assert json.loads(done.stdout)["text"] == "日本é😀"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a device that is always full")
@pytest.mark.parametrize("option", ["", "--json"])
def test_a_full_disk(address: str, option: str) -> None:
    done = shell(f"paceline generate hi {option} --address {address} >/dev/full")
    assert done.returncode == EXIT_FAILED
    assert b"No space left on device" in done.stderr
