"""Children are real processes here: small Python programs that behave well or badly."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from paceline.cli.child import Child, ChildAddresses, ChildSpec
from paceline.errors import ConfigurationError

_READY = """
import json, os, signal, sys, threading
path = sys.argv[1]
with open(path + ".tmp", "w") as file:
    json.dump({"address": "127.0.0.1:1", "pid": os.getpid()}, file)
os.rename(path + ".tmp", path)
"""
_UNTIL_TERMINATED = "signal.sigwait({signal.SIGTERM})"
_STUBBORN = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()"


def make_child(folder: Path, program: str) -> Child:
    ready_file = folder / "ready.json"
    return Child(
        ChildSpec(
            name="tester 0",
            command=(sys.executable, "-c", program, str(ready_file)),
            ready_file=ready_file,
            log_file=folder / "tester.log",
            environment={"PACELINE_TEST_MARK": "x"},
        )
    )


def block_sigterm(body: str) -> str:
    return "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n" + _READY + body


async def test_ready_then_stopped(tmp_path: Path) -> None:
    child = make_child(tmp_path, block_sigterm(_UNTIL_TERMINATED))
    await child.start()
    assert (await child.wait_ready(30)).grpc == child.address == "127.0.0.1:1"
    assert psutil.Process(child.pid).environ()["PACELINE_TEST_MARK"] == "x"
    await child.stop(30)
    assert await child.wait_ended() == 0
    assert not psutil.pid_exists(child.pid)


async def test_the_ready_file_tells_where_http_and_metrics_are(tmp_path: Path) -> None:
    more = '"address": "127.0.0.1:1", "http_address": "127.0.0.1:2", "metrics_address": "127.0.0.1:3"'
    child = make_child(tmp_path, block_sigterm(_UNTIL_TERMINATED).replace('"address": "127.0.0.1:1"', more))
    await child.start()
    assert await child.wait_ready(30) == ChildAddresses("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3")
    await child.stop(30)


async def test_a_stubborn_child_is_killed_with_its_own_children(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "grandchild = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(grandchild.pid, flush=True)\n" + _READY + _STUBBORN
    )
    child = make_child(tmp_path, program)
    await child.start()
    await child.wait_ready(30)
    grandchild = psutil.Process(int((tmp_path / "tester.log").read_text()))
    await child.stop(0.1)
    assert await child.wait_ended() < 0
    psutil.wait_procs([grandchild], timeout=10)
    assert not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE


async def test_a_child_that_dies_at_start_shows_its_last_lines(tmp_path: Path) -> None:
    child = make_child(tmp_path, "print('the reason'); raise SystemExit(3)")
    await child.start()
    with pytest.raises(
        ConfigurationError, match=r"tester 0 ended with exit status 3 before it was ready(.|\n)*the reason"
    ):
        await child.wait_ready(30)
    await child.stop(1)


async def test_a_log_holds_the_last_start_only(tmp_path: Path) -> None:
    for words in ("the first reason", "another one"):
        child = make_child(tmp_path, f"raise SystemExit({words!r})")
        await child.start()
        await child.wait_ended()
        assert child.last_lines() == f"  {words}"


async def test_a_silent_child_times_out(tmp_path: Path) -> None:
    child = make_child(tmp_path, "import signal; signal.pause()")
    await child.start()
    with pytest.raises(ConfigurationError, match="tester 0 was not ready after 0 s"):
        await child.wait_ready(0.2)
    await child.stop(5)


async def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    child = Child(ChildSpec("tester 0", (str(tmp_path / "nothing"),), tmp_path / "r", tmp_path / "l"))
    with pytest.raises(ConfigurationError, match="cannot start tester 0"):
        await child.start()
    await child.stop(1)


async def test_a_stale_ready_file_of_another_process_is_not_believed(tmp_path: Path) -> None:
    child = make_child(tmp_path, "import signal; signal.pause()")
    await child.start()
    child.spec.ready_file.write_text(f'{{"address": "127.0.0.1:9", "pid": {os.getpid()}}}')
    with pytest.raises(ConfigurationError, match="not ready"):
        await child.wait_ready(0.2)
    await child.stop(5)
