"""Liveness and readiness over the real health service: loading, hanging, a dead loop, draining; and the metrics."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from paceline_verifier.servicer import VerifierService, verifier_door
from paceline_verifier.verify_actor import VerifyActor

from paceline.engine.target import TargetEngine
from paceline.errors import ConfigurationError
from paceline.messages import Close, Closed, ModelInfo, Opened, Verified
from paceline.runtime import replica_service
from paceline.runtime.grpc_client import open_channel
from paceline.runtime.grpc_server import LIVENESS
from paceline.runtime.process import serve
from paceline.runtime.replica_actor import ActorLimits
from paceline.runtime.replica_service import Replica
from paceline.runtime.settings import ServiceSettings
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.node import free_port
from tests.integration.replicas import (
    BOOT_ID,
    RECEIVE_TIMEOUT_S,
    GatedRunner,
    Writer,
    verifier_link,
    verifier_replica,
    wait_for,
)
from tests.integration.scraping import read

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
VERIFIER = "paceline.v1.Verifier"
LAW = cycle_law((3, 5, 7, 11, 13))
PROMPT = (1, 2, 4)


class Health:
    """Asks the health service as a probe does."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = health_pb2_grpc.HealthStub(channel)

    async def of(self, name: str) -> int:
        return int((await self._stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status)

    async def until(self, name: str, status: int) -> None:
        """Returns when the probe would get this answer."""
        watch = self._stub.Watch(health_pb2.HealthCheckRequest(service=name))
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            while (await watch.read()).status != status:
                pass
        watch.cancel()

    async def both(self) -> tuple[int, int]:
        """Readiness and liveness."""
        return await self.of(VERIFIER), await self.of(LIVENESS)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_service, "_HEALTH_POLL_S", 0.01)


async def test_a_hanging_pass_fails_both_until_it_ends() -> None:
    runner = GatedRunner(LAW)
    async with verifier_replica(runner, limits=ActorLimits(stall_timeout_s=0.05)) as replica, replica.connect() as link:
        health = Health(replica.channel)
        await health.until(VERIFIER, SERVING)
        assert await health.both() == (SERVING, SERVING)
        writer = Writer.start("s", PROMPT)
        await link.send(writer.open())
        await link.receive(Opened)
        runner.gate.clear()
        await link.send(writer.verify())
        await runner.pass_entered()
        for name in (LIVENESS, VERIFIER, ""):
            await health.until(name, NOT_SERVING)
        runner.gate.set()
        await health.until(LIVENESS, SERVING)
        await health.until(VERIFIER, SERVING)


async def test_a_dead_loop_in_a_live_process_fails_both() -> None:
    async with verifier_replica(ToyRunner(LAW)) as replica:
        health = Health(replica.channel)
        await health.until(VERIFIER, SERVING)
        loop = next(task for task in replica.supervisor.children if task.get_name() == replica.actor.name)
        loop.cancel()
        await health.until(LIVENESS, NOT_SERVING)
        await health.until(VERIFIER, NOT_SERVING)


class Running:
    """A verifier served by `serve`, as its process does it, with a load that waits for the test."""

    def __init__(self, folder: Path) -> None:
        self.ready_file = folder / "ready.json"
        self.settings = ServiceSettings(port=free_port(), metrics_port=free_port(), ready_file=self.ready_file)
        self.may_load = threading.Event()
        self.service = VerifierService(verifier_door(), self._load)
        self.address = f"127.0.0.1:{self.settings.port}"
        self.metrics_address = f"127.0.0.1:{self.settings.metrics_port}"

    def _load(self) -> Replica:  # type: ignore[type-arg]
        assert self.may_load.wait(RECEIVE_TIMEOUT_S)
        runner = ToyRunner(LAW)
        info = ModelInfo("toy", runner.info.vocab_size, runner.info.max_model_len, (), "toy-tokenizer", BOOT_ID)
        return Replica(VerifyActor(TargetEngine(runner), ActorLimits()), info)

    async def scrape(self) -> set[str]:
        return set((await asyncio.to_thread(read, self.metrics_address)).families)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Running, Health, grpc.aio.Channel, asyncio.Task[None]]]:
    process = Running(folder)
    task = asyncio.create_task(serve("verifier", process.settings, process.service))
    try:
        async with open_channel(process.address) as channel:
            await asyncio.wait_for(channel.channel_ready(), RECEIVE_TIMEOUT_S)
            yield process, Health(channel), channel, task
    finally:
        process.may_load.set()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_loading_and_draining_are_alive_and_not_ready(tmp_path: Path) -> None:
    async with running(tmp_path) as (process, health, channel, task):
        # The model loads: alive, not ready, and the metrics answer already.
        assert await health.both() == (NOT_SERVING, SERVING)
        names = await process.scrape()
        assert "paceline_build_info" in names
        assert "process_cpu_seconds" in names
        assert "paceline_sessions" not in names
        process.may_load.set()
        await health.until(VERIFIER, SERVING)
        assert await health.both() == (SERVING, SERVING)
        assert "paceline_sessions" in await process.scrape()
        assert json.loads(process.ready_file.read_text("utf-8"))["metrics_address"] == process.metrics_address
        # One session runs: draining waits for it.
        link = verifier_link(channel)
        await link.receive(object)
        writer = Writer.start("s", PROMPT)
        await link.send(writer.open(), writer.verify())
        await link.receive(Opened)
        await link.receive(Verified)
        os.kill(os.getpid(), signal.SIGTERM)
        await health.until(VERIFIER, NOT_SERVING)
        assert await health.both() == (NOT_SERVING, SERVING)
        assert "paceline_sessions" in await process.scrape()
        await link.ask(Close("s", 1), Closed)
        await wait_for(task)
        with pytest.raises(OSError, match="refused"):
            await process.scrape()


async def test_a_metrics_port_that_is_taken_is_said_at_the_start(tmp_path: Path) -> None:
    process = Running(tmp_path)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", process.settings.metrics_port or 0))
        taken.listen()
        with pytest.raises(ConfigurationError) as caught:
            await serve("verifier", process.settings, process.service)
    assert caught.value.field == "metrics_port"
    assert not process.ready_file.exists()
