"""What a scrape sees of a replica: gauges read from the actor at that moment, so that they never drift.

A scrape runs in a thread of its own while the actor works: everything read here is one number or a frozen value, or
guarded by its owner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import Metric
from prometheus_client.registry import Collector

from paceline.messages import ModelInfo
from paceline.runtime.replica_actor import ReplicaActor
from paceline.runtime.telemetry import WithLabels, gauge


class ReplicaCollector(Collector):
    """Metrics of one loaded replica.

    Args:
        actor: the owner of the model.
        info: what it serves; gives the labels.
        num_streams: streams that are open.
    """

    def __init__(self, actor: ReplicaActor[Any, Any, Any], info: ModelInfo, num_streams: Callable[[], int]) -> None:
        self._actor = actor
        self._info = info
        self._num_streams = num_streams
        self._labels = {"model_name": info.model}
        if info.methods:
            self._labels["method"] = "+".join(info.methods)

    def collect(self) -> Iterator[Metric]:
        """The metrics now."""
        for name, meaning, value in self._gauges():
            yield gauge(f"paceline_{name}", meaning, [(self._labels, value)])
        yield from WithLabels(self._actor.meter.registry, self._labels).collect()

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        actor, info, meter = self._actor, self._info, self._actor.meter
        usage = actor.kv_usage()
        yield "num_requests_running", "Sessions with work in the engine.", actor.num_working
        yield "num_requests_waiting", "Commands that wait for the running pass, or for room.", actor.num_waiting
        yield "sessions", "Sessions that are open.", actor.num_sessions
        yield "max_sessions", "Sessions that may be open at once.", info.max_sessions
        yield "open_streams", "Streams of gateways that are open.", self._num_streams()
        yield "kv_cache_usage_perc", "Share of the room for key/value rows that is taken, 0 to 1.", usage.share
        yield "kv_tokens_in_use", "Room for key/value rows that is taken, in tokens.", usage.used_tokens
        yield "kv_tokens_capacity", "Room for key/value rows, in tokens.", usage.capacity_tokens
        yield "weights_bytes", "Memory of the weights.", info.weights_bytes
        yield "kv_bytes", "Memory reserved for key/value rows.", info.kv_bytes
        yield "utilization", "Share of the last 15 s in which a pass ran.", meter.utilization()
        yield "queue_time_recent_seconds", "Mean queue time of commands answered in 15 s.", meter.mean_queue_s()
