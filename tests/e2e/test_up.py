"""`paceline up` as a user starts it: real processes, real signals, a tiny random model."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.launcher import PACELINE, Launcher, generate, gone, is_listening

Eventually = Callable[[Callable[[], bool]], None]


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()


def test_the_fleet_serves_survives_a_lost_drafter_and_ends_at_ctrl_c(
    launcher: Launcher, tiny_llama: Path, eventually: Eventually
) -> None:
    up = launcher.up(tiny_llama, "--method=ngram,draft_model", f"--drafter-model={tiny_llama}", "--verifiers=2")
    family, ports = up.family(), up.ports()
    assert set(up.told["pids"]) == {"verifier 0", "verifier 1", "drafter 0", "gateway"}
    assert all(is_listening(port) for port in ports)
    question = ("abcabcab", "--raw", "--max-tokens=40", "--temperature=0.8", "--top-p=0.95", "--seed=5")

    # The size is fixed: passes of this toy take no time, so the governor would not draft.
    fast = generate(up.gateway, *question, "--num-speculative-tokens=4")
    plain = generate(up.gateway, *question, "--no-speculation")
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["text"] == plain["text"]
    assert len(plain["token_ids"]) == 40
    assert set(plain["origins"]) == {"plain"}
    assert plain["evidence"]["target_passes"] == 40
    # The drafter is the target itself and shares the noise: nearly every draft is right.
    assert fast["evidence"]["target_passes"] < 30
    assert fast["evidence"]["accepted_tokens"] == fast["origins"].count("accepted") > 10

    os.kill(up.told["pids"]["drafter 0"], signal.SIGKILL)
    alone = generate(up.gateway, *question)
    assert alone["token_ids"] == plain["token_ids"]
    os.kill(up.told["pids"]["verifier 0"], signal.SIGKILL)
    moved = generate(up.gateway, *question)
    assert moved["token_ids"] == plain["token_ids"]
    assert up.process.poll() is None

    up.process.send_signal(signal.SIGINT)
    _, errors = up.process.communicate(timeout=60)
    assert up.process.returncode == 0, errors
    assert "drafter 0: ended" in errors
    assert "everything is stopped" in errors
    assert gone(family)
    assert not any(is_listening(port) for port in ports)


def test_a_killed_launcher_leaves_no_process(launcher: Launcher, tiny_llama: Path, eventually: Eventually) -> None:
    up = launcher.up(tiny_llama, "--method=ngram")
    family, ports = up.family(), up.ports()
    assert len(family) == 4  # verifier, drafter, gateway, Redis
    up.process.kill()
    up.process.wait()
    eventually(lambda: gone(family))
    assert not any(is_listening(port) for port in ports)


def test_the_loss_of_the_only_verifier_ends_the_fleet(launcher: Launcher, tiny_llama: Path) -> None:
    up = launcher.up(tiny_llama, "--drafters=0")
    family = up.family()
    assert up.told["addresses"]["drafters"] == []
    os.kill(up.told["pids"]["verifier 0"], signal.SIGKILL)
    _, errors = up.process.communicate(timeout=60)
    assert up.process.returncode == 3
    assert "error: verifier 0 was ended by signal 9" in errors
    assert gone(family)


def test_a_part_that_cannot_start_is_shown_with_its_last_lines(launcher: Launcher, tiny_llama: Path) -> None:
    missing = {"PACELINE_VERIFIER_TLS_CERT_FILE": "no.pem", "PACELINE_VERIFIER_TLS_KEY_FILE": "no.key"}
    process = launcher.start(tiny_llama, "--drafters=0", environment=missing)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "error: verifier 0 ended with exit status" in errors
    assert "before it was ready" in errors
    assert "no.pem" in errors  # the verifier's own last words
    assert "Traceback" not in errors


def test_a_device_that_is_not_there_is_told_before_anything_starts(launcher: Launcher, tiny_llama: Path) -> None:
    process = launcher.start(tiny_llama, "--drafters=0", "--verifier-device=cuda:99")
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    first, last = errors.splitlines()
    assert first.startswith("error: --verifier-device cuda:99 cannot be used: torch ")
    assert last == "everything is stopped"


@pytest.mark.parametrize("flag", ["--port", "--http-port"])
def test_a_taken_port_is_told_before_the_models_are_loaded(launcher: Launcher, tiny_llama: Path, flag: str) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        process = launcher.start(tiny_llama, f"{flag}={port}", "--drafters=0")
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 2
    assert f"error: {flag} {port} of 127.0.0.1 cannot be used" in errors
    assert "models: preparing" not in errors
    assert "Traceback" not in errors


def test_a_lost_redis_is_told_and_comes_back(launcher: Launcher, tiny_llama: Path) -> None:
    up = launcher.up(tiny_llama, "--drafters=0")
    (redis,) = [member for member in up.family() if member.name().startswith(("valkey", "redis"))]
    redis.kill()
    assert up.process.stderr is not None
    lines = iter(up.process.stderr.readline, "")
    assert any(line.startswith("redis: ended") for line in lines)
    assert any(line.startswith(f"redis: ready {up.told['addresses']['redis']}") for line in lines)
    assert len(generate(up.gateway, "abc", "--raw", "--max-tokens=4")["token_ids"]) == 4
    family = up.family()
    up.process.send_signal(signal.SIGINT)
    up.process.communicate(timeout=60)
    assert up.process.returncode == 0
    assert gone(family)


def test_the_loss_of_the_gateway_ends_the_fleet_at_once(launcher: Launcher, tiny_llama: Path) -> None:
    up = launcher.up(tiny_llama, "--drafters=0")
    family = up.family()
    command = [*PACELINE, "generate", "--raw", "abc", "--address", up.gateway]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        os.kill(up.told["pids"]["gateway"], signal.SIGKILL)
        _, errors = up.process.communicate(timeout=8)
        running.kill()
    assert up.process.returncode == 3
    assert "error: gateway was ended by signal 9" in errors
    assert gone(family)


def test_ctrl_c_tells_of_running_generations(launcher: Launcher, tiny_llama: Path) -> None:
    up = launcher.up(tiny_llama, "--drafters=0")
    family = up.family()
    command = [*PACELINE, "generate", "--raw", "abc", "--max-tokens=100000", "--address", up.gateway]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as running:
        assert running.stdout is not None
        assert running.stdout.read(1)
        up.process.send_signal(signal.SIGINT)
        assert up.process.stderr is not None
        told = iter(up.process.stderr.readline, "")
        assert any(line == "1 generation is ending (at most 10 s); Ctrl-C again stops now\n" for line in told)
        up.process.communicate(timeout=60)
    assert up.process.returncode == 0
    assert gone(family)


def test_a_model_that_is_not_there(launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start(tmp_path / "nothing.gguf")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "error: there is no file" in errors
    assert "Traceback" not in errors


def test_a_folder_without_a_model(launcher: Launcher, tmp_path: Path) -> None:
    process = launcher.start(tmp_path)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "lacks config.json" in errors
    assert "Traceback" not in errors


def test_a_redis_that_is_not_there(launcher: Launcher, tiny_llama: Path) -> None:
    process = launcher.start(tiny_llama, "--method=ngram", "--redis-url=redis://127.0.0.1:1")
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 3
    assert "error: " in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_start_that_is_interrupted_leaves_nothing(
    launcher: Launcher, tiny_llama: Path, number: signal.Signals
) -> None:
    process = launcher.start(tiny_llama, "--method=ngram")
    assert process.stderr is not None
    while "verifier 0: starting" not in (line := process.stderr.readline()):
        assert line, "ended before it started anything"
    family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output == ""
    assert "everything is stopped" in errors
    assert gone(family)
