from __future__ import annotations

import json
import socket
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import psutil
import pytest
from typer.testing import CliRunner

from paceline.cli import doctor
from paceline.cli.app import app
from paceline.cli.doctor import (
    Report,
    State,
    check_cores,
    check_devices,
    check_memory,
    check_model,
    check_packages,
    check_port,
    closing,
)
from paceline.model_source import BUILT_IN


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.usefixtures("empty_cache")
def test_a_machine_with_everything_but_the_model_is_healthy() -> None:
    result = CliRunner().invoke(app, ["doctor", "--port", "0", "--http-port", "0", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["healthy"] is True
    states = {finding["subject"]: finding["state"] for finding in report["findings"]}
    assert states["redis"] == "ok"
    assert states["torch"] == states["fastapi"] == states["uvicorn"] == "ok"
    assert states["model"] == "warning"
    assert all(finding["advice"] for finding in report["findings"] if finding["state"] != "ok")


@pytest.mark.usefixtures("empty_cache")
def test_a_redis_that_is_not_there_fails_and_says_what_to_do() -> None:
    result = CliRunner().invoke(
        app, ["doctor", "--port", "0", "--http-port", "0", "--redis-url", "redis://127.0.0.1:1"]
    )
    assert result.exit_code == 1
    assert "✗  redis" in result.stdout
    assert "--redis-url" in result.stdout
    assert "Something is missing" in result.stdout


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    verifier, drafter = check_devices("cuda:0", "cpu")
    assert verifier.state is State.FAILED
    assert "CUDA" in verifier.advice
    assert drafter.state is State.OK


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name in {"torch", "onnxruntime-genai", "uvicorn"}:
            raise PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr(doctor, "version", version)
    found = {finding.subject: finding for finding in check_packages()}
    assert found["torch"].state is State.FAILED
    assert "paceline[engine]" in found["torch"].advice
    assert found["uvicorn"].state is State.FAILED
    assert "services/gateway" in found["uvicorn"].advice
    assert found["onnxruntime-genai"].state is State.WARNING
    assert found["redis"].state is State.OK


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_port_that_is_taken(flag: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        finding = check_port(flag, other.getsockname()[1])
    assert finding.state is State.WARNING
    assert f"use {flag} 0 " in finding.advice


def test_the_last_line_does_not_send_into_a_taken_port() -> None:
    free = (check_port("--port", 0), check_port("--http-port", 0))
    assert closing(Report(True, free)) == "Everything is there: try `paceline up`."
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        grpc, http = check_port("--port", port), check_port("--http-port", port)
    end = "stop what has it, or try `paceline up"
    assert closing(Report(True, (grpc, http))) == f"A port cannot be taken: {end} --port 0 --http-port 0`."
    assert closing(Report(True, (free[0], http))) == f"A port cannot be taken: {end} --http-port 0`."
    assert closing(Report(False, (grpc, http))) == "Something is missing, see above."


def test_one_core_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cores", lambda: (0,))
    assert check_cores("cpu", "cpu").state is State.WARNING
    assert check_cores("cuda:0", "cuda:1").state is State.OK
    monkeypatch.setattr(doctor, "available_cores", lambda: (0, 1))
    assert check_cores("cpu", "cpu").detail == "2: verifier 1, drafter 1"


def test_little_memory_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**30})())
    assert check_memory().state is State.WARNING


@pytest.mark.usefixtures("empty_cache")
def test_the_model_is_told_apart_from_one_that_must_be_fetched(empty_cache: Path, tmp_path: Path) -> None:
    name = next(iter(BUILT_IN))
    model, disk = check_model(name)
    assert model.state is State.WARNING
    assert f"paceline quantize {name}" in model.advice
    assert disk.subject == "disk"
    missing, _ = check_model(str(tmp_path / "none.gguf"))
    assert missing.state is State.FAILED
