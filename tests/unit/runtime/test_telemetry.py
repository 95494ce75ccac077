"""The registry of a service and the endpoint that serves it."""

from __future__ import annotations

import asyncio
import platform
import socket
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from paceline import __version__
from paceline.errors import ConfigurationError
from paceline.runtime.telemetry import metrics_endpoint, new_registry

LOCAL = "127.0.0.1"


async def scrape(address: str) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            assert answer.status == 200
            return str(answer.read().decode("utf-8"))

    return await asyncio.to_thread(get)


def test_a_new_registry_tells_what_runs_and_what_it_uses() -> None:
    registry = new_registry("verifier")
    labels = {
        "service": "verifier",
        "version": __version__,
        "python_version": platform.python_version(),
    }
    assert registry.get_sample_value("paceline_build_info", labels) == 1
    assert (registry.get_sample_value("process_resident_memory_bytes") or 0) > 0
    assert registry.get_sample_value("python_gc_collections_total", {"generation": "0"}) is not None


async def test_the_endpoint_serves_what_the_registry_holds_and_leaves_nothing_behind() -> None:
    registry = new_registry("gateway")
    counter = Counter("paceline_laps", "Laps.", registry=registry)
    threads = threading.active_count()
    async with metrics_endpoint(registry, LOCAL, 0) as address:
        counter.inc(3)
        text = await scrape(address)
        assert threading.active_count() > threads
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in families["paceline_laps"].samples] == [3]
    assert families["paceline_laps"].type == "counter"
    assert "_created" not in text
    with pytest.raises(urllib.error.URLError):
        await scrape(address)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a socket that listens cannot be shut down")
async def test_the_endpoint_ends_at_once() -> None:
    began_s = time.monotonic()
    for _ in range(5):
        async with metrics_endpoint(CollectorRegistry(), LOCAL, 0) as address:
            await scrape(address)
    assert time.monotonic() - began_s < 1.0


async def test_an_address_that_cannot_be_bound_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind((LOCAL, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=str(port)) as caught:
            async with metrics_endpoint(CollectorRegistry(), LOCAL, port):
                pass
    assert caught.value.field == "metrics_port"
    with pytest.raises(ConfigurationError):
        async with metrics_endpoint(CollectorRegistry(), "no.such.host.invalid", 0):
            pass
