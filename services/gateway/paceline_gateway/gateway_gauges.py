"""The gateway's gauges, read at the moment of the scrape from whoever knows: they cannot drift, and go back to zero.

A scrape may run in a thread of its own while the gateway works: what is read here is a number, a frozen snapshot, or a
table that is copied first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.registry import Collector

from paceline.runtime.telemetry import counter, gauge
from paceline_gateway.breaker import BreakerState, FailureCause
from paceline_gateway.effects import Lane
from paceline_gateway.pool import Pool
from paceline_gateway.session_actor import SessionActor
from paceline_gateway.sessions import Sessions


class GatewayGauges(Collector):
    """Gauges of one gateway that serves.

    Args:
        model: name of the served model, their label.
        sessions: all generations.
        pools: by lane.
        num_preparing: requests that are admitted and not started yet.
    """

    def __init__(
        self, model: str, sessions: Sessions, pools: dict[Lane, Pool], num_preparing: Callable[[], int]
    ) -> None:
        self._labels = {"model_name": model}
        self._sessions = sessions
        self._pools = pools
        self._num_preparing = num_preparing

    def collect(self) -> Iterator[Metric]:
        """The gauges now."""
        actors = self._sessions.actors
        waiting = self._num_preparing() + sum(actor.waiting for actor in actors)
        running = sum(actor.running for actor in actors)
        undurable = sum(actor.undurable for actor in actors)
        yield self._one("num_requests_running", "Requests whose rounds run.", running)
        yield self._one("num_requests_waiting", "Requests whose first round has not been sent.", waiting)
        yield self._one("open_streams", "Streams of clients that are open.", self._sessions.num_running)
        yield self._one("undurable_sessions", "Sessions that go on although the store does not answer.", undurable)
        yield self._replicas()
        yield from self._breakers()
        yield self._attached(actors)
        yield self._drafter_memory()

    def _one(self, name: str, meaning: str, value: float) -> Metric:
        return gauge(f"paceline_{name}", meaning, [(self._labels, value)])

    def _replicas(self) -> Metric:
        counts: list[tuple[dict[str, str], float]] = []
        for lane, pool in self._pools.items():
            now = pool.snapshot
            states = {"ready": len(now.ready), "draining": len(now.draining), "down": len(now.troubles)}
            counts += [({**self._labels, "pool": lane.value, "state": state}, count) for state, count in states.items()]
        return gauge("paceline_replicas", "Replicas of a pool, as this gateway sees them.", counts)

    def _breakers(self) -> Iterator[Metric]:
        states: list[tuple[dict[str, str], float]] = []
        failures: list[tuple[dict[str, str], float]] = []
        openings: list[tuple[dict[str, str], float]] = []
        for lane, pool in self._pools.items():
            labels = {**self._labels, "pool": lane.value}
            now = pool.breakers
            states += [({**labels, "state": state.value}, now[state]) for state in BreakerState]
            failures += [({**labels, "cause": cause.value}, pool.failures[cause]) for cause in FailureCause]
            openings.append((labels, pool.num_openings))
        yield gauge("paceline_replica_breakers", "Replicas of a pool, by where their circuit breakers stand.", states)
        yield counter("paceline_replica_failures", "What replicas of a pool have failed at.", failures)
        yield counter("paceline_replica_breaker_openings", "Times that a circuit breaker of a pool opened.", openings)

    def _attached(self, actors: tuple[SessionActor, ...]) -> Metric:
        counts = [
            ({**self._labels, "pool": lane.value}, sum(actor.attached(lane) for actor in actors)) for lane in Lane
        ]
        return gauge("paceline_pool_sessions", "Sessions of this gateway that are attached to a replica.", counts)

    def _drafter_memory(self) -> Metric:
        bytes_of: Counter[str] = Counter()
        for replica in self._pools[Lane.DRAFTER].snapshot.ready:
            bytes_of["+".join(replica.info.methods)] += replica.memory_bytes
        for replica in self._pools[Lane.VERIFIER].snapshot.ready:
            if replica.drafts_by(""):
                bytes_of["+".join(replica.info.methods)] += replica.info.drafting_bytes
        values = [({**self._labels, "method": method}, total) for method, total in bytes_of.items()]
        return gauge(
            "paceline_drafter_memory_bytes", "What drafting costs in memory: weights and key/value rows.", values
        )
