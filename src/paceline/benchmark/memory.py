"""What drafting costs in memory, from the metrics of the replicas of a fleet.

Services reserve as much room for key/value rows as they are told. What tells methods apart is what a token of context
costs, so room is given for `ROOM_TOKENS` tokens: key/value rows, and hidden states beside those of the target.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from paceline.cli.fleet import FleetAddresses

ROOM_TOKENS = 2048
_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Memory of one replica.

    Attributes:
        weights_bytes: of the weights.
        kv_bytes: reserved for key/value rows, and hidden states beside them.
        capacity_tokens: tokens of context for which there is room; 0 where nothing is kept.
    """

    weights_bytes: float = 0.0
    kv_bytes: float = 0.0
    capacity_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class FleetMemory:
    """Memory of a fleet of one verifier and at most one drafter.

    Attributes:
        verifier: the target, and what it drafts with.
        drafter: what drafts beside it; zeros for nobody.
    """

    verifier: ReplicaMemory = ReplicaMemory()
    drafter: ReplicaMemory = ReplicaMemory()


@dataclass(frozen=True, slots=True)
class ExtraMemory:
    """What drafting takes beside the target.

    Attributes:
        weights_mb: weights, in 10^6 bytes.
        kv_mb: the rest for `ROOM_TOKENS` tokens of context, in 10^6 bytes.
    """

    weights_mb: float = 0.0
    kv_mb: float = 0.0


def read_memory(addresses: FleetAddresses) -> FleetMemory:
    """Reads the metrics of the first verifier and the first drafter.

    Raises:
        OSError: a replica does not answer.
    """
    found = {}
    for name, url in addresses.metrics.items():
        kind = name.partition(" ")[0]
        if kind not in found:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - our own replica
                found[kind] = replica_memory(answer.read().decode())
    return FleetMemory(found.get("verifier", ReplicaMemory()), found.get("drafter", ReplicaMemory()))


def replica_memory(metrics: str) -> ReplicaMemory:
    """What a replica's metrics say of its memory."""
    values: Mapping[str, float] = {
        sample.name: sample.value for family in text_string_to_metric_families(metrics) for sample in family.samples
    }
    return ReplicaMemory(
        weights_bytes=values.get("paceline_weights_bytes", 0.0),
        kv_bytes=values.get("paceline_kv_bytes", 0.0),
        capacity_tokens=values.get("paceline_kv_tokens_capacity", 0.0),
    )


def extra_memory(fleet: FleetMemory, plain: FleetMemory, *, head_row_bytes: int = 0) -> ExtraMemory:
    """What a fleet takes beside its target.

    Args:
        fleet: with drafting.
        plain: the same target without, with as much memory reserved for its rows.
        head_row_bytes: of a row of the head with which the verifier drafts; it has its own pool.
    """
    target_room = _room(replace(fleet.verifier, kv_bytes=plain.verifier.kv_bytes))
    rows = target_room - _room(plain.verifier) + ROOM_TOKENS * head_row_bytes + _room(fleet.drafter)
    weights = fleet.verifier.weights_bytes - plain.verifier.weights_bytes + fleet.drafter.weights_bytes
    return ExtraMemory(weights / 1e6, rows / 1e6)


def head_row_bytes(head: Path) -> int:
    """Bytes of a float32 row of keys and values in an EAGLE head; 0 for what has no attention.

    Args:
        head: folder of its checkpoint.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    layer = config.get("transformer_layer_config", config)
    num_heads = layer.get("num_attention_heads")
    if not num_heads:
        return 0
    head_dim = layer.get("head_dim") or layer["hidden_size"] // num_heads
    return 2 * 4 * int(layer.get("num_key_value_heads") or num_heads) * int(head_dim)


def _room(replica: ReplicaMemory) -> float:
    """Bytes for the context of `ROOM_TOKENS` tokens."""
    return ROOM_TOKENS * replica.kv_bytes / replica.capacity_tokens if replica.capacity_tokens else 0.0
