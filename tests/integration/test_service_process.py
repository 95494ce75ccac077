"""The services as real processes: ready file, health, SIGTERM, bad settings, a launcher that dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import grpc.aio
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from paceline_gateway.link_codec import DRAFTER_CODEC, VERIFIER_CODEC

from paceline.messages import Close, Closed, Drafted, Failed, Opened, Verified
from paceline.runtime.grpc_client import open_channel
from paceline.text.tokenizer import Tokenizer
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.integration.replicas import Writer, drafter_link, verifier_link, wait_for
from tests.integration.test_drafter_service import draft, opening

Eventually = Callable[[Callable[[], bool]], None]
PROMPT = (1, 2, 3, 4, 1, 2, 3)
SMALL = ["--kv-cache-bytes", str(2**20)]


class Process:
    """A service that was started as a user would."""

    def __init__(self, module: str, folder: Path, *arguments: str) -> None:
        self.ready_file = folder / "ready.json"
        self.log_file = folder / "log"
        command = [sys.executable, "-m", module, "--ready-file", str(self.ready_file), *arguments]
        with self.log_file.open("wb") as log:
            self.popen = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8")

    def address(self, eventually: Eventually) -> str:
        """Where it listens, as soon as it is ready."""
        eventually(lambda: self.ready_file.exists() or self.popen.poll() is not None)
        assert self.popen.poll() is None, self.log
        told = json.loads(self.ready_file.read_text(encoding="utf-8"))
        assert told["pid"] == self.popen.pid
        return str(told["address"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    started: list[Process] = []

    def run(module: str, *arguments: str) -> Process:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Process(module, folder, *arguments))
        return started[-1]

    yield run
    for process in started:
        process.popen.kill()
        process.popen.wait(30)


@pytest.fixture
async def channel() -> AsyncIterator[Callable[[str], grpc.aio.Channel]]:
    channels: list[grpc.aio.Channel] = []

    def connect(address: str) -> grpc.aio.Channel:
        channels.append(open_channel(address))
        return channels[-1]

    yield connect
    for opened in channels:
        await opened.close()


async def test_verifier_serves_drains_and_ends(
    start: Callable[..., Process],
    tiny_llama: Path,
    eventually: Eventually,
    channel: Callable[[str], grpc.aio.Channel],
) -> None:
    process = start("paceline_verifier", "--model", str(tiny_llama), "--model-name", "tiny", "--log-format", "json")
    opened = channel(process.address(eventually))
    info = (await verifier_pb2_grpc.VerifierStub(opened).GetModelInfo(verifier_pb2.VerifierGetModelInfoRequest())).info
    assert info.model == "tiny"
    assert info.vocab_size > 0
    assert info.tokenizer_hash
    assert list(info.eos_token_ids)
    assert info.gather_window_us == 20_000
    assert await VERIFIER_CODEC.get_vocabulary(opened, 10.0) == Tokenizer.load(tiny_llama).vocabulary
    health = health_pb2_grpc.HealthStub(opened).Watch(health_pb2.HealthCheckRequest(service="paceline.v1.Verifier"))
    assert (await wait_for(health.read())).status == health_pb2.HealthCheckResponse.SERVING

    link = verifier_link(opened)
    await link.receive(object)
    writer = Writer.start("s", PROMPT)
    await link.send(writer.open(), writer.verify())
    await link.receive(Opened)
    writer.log.extend((await link.receive(Verified)).tokens)

    process.popen.send_signal(signal.SIGTERM)
    assert (await wait_for(health.read())).status == health_pb2.HealthCheckResponse.NOT_SERVING
    refused = await link.ask(Writer.start("new", PROMPT).open(), Failed)
    assert refused.failure.code == "unavailable"
    writer.log.extend((await link.ask(writer.verify(), Verified)).tokens)  # a running session goes on
    assert process.popen.poll() is None
    await link.ask(Close("s", 1), Closed)
    assert process.popen.wait(30) == 0, process.log
    assert not process.ready_file.exists()
    messages = [json.loads(line)["message"] for line in process.log.splitlines() if line.startswith("{")]
    assert messages[0] == "starting"
    assert messages[-1] == "ended"


async def test_drafter_serves_a_chain_of_methods(
    start: Callable[..., Process],
    tiny_llama: Path,
    eventually: Eventually,
    channel: Callable[[str], grpc.aio.Channel],
) -> None:
    arguments = ["--method", "ngram,draft_model", "--model", str(tiny_llama), "--runner", "torch", *SMALL]
    process = start("paceline_drafter", *arguments)
    opened = channel(process.address(eventually))
    info = (await drafter_pb2_grpc.DrafterStub(opened).GetModelInfo(drafter_pb2.DrafterGetModelInfoRequest())).info
    assert list(info.methods) == ["ngram", "draft_model"]
    assert info.tokenizer_hash
    assert await DRAFTER_CODEC.get_vocabulary(opened, 10.0) == Tokenizer.load(tiny_llama).vocabulary
    link = drafter_link(opened)
    await link.receive(object)
    await link.send(opening("s", PROMPT), draft("s", 1, PROMPT, depth=3))
    await link.receive(Opened)
    drafted = await link.receive(Drafted)
    assert drafted.method == "ngram"
    assert drafted.block.tokens == (4, 1, 2)
    other = (*PROMPT, 9, 8)
    drafted = await link.ask(draft("s", 2, other, depth=3, catch_up=(9, 8)), Drafted)
    assert drafted.method == "draft_model"
    assert drafted.block.num_draft_tokens == 3
    process.popen.send_signal(signal.SIGTERM)
    process.popen.send_signal(signal.SIGINT)  # the second signal does not wait for the session
    assert process.popen.wait(30) == 0, process.log


@pytest.mark.parametrize(
    ("module", "arguments", "code", "words"),
    [
        ("paceline_verifier", [], 2, "--model (PACELINE_VERIFIER_MODEL): is required"),
        (
            "paceline_verifier",
            ["--model", "x", "--max-sessions", "0"],
            2,
            "--max-sessions (PACELINE_VERIFIER_MAX_SESSIONS): ",
        ),
        ("paceline_verifier", ["--model", "/nowhere/model.gguf"], 2, "there is no file /nowhere/model.gguf"),
        ("paceline_drafter", ["--method", "magic"], 2, "magic"),
    ],
)
def test_service_that_cannot_start_says_why(
    start: Callable[..., Process], module: str, arguments: list[str], code: int, words: str
) -> None:
    process = start(module, *arguments)
    assert process.popen.wait(60) == code, process.log
    assert words in process.log
    assert "Traceback" not in process.log
    assert not process.ready_file.exists()


def test_service_ends_when_its_launcher_is_killed(tiny_llama: Path, tmp_path: Path, eventually: Eventually) -> None:
    ready_file, pid_file = tmp_path / "ready.json", tmp_path / "pid"
    arguments = [sys.executable, "-m", "paceline_drafter", "--method", "ngram", "--ready-file", str(ready_file)]
    code = (
        "import os, subprocess, pathlib, time\n"
        f"child = subprocess.Popen({arguments!r} + ['--parent-pid', str(os.getpid())])\n"
        f"pathlib.Path({str(pid_file)!r}).write_text(str(child.pid))\n"
        "child.wait()\n"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    try:
        eventually(ready_file.exists)
        child = psutil.Process(int(pid_file.read_text()))
    finally:
        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(30)
    psutil.wait_procs([child], timeout=30)
    assert not child.is_running()
    assert not ready_file.exists()


def test_sigterm_during_the_load_ends_the_process(start: Callable[..., Process], eventually: Eventually) -> None:
    # The folder is made only when the process waits for nothing else: loading takes seconds of imports.
    process = start("paceline_drafter", "--method", "ngram")
    eventually(lambda: "listening" in process.log or process.popen.poll() is not None)
    process.popen.send_signal(signal.SIGTERM)
    assert process.popen.wait(30) == 0, process.log
