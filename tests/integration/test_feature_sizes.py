"""How many rows of features travel over real gRPC: one with each draft of Medusa, each row once for EAGLE."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from paceline_drafter.feature_store import FeatureStore

from paceline.engine.served_features import ServedFeatures
from paceline.messages import Features, Verify
from tests.integration.fleet import generate
from tests.integration.test_features import HOT, LONG, in_the_pool, started


@dataclass
class Travelled:
    """The rows that each message brought.

    Attributes:
        with_verdicts: from the verifier to the gateway, with the length that was judged.
        with_drafts: from the gateway to the drafter.
    """

    with_verdicts: list[tuple[int, range]] = field(default_factory=list)
    with_drafts: list[range] = field(default_factory=list)


@pytest.fixture
def travelled(monkeypatch: pytest.MonkeyPatch) -> Travelled:
    seen = Travelled()
    along, add = ServedFeatures.along, FeatureStore.add

    def sent(served: ServedFeatures, command: Verify, *rest: Any) -> Features | None:
        features = along(served, command, *rest)
        if features is not None:
            seen.with_verdicts.append((command.base_len, range(features.first_row, features.end)))
        return features

    def arrived(store: FeatureStore, session: str, features: Features, **rest: Any) -> Any:
        seen.with_drafts.append(range(features.first_row, features.end))
        return add(store, session, features, **rest)

    monkeypatch.setattr(ServedFeatures, "along", sent)
    monkeypatch.setattr(FeatureStore, "add", arrived)
    return seen


@pytest.mark.parametrize("method", ["medusa", "eagle"])
async def test_no_row_travels_that_the_method_does_not_read(tmp_path: Path, method: str, travelled: Travelled) -> None:
    async with started(in_the_pool(tmp_path, method)) as fleet, fleet.client() as client:
        plain = await generate(client, fleet.request(LONG, sampling=HOT, seed=11, num_speculative_tokens=0))
        run = await generate(client, fleet.request(LONG, sampling=HOT, seed=11))
    assert run.tokens == plain.tokens
    assert run.evidence.accepted_tokens > 0
    (first_len, first), *later = travelled.with_verdicts
    assert first_len == len(LONG)
    if method == "medusa":
        assert first == range(len(LONG) - 1, len(LONG))
        assert all(rows.start == base_len - 1 for base_len, rows in later)
        assert {len(rows) for rows in travelled.with_drafts} == {1}
    else:
        assert first == range(len(LONG))
        starts, stops = zip(*[(rows.start, rows.stop) for rows in travelled.with_drafts], strict=True)
        assert starts == (0, *stops[:-1])
