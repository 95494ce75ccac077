"""What the sessions of one gateway share."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.session.store import SessionStore
from paceline_gateway.effects import Lane
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.plan import Patience
from paceline_gateway.pool import Pool
from paceline_gateway.session_governor import FleetTimes


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one session. Times in seconds.

    Attributes:
        max_buffered_chunks: chunks that may wait for a slow client.
        max_buffered_bytes: their rough size.
        client_stall_s: a client that has not made room in its full buffer for so long is cut off.
        max_generation_s: most time of a generation.
        ack_timeout_s: silence of the store after which the stream goes on without it.
        record_expiry_s: life of a record after the last write.
        repair_s: how long after the end a missing suffix may still be written.
    """

    max_buffered_chunks: int = 256
    max_buffered_bytes: int = 256 * 1024
    client_stall_s: float = 60.0
    max_generation_s: float = 3600.0
    ack_timeout_s: float = 0.05
    record_expiry_s: float = 3600.0
    repair_s: float = 10.0


@dataclass(frozen=True, slots=True)
class SessionServices:
    """What every session works with.

    Attributes:
        owner: name of this gateway process, unique for its life.
        verifiers: the verifier pool.
        drafters: the drafter pool.
        store: records of sessions.
        patience: how long a session waits for what.
        limits: its bounds.
        metrics: where it tells what it has counted.
        times: what rounds and drafts cost on each replica.
    """

    owner: str
    verifiers: Pool
    drafters: Pool
    store: SessionStore
    patience: Patience
    limits: SessionLimits
    metrics: GatewayMetrics
    times: FleetTimes = field(default_factory=FleetTimes)

    def pool(self, lane: Lane) -> Pool:
        """The pool of a lane."""
        return self.verifiers if lane is Lane.VERIFIER else self.drafters
