"""A fleet that Kubernetes names: real replicas and a real gateway, with the slices of a fake API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.client import AsyncClient
from paceline.engine.runner import SequencePass
from tests.fakes.kubernetes_api import FakeKubernetesApi, endpoint, endpoint_slice
from tests.fakes.toy_runner import ToyRunner
from tests.integration.fleet import VOCAB, Fleet, Run, generate, perfect_method, plain_tokens, until
from tests.integration.node import Node, VerifierNode
from tests.integration.paced import LAW, PROMPT, SAMPLING, Pace, PacedRunner, Stream

ROUNDS = 60
SEED = 4
TRAFFIC_WITHIN_S = 5.0
LONG: dict[str, Any] = {"return_window_ms": 60_000, "verifier_patience_ms": 60_000, "verifier_wait_ms": 10_000}
"""A session that waited for a replica that is gone would run into the tests' time limit."""


def expected(prompt: Sequence[int]) -> list[int]:
    return plain_tokens(LAW, prompt, ROUNDS, replace(SAMPLING, seed=SEED))


class SlowRunner(ToyRunner):
    """A toy whose pass takes a few milliseconds, so that streams last while the fleet changes."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        time.sleep(0.004)
        return super().forward(batch)


class Cluster:
    """A fleet whose gateway asks the fake API; each pod is in a slice of its own, since all have ports of their own."""

    def __init__(self, fleet: Fleet, api: FakeKubernetesApi) -> None:
        self.fleet = fleet
        self.api = api

    def show(self, node: Node[Any], service: str = "verifier", **conditions: bool) -> None:
        pod = endpoint("127.0.0.1", uid=f"pod-{node.port}", **conditions)
        self.api.put(endpoint_slice(f"{service}-{node.port}", service, [pod], ports={"grpc": node.port}))

    def terminate(self, node: Node[Any]) -> None:
        self.show(node, ready=False, serving=True, terminating=True)

    def remove(self, node: Node[Any], service: str = "verifier") -> None:
        self.api.delete(f"{service}-{node.port}")

    @property
    def ready(self) -> set[str]:
        return {replica.address for replica in self.fleet.verifier_pool.snapshot.ready}

    async def shows(self, *nodes: VerifierNode) -> None:
        """Returns when the gateway can use exactly these."""
        await until(lambda: self.ready == {node.address for node in nodes})

    async def run(self, client: AsyncClient, prompt: Sequence[int] = PROMPT) -> Run:
        """A generation of many rounds, each of one token."""
        request = self.fleet.request(prompt, max_tokens=ROUNDS, sampling=SAMPLING, seed=SEED)
        run = await generate(client, request)
        assert run.tokens == expected(prompt)
        return run


@contextlib.asynccontextmanager
async def cluster(folder: Path, *, num_shown: int = 1, **options: Any) -> AsyncIterator[Cluster]:
    async with FakeKubernetesApi.start() as api:
        settings: dict[str, Any] = {
            "verifiers": "k8s://default/verifier:grpc",
            "drafters": "k8s://default/drafter",
            "kubeconfig_file": api.write_kubeconfig(folder),
            "startup_wait_s": 0.0,
            **options.pop("settings", {}),
        }
        async with Fleet.start(folder, LAW, settings=settings, **options) as fleet:
            made = Cluster(fleet, api)
            for node in fleet.verifiers[:num_shown]:
                made.show(node)
            await made.shows(*fleet.verifiers[:num_shown])
            yield made


class Load:
    """Clients that generate one text after the other, until they are told to stop."""

    def __init__(self, made: Cluster, client: AsyncClient, num_clients: int) -> None:
        self.runs: list[tuple[float, Run]] = []
        """When each began, and what it became."""
        self._made = made
        self._client = client
        self._stopping = False
        self._num_clients = num_clients

    @contextlib.asynccontextmanager
    async def going(self) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as tasks:
            for number in range(self._num_clients):
                tasks.create_task(self._generate([1, 2, 3 + number]))
            yield
            self._stopping = True

    async def _generate(self, prompt: list[int]) -> None:
        while not self._stopping:
            began_at = time.monotonic()
            self.runs.append((began_at, await self._made.run(self._client, prompt)))


async def test_one_verifier_then_three_then_one_under_load(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(
            cluster(tmp_path, runner=lambda law: SlowRunner(law, VOCAB, max_model_len=256))
        )
        client = await stack.enter_async_context(made.fleet.client())
        first = made.fleet.verifiers[0]
        added = []
        for _ in range(2):
            added.append(await made.fleet.add_verifier())
            stack.push_async_callback(added[-1].close)
        load = Load(made, client, num_clients=6)
        async with load.going():
            await until(lambda: made.fleet.verifier_pool.num_sessions == 6)
            shown_at = time.monotonic()
            for node in added:
                made.show(node)
            await made.shows(first, *added)
            ready_s = time.monotonic() - shown_at
            await until(lambda: all(node.num_sessions for node in added))
            took_s = time.monotonic() - shown_at
            await until(lambda: sum(began_at > shown_at for began_at, _ in load.runs) >= 6)
            for node in added:
                made.terminate(node)
            await until(lambda: set(made.fleet.verifier_pool.snapshot.draining) == {node.address for node in added})
            drained_at = time.monotonic()
            async with asyncio.timeout(10.0):
                # What a pod does when it is told to end: it serves its sessions to their ends, then goes.
                await asyncio.gather(*[node.alive.service.drain() for node in added])
            for node in added:
                await node.kill()
                made.remove(node)
            await until(lambda: list(made.fleet.verifier_pool.loads) == [first.address])
            num_runs = len(load.runs)
            await until(lambda: len(load.runs) >= num_runs + 6)
        print(f"\nnew verifiers were ready after {ready_s * 1000:.0f} ms, had sessions after {took_s * 1000:.0f} ms")
        assert took_s < TRAFFIC_WITHIN_S
        used = {run.evidence.verifier for _, run in load.runs}
        assert used == {node.address for node in made.fleet.verifiers}
        assert {run.evidence.verifier for began_at, run in load.runs if began_at > drained_at} == {first.address}
        # No stream was moved: each round was run once.
        assert all(run.evidence.target_passes == ROUNDS for _, run in load.runs)


async def test_a_terminating_pod_ends_its_long_stream_and_gets_no_new_session(tmp_path: Path) -> None:
    pace = Pace()
    runners = iter([PacedRunner(LAW, pace), ToyRunner(LAW, VOCAB, max_model_len=256)])
    async with (
        cluster(tmp_path, num_verifiers=2, runner=lambda law: next(runners)) as made,
        made.fleet.client() as client,
    ):
        old, new = made.fleet.verifiers
        request = made.fleet.request(PROMPT, max_tokens=ROUNDS, sampling=SAMPLING, seed=SEED)
        stream = Stream(client, request, pace)
        try:
            await stream.tokens(5)
            made.terminate(old)
            made.show(new)
            await made.shows(new)
            assert made.fleet.verifier_pool.snapshot.draining == (old.address,)
            draining = asyncio.create_task(old.alive.service.drain())
            for _ in range(3):
                run = await made.run(client)
                assert run.evidence.verifier == new.address
            # Not ready any more, then gone from the slice altogether: the stream goes on.
            made.show(old, ready=False, serving=False, terminating=True)
            await stream.tokens(20)
            made.remove(old)
            assert not draining.done()
            run = await stream.rest()
            assert run.tokens == expected(PROMPT)
            assert (run.evidence.verifier, run.evidence.target_passes) == (old.address, ROUNDS)
            async with asyncio.timeout(5.0):
                await draining
            await until(lambda: list(made.fleet.verifier_pool.loads) == [new.address])
        finally:
            pace.open()


async def test_a_verifier_that_died_and_is_back_under_another_address_is_reached_at_once(tmp_path: Path) -> None:
    pace = Pace()
    runners = iter([PacedRunner(LAW, pace), ToyRunner(LAW, VOCAB, max_model_len=256)])
    async with (
        cluster(tmp_path, num_verifiers=2, runner=lambda law: next(runners), settings=LONG) as made,
        made.fleet.client() as client,
    ):
        old, new = made.fleet.verifiers
        request = made.fleet.request(PROMPT, max_tokens=ROUNDS, sampling=SAMPLING, seed=SEED)
        stream = Stream(client, request, pace)
        try:
            await stream.tokens(5)
            killing = asyncio.create_task(old.kill())
            await asyncio.sleep(0)
            pace.open()
            await killing
            made.remove(old)
            made.show(new)
            run = await stream.rest()
            assert run.tokens == expected(PROMPT)
            assert run.evidence.verifier == new.address
        finally:
            pace.open()


async def test_streams_begin_and_end_while_the_api_is_away(tmp_path: Path) -> None:
    async with cluster(tmp_path, num_verifiers=2) as made, made.fleet.client() as client:
        first, second = made.fleet.verifiers
        await made.api.go_away()
        made.remove(first)
        made.show(second)
        assert (await made.run(client)).evidence.verifier == first.address
        await made.api.come_back()
        await made.shows(second)
        assert (await made.run(client)).evidence.verifier == second.address


async def test_an_api_that_does_not_answer_does_not_hold_up_the_start(tmp_path: Path) -> None:
    async with FakeKubernetesApi.start() as api:
        settings: dict[str, Any] = {
            "verifiers": "k8s://default/verifier",
            "drafters": (),
            "kubeconfig_file": api.write_kubeconfig(tmp_path),
            "startup_wait_s": 0.2,
        }
        await api.go_away()
        started_at = time.monotonic()
        async with Fleet.start(tmp_path, LAW, settings=settings) as fleet:
            assert time.monotonic() - started_at < 5.0
            assert fleet.verifier_pool.snapshot.why_not == "k8s://default/verifier has not answered yet"
            await api.come_back()
            made = Cluster(fleet, api)
            made.show(fleet.verifiers[0])
            await made.shows(fleet.verifiers[0])
            async with fleet.client() as client:
                await made.run(client)


async def test_a_drafter_that_comes_in_the_middle_of_a_stream_is_used(tmp_path: Path) -> None:
    pace = Pace()
    options: dict[str, Any] = {"runner": lambda law: PacedRunner(law, pace), "method": perfect_method(LAW)}
    async with cluster(tmp_path, **options) as made, made.fleet.client() as client:
        request = made.fleet.request(PROMPT, max_tokens=ROUNDS, sampling=SAMPLING, seed=SEED)
        stream = Stream(client, request, pace)
        try:
            await stream.tokens(3)
            drafter = made.fleet.drafters[0]
            made.show(drafter, "drafter")
            await until(lambda: drafter.num_sessions == 1)
            run = await stream.rest()
            assert run.tokens == expected(PROMPT)
            assert run.evidence.accepted_tokens > 0
        finally:
            pace.open()


async def test_a_dns_name_is_followed(tmp_path: Path) -> None:
    async with contextlib.AsyncExitStack() as stack:
        # One port for all addresses of a name: the replica listens where the name will point to.
        options: dict[str, Any] = {"num_verifiers": 0, "settings": {"startup_wait_s": 0.0}}
        probe = await stack.enter_async_context(Fleet.start(tmp_path / "probe", LAW))
        port = probe.verifiers[0].port
        options["settings"]["verifiers"] = f"dns:///localhost:{port}"
        fleet = await stack.enter_async_context(Fleet.start(tmp_path / "real", LAW, **options))
        await until(lambda: any(one.address == f"127.0.0.1:{port}" for one in fleet.verifier_pool.snapshot.ready))
        client = await stack.enter_async_context(fleet.client())
        run = await generate(client, fleet.request(PROMPT, max_tokens=ROUNDS, sampling=SAMPLING, seed=SEED))
        assert run.tokens == expected(PROMPT)
