"""Prometheus metrics of a service: its own registry, and the endpoint `/metrics` that serves it.

Each service has a registry of its own, never the library's global one, so that several services can live in one
process. What a metric means is in docs/metrics.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import platform
import socket
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.registry import Collector

from paceline import __version__
from paceline.errors import ConfigurationError


def new_registry(service: str) -> CollectorRegistry:
    """A registry that tells already what runs, and what the process and its garbage collector use.

    Args:
        service: gateway, verifier or drafter.
    """
    # A time of creation per series would double what is scraped, for what Prometheus can do without.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    build = Info("paceline_build", "What runs here: always 1.", registry=registry)
    build.info({"service": service, "version": __version__, "python_version": platform.python_version()})
    return registry


@contextlib.asynccontextmanager
async def metrics_endpoint(registry: CollectorRegistry, host: str, port: int) -> AsyncIterator[str]:
    """Serves the registry at http://host:port/metrics, from threads of its own, until the block is left.

    Args:
        registry: read at each request.
        host: to listen on.
        port: 0 takes a free one.

    Yields:
        The address, with the port that was taken.

    Raises:
        ConfigurationError: the address cannot be bound.
    """
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise ConfigurationError(
            f"metrics cannot be served on {host}:{port}: {error}; is the port taken?", field="metrics_port"
        ) from error

    def stop() -> None:
        # Wakes the server, which else looks only twice a second whether it is to end. Not every system allows it.
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        server.server_close()
        thread.join()

    try:
        yield f"{host}:{server.server_port}"
    finally:
        await asyncio.to_thread(stop)


class WithLabels(Collector):
    """The metrics of a registry with labels that all its samples share; a sample's own label of that name stays.

    Args:
        registry: what is read at each scrape.
        labels: by name.
    """

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self._registry = registry
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        for metric in self._registry.collect():
            labelled = Metric(metric.name, metric.documentation, metric.type, metric.unit)
            labelled.samples = [sample._replace(labels={**self._labels, **sample.labels}) for sample in metric.samples]
            yield labelled


def gauge(name: str, meaning: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    """A gauge as a scrape finds it: one value for each set of labels."""
    metric = Metric(name, meaning, "gauge")
    for labels, value in values:
        metric.add_sample(name, dict(labels), value)
    return metric


def counter(name: str, meaning: str, values: Iterable[tuple[Mapping[str, str], float]]) -> Metric:
    """The same of a counter; its name without `_total`."""
    metric = Metric(name, meaning, "counter")
    for labels, value in values:
        metric.add_sample(f"{name}_total", dict(labels), value)
    return metric
