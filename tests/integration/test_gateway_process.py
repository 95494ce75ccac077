"""The gateway as a process: what it prints and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from paceline.runtime.grpc_server import LIVENESS
from tests.fakes.tiny_tokenizer import write_letters
from tests.integration.node import free_port
from tests.integration.scraping import read

TIMEOUT_S = 60.0


def gateway(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "paceline_gateway", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(process: subprocess.Popen[str]) -> str:
    try:
        return process.communicate(timeout=TIMEOUT_S)[1]
    finally:
        process.kill()


def test_redis_that_cannot_be_reached_ends_the_process_with_a_clear_error(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    process = gateway("--model", str(write_letters(tmp_path)), "--redis-url", url)
    errors = end_of(process)
    assert process.returncode == 2
    assert "cannot go on" in errors
    assert url in errors
    assert "redis_url" in errors
    assert "Traceback" not in errors


def test_a_model_that_is_not_there_ends_the_process_with_a_clear_error(tmp_path: Path) -> None:
    process = gateway("--model", str(tmp_path / "none.gguf"))
    errors = end_of(process)
    assert process.returncode == 2
    assert "none.gguf" in errors
    assert "Traceback" not in errors


def test_a_setting_that_cannot_work_ends_the_process(tmp_path: Path) -> None:
    process = gateway("--model", str(tmp_path), "--verifiers", "nonsense")
    errors = end_of(process)
    assert process.returncode == 2
    assert "host:port" in errors


def test_it_says_when_it_is_ready_and_ends_on_sigterm(
    tmp_path: Path, eventually: Callable[[Callable[[], bool]], None]
) -> None:
    ready = tmp_path / "ready.json"
    model = write_letters(tmp_path / "model")
    process = gateway("--model", str(model), "--ready-file", str(ready), "--startup-wait-s", "0", "--metrics-port", "0")
    try:
        eventually(lambda: ready.exists() or process.poll() is not None)
        told = json.loads(ready.read_text(encoding="utf-8"))
        assert told["pid"] == process.pid
        for endpoint in ("metrics_address", "http_address"):
            assert read(told[endpoint]).sum("paceline_open_streams", model_name="model") == 0
        with grpc.insecure_channel(told["address"]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            for name in (LIVENESS, "paceline.v1.Generation"):
                answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        process.send_signal(signal.SIGTERM)
        errors = end_of(process)
        assert process.returncode == 0
        assert "verifier pool: 0 ready; none is configured" in errors
        assert not ready.exists()
    finally:
        process.kill()
