"""The metrics of a whole fleet: they agree with the answers, go back to zero, and are what docs/metrics.md says."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidArgument, NotFound, PacelineError, Unavailable
from paceline.generation import Chunk
from paceline.messages import SamplingParams
from paceline.runtime.telemetry import metrics_endpoint
from tests.fakes.scripted_drafter import ScriptedDrafter, wrong_at
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet, Run, generate, target_law, until
from tests.integration.paced import streaming
from tests.integration.scraping import Scrape, read, scrape

LAW = hash_law(VOCAB, seed=8)
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
ZERO_AT_REST = {
    "gateway": (
        "num_requests_running",
        "num_requests_waiting",
        "open_streams",
        "pool_sessions",
        "undurable_sessions",
    ),
    "replica": (
        "num_requests_running",
        "num_requests_waiting",
        "sessions",
        "kv_tokens_in_use",
        "kv_cache_usage_perc",
    ),
}


def half_right() -> ScriptedDrafter:
    return ScriptedDrafter(wrong_at(target_law(LAW), 2, VOCAB))


@contextlib.asynccontextmanager
async def ended_generations(caplog: pytest.LogCaptureFixture) -> AsyncIterator[list[logging.LogRecord]]:
    """What the gateway logs of each generation when it has ended, however it did: another count of the same things."""
    caplog.set_level(logging.INFO, "paceline_gateway.generation_log")
    found: list[logging.LogRecord] = []
    yield found
    found += [record for record in caplog.records if record.message == "generation ended"]


async def leave_after(fleet: Fleet, num_tokens: int) -> None:
    """A client that goes away in the middle."""
    async with fleet.client() as client:
        got = 0
        events = client.generate(fleet.request([5, 6, 7], max_tokens=200, sampling=ENDLESS))
        async with contextlib.aclosing(events) as stream:
            async for event in stream:
                got += len(event.token_ids) if isinstance(event, Chunk) else 0
                if got >= num_tokens:
                    return


async def refused(fleet: Fleet, expected: type[PacelineError], *args: Any, **fields: Any) -> None:
    async with fleet.client() as client:
        with pytest.raises(expected):
            await generate(client, fleet.request(*args, **fields))


async def test_the_metrics_agree_with_the_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Fleet.start(tmp_path, LAW, method=half_right) as fleet, fleet.client() as client:
        async with ended_generations(caplog) as ended:
            requests = [
                fleet.request([1, 2, index], max_tokens=10 + index, num_speculative_tokens=index % 5, sampling=ENDLESS)
                for index in range(12)
            ]
            left = [leave_after(fleet, 3 * count) for count in range(4)]
            answers = asyncio.gather(*(generate(client, request) for request in requests))
            await asyncio.gather(answers, *left)
            await refused(fleet, InvalidArgument, [1, VOCAB + 7])
            await refused(fleet, NotFound, [1], model="another")
            await fleet.quiet()
        seen = await scrape(fleet.gateway.registry)
        runs: list[Run] = answers.result()
        replicas = [await scrape(node.alive.service.registry) for node in fleet.nodes]

    def logged(field: str) -> int:
        return sum(getattr(record, field) for record in ended)

    def total(name: str, **labels: str) -> float:
        return seen.sum(f"paceline_{name}", **labels)

    # Requests: each ended once, one way or another.
    assert total("request_success_total") == len(runs) == 12
    assert total("request_failure_total", code="cancelled") == len(ended) - 12 == 4
    assert total("request_refused_total", code="invalid_argument") == 1
    assert total("request_refused_total", code="not_found") == 1
    # All that ended, by the log; those that were answered, by their evidence.
    assert total("generation_tokens_total") == logged("completion_tokens")
    assert total("target_passes_total") == logged("target_passes")
    assert total("prompt_tokens_total") == sum(each.prompt_tokens for each in ended if each.target_passes)  # type: ignore[attr-defined]
    assert total("spec_decode_num_draft_tokens_total") == logged("draft_tokens")
    assert total("spec_decode_num_accepted_tokens_total") == logged("accepted_tokens")
    assert total("spec_decode_num_accepted_tokens_per_pos_total") == logged("accepted_tokens")
    evidence = [run.evidence for run in runs]
    assert total("tokens_per_target_pass_sum") == pytest.approx(sum(each.tokens_per_target_pass for each in evidence))
    assert total("e2e_request_latency_seconds_sum") == pytest.approx(sum(each.total_ms for each in evidence) / 1e3)
    assert total("goodput_tokens_per_second_count") == 12
    # Per token, not per round: every token but each request's first.
    began = total("time_to_first_token_seconds_count")
    assert total("inter_token_latency_seconds_count") == logged("completion_tokens") - began
    assert total("spec_decode_num_accepted_tokens_total") > 0
    # What the replicas counted is no less: they also did what nobody waited for in the end.
    assert replicas[0].sum("paceline_verified_tokens_total") >= logged("completion_tokens")
    assert replicas[0].sum("paceline_passes_total", outcome="ok") > 0
    assert replicas[1].sum("paceline_draft_tokens_total") >= logged("draft_tokens")
    assert replicas[1].sum("paceline_drafts_total", method="scripted") > 0


async def test_phases_of_rounds_add_up_to_the_evidence(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=half_right) as fleet, fleet.client() as client:
        requests = [fleet.request([1, 2, index], max_tokens=24, sampling=ENDLESS) for index in range(6)]
        runs = await asyncio.gather(*(generate(client, request) for request in requests))
        seen = await scrape(fleet.gateway.registry)

    def phases(*names: str) -> float:
        return sum(seen.sum("paceline_round_seconds_sum", phase=name) for name in names) * 1e3

    evidence = [run.evidence for run in runs]
    assert phases("draft") == pytest.approx(sum(each.draft_ms for each in evidence))
    assert phases("verify") == pytest.approx(sum(each.verify_ms for each in evidence))
    assert phases("draft_wait") == pytest.approx(sum(each.draft_wait_ms for each in evidence))
    assert phases("draft_queue", "verify_queue") == pytest.approx(sum(each.queue_ms for each in evidence))
    assert phases("draft_wire", "verify_wire") == pytest.approx(sum(each.wire_ms for each in evidence))
    assert seen.sum("paceline_round_seconds_count", phase="verify") == sum(each.target_passes for each in evidence)
    assert seen.sum("paceline_spec_decode_num_wasted_tokens_total") == sum(e.wasted_draft_tokens for e in evidence)
    assert seen.sum("paceline_spec_decode_num_ahead_hits_total") == sum(each.ahead_hits for each in evidence)
    assert seen.sum("paceline_drafter_memory_bytes", method="scripted") == evidence[0].drafter_memory_bytes > 0


async def test_gauges_show_what_runs(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        await stream.tokens(5)
        gateway = await scrape(fleet.gateway.registry)
        verifier, drafter = [await scrape(node.alive.service.registry) for node in fleet.nodes]
        assert gateway.sum("paceline_num_requests_running") == gateway.sum("paceline_open_streams") == 1
        assert gateway.sum("paceline_num_requests_waiting") == 0
        for pool in ("verifier", "drafter"):
            assert gateway.sum("paceline_pool_sessions", pool=pool) == 1
            assert gateway.sum("paceline_replicas", pool=pool, state="ready") == 1
            assert gateway.sum("paceline_replicas", pool=pool, state="down") == 0
        assert verifier.sum("paceline_num_requests_running") == 1  # a pass has begun and waits for the test
        assert verifier.sum("paceline_sessions") == drafter.sum("paceline_sessions") == 1
        assert verifier.sum("paceline_open_streams") == 1
        used, room = verifier.sum("paceline_kv_tokens_in_use"), verifier.sum("paceline_kv_tokens_capacity")
        assert 0 < used <= room
        assert verifier.sum("paceline_kv_cache_usage_perc") == pytest.approx(used / room)
        assert verifier.sum("paceline_utilization") > 0
        assert drafter.sum("paceline_weights_bytes") == 1000
        await stream.rest()


async def test_a_request_without_a_verifier_waits_and_a_lost_replica_is_down(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW) as fleet, fleet.client() as client:
        await fleet.verifiers[0].kill()
        await until(lambda: not fleet.verifier_pool.snapshot.ready)
        running = asyncio.create_task(generate(client, fleet.request([1, 2], max_tokens=5, sampling=ENDLESS)))
        await until(lambda: fleet.gateway.sessions.num_running == 1)
        seen = await scrape(fleet.gateway.registry)
        assert seen.sum("paceline_num_requests_waiting") == 1
        assert seen.sum("paceline_num_requests_running") == 0
        assert seen.sum("paceline_replicas", pool="verifier", state="down") == 1
        await fleet.verifiers[0].boot()
        await running


async def test_after_a_storm_every_gauge_is_zero_in_one_scrape(tmp_path: Path) -> None:
    """32 clients, half of whom leave at random moments, and scrapes from other threads all the while."""
    dice = random.Random(3)
    registries = {}
    async with contextlib.AsyncExitStack() as stack:
        fleet = await stack.enter_async_context(Fleet.start(tmp_path, LAW, method=half_right, num_verifiers=2))
        client = await stack.enter_async_context(fleet.client())
        registries = {"gateway": fleet.gateway.registry}
        registries |= {node.address: node.alive.service.registry for node in fleet.nodes}
        addresses = [
            await stack.enter_async_context(metrics_endpoint(registry, "127.0.0.1", 0))
            for registry in registries.values()
        ]
        over = asyncio.Event()

        async def keep_scraping() -> int:
            count = 0
            while not over.is_set():
                for address in addresses:
                    await asyncio.to_thread(read, address)
                    count += 1
            return count

        scraping = asyncio.create_task(keep_scraping())
        staying = [
            generate(client, fleet.request([1, 2, index], max_tokens=dice.randint(1, 60), sampling=ENDLESS))
            for index in range(16)
        ]
        await asyncio.gather(*staying, *(leave_after(fleet, dice.randint(0, 50)) for _ in range(16)))
        await fleet.quiet()
        over.set()
        assert await scraping > len(addresses)
        gateway, *replicas = [await asyncio.to_thread(read, address) for address in addresses]
    for name in ZERO_AT_REST["gateway"]:
        assert gateway.sum(f"paceline_{name}") == 0, name
    for replica in replicas:
        for name in ZERO_AT_REST["replica"]:
            assert replica.sum(f"paceline_{name}") == 0, name
    assert gateway.sum("paceline_request_success_total") == 16
    assert gateway.sum("paceline_request_failure_total", code="cancelled") <= 16


# --- the document ---------------------------------------------------------------------------------------------------

Row = tuple[str, str, str, frozenset[str]]
"""Service, name, type, labels."""


def documented() -> set[Row]:
    rows = set()
    for line in DOCUMENT.read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 5 or not cells[0].startswith("`paceline_"):
            continue
        name, kind, labels, services, meaning = cells
        assert meaning.endswith("."), line
        for service in services.split(", "):
            row = (service, name.strip("`"), kind, frozenset(labels.split(", ")))
            assert row not in rows, f"twice: {row}"
            rows.add(row)
    return rows


def shown(service: str, seen: Scrape) -> set[Row]:
    rows = set()
    for family in seen.families.values():
        if not family.name.startswith("paceline_"):
            assert family.name.startswith(("process_", "python_")), family.name
            continue
        assert family.samples, f"{family.name} has no series: the test must bring it about"
        labels = frozenset().union(*(sample.labels.keys() for sample in family.samples)) - {"le"}
        name = f"{family.name}_total" if family.type == "counter" else family.name
        rows.add((service, name, family.type, labels))
    return rows


async def test_the_document_tells_every_metric_and_no_other(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, method=half_right) as fleet, fleet.client() as client:
        await generate(client, fleet.request([1, 2, 3], max_tokens=12, sampling=ENDLESS))
        await leave_after(fleet, 2)
        fleet.gateway.metrics.store_failed(Unavailable("no store"))
        await fleet.quiet()
        rows = shown("gateway", await scrape(fleet.gateway.registry))
        for service, node in (("verifier", fleet.verifiers[0]), ("drafter", fleet.drafters[0])):
            rows |= shown(service, await scrape(node.alive.service.registry))
    assert rows == documented()


def test_names_end_as_prometheus_wants() -> None:
    units = ("_seconds", "_bytes", "_tokens_per_second")
    for _, name, kind, _ in documented():
        assert re.fullmatch(r"paceline_[a-z][a-z0-9_]*", name)
        assert name.endswith("_total") == (kind == "counter"), name
        assert not re.search(r"_(ms|us|millis\w*|kb|mb|percent|count|sum|bucket)(_|$)", name), name
        if "time" in name or "latency" in name or "duration" in name:
            assert name.endswith(units), name


def test_every_question_of_the_document_asks_for_metrics_that_exist() -> None:
    names = {name for _, name, _, _ in documented()}
    histograms = {name for _, name, kind, _ in documented() if kind == "histogram"}
    known = names | {f"{name}_{part}" for name in histograms for part in ("bucket", "sum", "count")}
    blocks = re.findall(r"^```promql\n(.*?)^```", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    for block in blocks:
        asked = set(re.findall(r"paceline_\w+", block))
        assert asked
        assert asked <= known - (histograms & asked)
        assert block.count("(") == block.count(")")
