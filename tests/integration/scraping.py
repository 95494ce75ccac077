"""What Prometheus would see: the metrics of a service, read over its real endpoint and parsed."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.parser import text_string_to_metric_families

from paceline.runtime.telemetry import metrics_endpoint


class Scrape:
    """One scrape.

    Attributes:
        families: metrics by their names in the text.
    """

    def __init__(self, text: str) -> None:
        self.families: dict[str, Metric] = {family.name: family for family in text_string_to_metric_families(text)}

    def sum(self, sample: str, **labels: str) -> float:
        """Sum over all series of a sample that have these labels; at least one must."""
        found = [value for its_labels, value in self.series(sample) if labels.items() <= its_labels.items()]
        assert found, f"no sample {sample} {labels}"
        return sum(found)

    def series(self, name: str) -> list[tuple[Mapping[str, str], float]]:
        """All series of a sample's name."""
        return [
            (sample.labels, sample.value)
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name
        ]


def read(address: str) -> Scrape:
    """Scrapes once; blocks."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return Scrape(answer.read().decode("utf-8"))


async def scrape(registry: CollectorRegistry) -> Scrape:
    """Scrapes a registry through an endpoint of its own."""
    async with metrics_endpoint(registry, "127.0.0.1", 0) as address:
        return await asyncio.to_thread(read, address)
