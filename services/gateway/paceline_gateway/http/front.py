"""What the HTTP server knows of the gateway behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from paceline.session.store import SessionStore
from paceline_gateway.api_keys import ApiKeys
from paceline_gateway.door import Door
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.pool_snapshot import PoolSnapshot
from paceline_gateway.sessions import Sessions


@dataclass(frozen=True, slots=True)
class FrontLimits:
    """Bounds of one HTTP request.

    Attributes:
        max_body_bytes: largest body.
        max_choices: most completions: prompts times `n`.
        stall_s: a client that takes nothing, or stops in its body, for so long is cut off, in seconds.
    """

    max_body_bytes: int
    max_choices: int
    stall_s: float


@dataclass(frozen=True, slots=True)
class Front:
    """The gateway as its HTTP server sees it.

    Attributes:
        door: where generations are started; raises `Unavailable` while the gateway starts.
        keys: who may ask.
        verifiers: the verifier pool now; None while the gateway starts.
        drafters: the drafter pool now; None while the gateway starts.
        sessions: all running generations.
        store: records of sessions.
        registry: the gateway's metrics, as a scrape reads them.
        metrics: the part of them that doors count.
        limits: bounds of one request.
    """

    door: Callable[[], Door]
    keys: ApiKeys
    verifiers: Callable[[], PoolSnapshot | None]
    drafters: Callable[[], PoolSnapshot | None]
    sessions: Sessions
    store: SessionStore
    registry: CollectorRegistry
    metrics: GatewayMetrics
    limits: FrontLimits
