"""A session's record as Redis holds it: a hash of short texts, and the tokens packed apart from it.

Fields that are not known are ignored and those that are missing take their defaults, so that gateways of neighbouring
versions can read one another's records.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from paceline.errors import DataLoss
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.session.store import Positions, SessionRecord, SessionState
from paceline.text.request import SpeculationOptions

BYTES_PER_TOKEN = 4


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Tokens as little-endian int32."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """The tokens of `pack_tokens`."""
    return struct.unpack(f"<{len(packed) // BYTES_PER_TOKEN}i", packed)


def position_fields(positions: Positions) -> dict[str, str]:
    """The hash fields that change with every append."""
    return {
        "verifier": positions.verifier,
        "verifier_kv_len": str(positions.verifier_kv_len),
        "drafter": positions.drafter,
        "drafter_kv_len": str(positions.drafter_kv_len),
        "acceptance_ewma": repr(positions.acceptance_ewma),
        "weights_digest": positions.weights_digest,
    }


def record_fields(record: SessionRecord) -> dict[str, str]:
    """All hash fields of a record; its tokens are kept apart."""
    return {
        "epoch": str(record.epoch),
        "owner": record.owner,
        "tenant": record.tenant,
        "state": record.state.value,
        "model": record.model,
        "seed": str(record.sampling.seed),
        "sampling": json.dumps(asdict(record.sampling), separators=(",", ":")),
        "rule": record.rule.value,
        "generation_start": str(record.generation_start),
        "committed_len": str(record.committed_len),
        "finish_reason": record.finish_reason,
        "max_tokens": "" if record.max_tokens is None else str(record.max_tokens),
        "stop": json.dumps(record.stop),
        "speculation": json.dumps(asdict(record.speculation), separators=(",", ":")),
        **position_fields(record.positions),
    }


def record_from_fields(session: str, raw: Mapping[bytes, bytes], packed_tokens: bytes) -> SessionRecord | None:
    """The record of a hash and its tokens; None when either is missing or they do not fit together.

    Raises:
        DataLoss: a field does not hold what it should.
    """
    values = {name.decode(): value.decode() for name, value in raw.items()}
    try:
        if "epoch" not in values or len(packed_tokens) != BYTES_PER_TOKEN * int(values["committed_len"]):
            return None
        return SessionRecord(
            session=session,
            epoch=int(values["epoch"]),
            owner=values["owner"],
            tenant=values["tenant"],
            state=SessionState(values["state"]),
            model=values["model"],
            sampling=_sampling(json.loads(values["sampling"])),
            rule=AcceptanceRule(values["rule"]),
            generation_start=int(values["generation_start"]),
            tokens=unpack_tokens(packed_tokens),
            positions=Positions(
                verifier=values.get("verifier", ""),
                verifier_kv_len=int(values.get("verifier_kv_len", 0)),
                drafter=values.get("drafter", ""),
                drafter_kv_len=int(values.get("drafter_kv_len", 0)),
                acceptance_ewma=float(values.get("acceptance_ewma", 0.0)),
                weights_digest=values.get("weights_digest", ""),
            ),
            finish_reason=values.get("finish_reason", ""),
            max_tokens=int(values["max_tokens"]) if values.get("max_tokens") else None,
            stop=tuple(json.loads(values.get("stop", "[]"))),
            speculation=SpeculationOptions(**_known(SpeculationOptions, json.loads(values.get("speculation", "{}")))),
        )
    except (KeyError, ValueError, TypeError) as error:
        raise DataLoss(f"the record of session {session!r} cannot be read: {error!r}", field="session") from error


def _sampling(values: dict[str, Any]) -> SamplingParams:
    kept = _known(SamplingParams, values)
    if "logit_bias" in kept:
        kept["logit_bias"] = {int(token_id): float(bias) for token_id, bias in kept["logit_bias"].items()}
    if "stop_token_ids" in kept:
        kept["stop_token_ids"] = tuple(kept["stop_token_ids"])
    return SamplingParams(**kept)


def _known(kind: type[SamplingParams | SpeculationOptions], values: dict[str, Any]) -> dict[str, Any]:
    """The values that the dataclass has a field for."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
