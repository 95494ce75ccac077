"""Many clients on both doors, half of which leave at any moment: nothing of theirs is left in any service."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.fleet import Fleet
from paceline.cli.fleet_options import FleetOptions
from paceline.client import AsyncClient
from paceline.generation import Chunk
from paceline.messages import SamplingParams
from paceline.model_source import default_name
from paceline.text.request import GenerationRequest, TextPrompt

NUM_CLIENTS = 32
MAX_TOKENS = 90
LAST_START = 60
LAST_LEAVING = 250
"""Moments are counted in chunks that all clients together have seen; those who stay see more than this."""
MAX_UNREAD_TOKENS = 10
"""Of one client that leaves: what was on its way to it, and the round that ran."""
SCRAPE_INTERVAL_S = 5.0

REPLICA_GAUGES = (
    "paceline_num_requests_running",
    "paceline_num_requests_waiting",
    "paceline_sessions",
    "paceline_kv_cache_usage_perc",
    "paceline_kv_tokens_in_use",
)
GAUGES: Mapping[str, tuple[str, ...]] = {
    "gateway": (
        "paceline_num_requests_running",
        "paceline_num_requests_waiting",
        "paceline_open_streams",
        "paceline_pool_sessions",
    ),
    "verifier 0": REPLICA_GAUGES,
    "drafter 0": REPLICA_GAUGES,
}
"""Gauges of each service that are 0 when nobody is served."""


@dataclass(frozen=True)
class Visit:
    """What one client does.

    Attributes:
        door: "http" or "grpc".
        prompt: text.
        seed: of the noise.
        starts_at: moment of its request.
        leaves_at: moment at which it is gone, whatever it has got by then; None: it stays to the end.
    """

    door: str
    prompt: str
    seed: int
    starts_at: int
    leaves_at: int | None


def visits(seed: int) -> list[Visit]:
    """Every other client of each door leaves; half of these soon after their request."""
    drawn = random.Random(seed)

    def visit(index: int) -> Visit:
        starts_at = 0 if index < NUM_CLIENTS // 2 else drawn.randrange(LAST_START)
        soon, sometime = starts_at + drawn.randrange(1, 12), drawn.randrange(starts_at + 1, LAST_LEAVING)
        leaves_at = drawn.choice([soon, sometime]) if index // 2 % 2 else None
        prompt = "".join(drawn.choices("abcdefgh", k=drawn.choice([4, 40, 120])))
        return Visit(("http", "grpc")[index % 2], prompt, index, starts_at, leaves_at)

    return [visit(index) for index in range(NUM_CLIENTS)]


class Progress:
    """Counts the chunks that all clients have seen."""

    def __init__(self, seen: int = 0) -> None:
        self._seen = seen
        self._changed = asyncio.Condition()

    async def add(self) -> None:
        async with self._changed:
            self._seen += 1
            self._changed.notify_all()

    async def reached(self, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._seen >= count)


class Clients:
    """A client of each door."""

    def __init__(self, model: str, grpc: AsyncClient, http: AsyncOpenAI) -> None:
        self._model = model
        self._grpc = grpc
        self._http = http

    async def chunks(self, visit: Visit) -> AsyncIterator[list[int]]:
        """Token ids as they come."""
        if visit.door == "grpc":
            sampling = SamplingParams(temperature=0.9, ignore_eos=True)
            request = GenerationRequest(TextPrompt(visit.prompt), "", sampling, visit.seed, MAX_TOKENS)
            async for event in self._grpc.generate(request):
                if isinstance(event, Chunk):
                    yield list(event.token_ids)
            return
        stream = await self._http.completions.create(
            model=self._model,
            prompt=visit.prompt,
            temperature=0.9,
            seed=visit.seed,
            max_tokens=MAX_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    extra: dict[str, Any] = choice.model_extra or {}
                    yield extra.get("token_ids") or []

    async def stay(self, visit: Visit, progress: Progress, tokens: list[int]) -> list[int]:
        """Reads a visit's tokens into `tokens` until its end, and returns them."""
        await progress.reached(visit.starts_at)
        async for ids in self.chunks(visit):
            tokens += ids
            await progress.add()
        return tokens

    async def leave(self, visit: Visit, progress: Progress) -> int:
        """Cuts a visit off when its moment has come, and returns how many tokens it has got."""
        assert visit.leaves_at is not None
        tokens: list[int] = []
        staying = asyncio.create_task(self.stay(visit, progress, tokens))
        await progress.reached(visit.leaves_at)
        staying.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await staying
        return len(tokens)


@pytest.fixture
async def fleet(tiny_llama: Path, tmp_path: Path) -> AsyncIterator[Fleet]:
    options = FleetOptions(
        model=str(tiny_llama),
        drafter_model=str(tiny_llama),
        method="ngram,draft_model",
        port=0,
        http_port=0,
        log_dir=tmp_path,
    )
    async with Fleet(options) as running:
        yield running
    for log in [child.spec.log_file.read_text() for child in running.children]:
        assert "exit_code=0" in log, log
        assert "Traceback" not in log, log


async def test_clients_that_leave_leave_nothing_behind(fleet: Fleet, tiny_llama: Path) -> None:
    model = default_name(str(tiny_llama))
    storm = visits(seed=1)
    stays = [visit for visit in storm if visit.leaves_at is None]
    leaves = [visit for visit in storm if visit.leaves_at is not None]
    assert len(stays) == len(leaves) == NUM_CLIENTS // 2
    async with (
        AsyncClient(fleet.addresses.gateway) as grpc,
        AsyncOpenAI(base_url=f"{fleet.addresses.http}/v1", api_key="none", max_retries=0) as http,
    ):
        clients = Clients(model, grpc, http)
        alone = [await clients.stay(visit, began(), []) for visit in stays]
        made_before = await tokens_made(fleet)
        progress = Progress()
        async with asyncio.TaskGroup() as group:
            staying = [group.create_task(clients.stay(visit, progress, [])) for visit in stays]
            leaving = [group.create_task(clients.leave(visit, progress)) for visit in leaves]
            await progress.reached(LAST_START)
            busy = await gauges(fleet)
        assert [task.result() for task in staying] == alone
        assert all(len(tokens) == MAX_TOKENS for tokens in alone)
        got = [task.result() for task in leaving]
        assert min(got) == 0, "nobody left before its first token"
        assert sum(0 < count < MAX_TOKENS for count in got) >= 4, "hardly anybody left mid-stream"
        assert busy["gateway", "paceline_open_streams"] > NUM_CLIENTS // 4
        assert all(busy[service, "paceline_kv_tokens_in_use"] > 0 for service in ("verifier 0", "drafter 0"))
        await until_idle(fleet)
        unread = await tokens_made(fleet) - made_before - sum(got) - len(stays) * MAX_TOKENS
        assert unread <= MAX_UNREAD_TOKENS * len(leaves)
        # And it still serves.
        assert await clients.stay(stays[0], began(), []) == alone[0]


def began() -> Progress:
    """For a visit alone: its moment has come."""
    return Progress(LAST_START)


async def until_idle(fleet: Fleet) -> None:
    """Returns when a scrape of all services says that nobody is served, which must be soon."""
    left: dict[tuple[str, str], float] = {}
    try:
        async with asyncio.timeout(SCRAPE_INTERVAL_S):
            while left := {gauge: value for gauge, value in (await gauges(fleet)).items() if value}:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"still not 0: {left}")


async def tokens_made(fleet: Fleet) -> float:
    """Tokens that became final since the fleet was started."""
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{fleet.addresses.http}/metrics")
    return sums(response.text)["paceline_generation_tokens_total"]


async def gauges(fleet: Fleet) -> dict[tuple[str, str], float]:
    """All GAUGES by service and name, scraped at once."""
    urls = {**fleet.addresses.metrics, "gateway over HTTP": f"{fleet.addresses.http}/metrics"}
    async with httpx.AsyncClient() as client:
        responses = await asyncio.gather(*[client.get(url) for url in urls.values()])
    told = {name: sums(response.raise_for_status().text) for name, response in zip(urls, responses, strict=True)}
    wanted = {**GAUGES, "gateway over HTTP": GAUGES["gateway"]}
    return {(service, name): told[service][name] for service, names in wanted.items() for name in names}


def sums(scraped: str) -> dict[str, float]:
    """Sums of samples by name."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(scraped):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values
