"""Fixtures of the whole suite, and the check that it leaves nothing behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

# Before any test imports torch: two busy cores are shared by everything that runs here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

_END_TIMEOUT_S = 10.0


def _children() -> list[str]:
    """Processes that this one started, directly or not, and that still run."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"process {process.pid}: {' '.join(process.cmdline())}")
        except psutil.NoSuchProcess:
            continue
    return found


def _listening_ports() -> list[str]:
    """TCP ports that this process still listens on."""
    connections = psutil.Process().net_connections(kind="inet")
    return [f"port {entry.laddr.port}" for entry in connections if entry.status == psutil.CONN_LISTEN]


def _threads() -> list[str]:
    """Threads that would keep this process from ending."""
    main = threading.main_thread()
    return [f"thread {thread.name}" for thread in threading.enumerate() if thread is not main and not thread.daemon]


def _leftovers() -> list[str]:
    return [*_children(), *_listening_ports(), *_threads()]


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """After all tests and all other fixtures: no process, no port, no thread."""
    before = set(_leftovers())
    yield
    # What has been told to end may take a moment to be gone.
    deadline_s = time.monotonic() + _END_TIMEOUT_S
    while (left := set(_leftovers()) - before) and time.monotonic() < deadline_s:
        threading.Event().wait(0.05)
    assert not left, f"left behind: {sorted(left)}"


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with a tokenizer of letters; made once."""
    # Here, because it imports transformers, which most tests do without.
    from tests.fakes.tiny_models import SERVED, write_model

    return write_model(tmp_path_factory.mktemp("tiny_llama"), SERVED["llama"])


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """Waits until a condition about another process holds; for conditions that nothing announces."""

    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "the condition never came true"
            threading.Event().wait(0.01)

    return wait
