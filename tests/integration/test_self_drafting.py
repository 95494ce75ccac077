"""A verifier that drafts by itself, behind its wire: next blocks, replay, metrics, and loading from settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from paceline_verifier.load import load_replica
from paceline_verifier.settings import VerifierSettings

from paceline.drafting.ngram import NgramMethod
from paceline.drafting.self_drafting import SelfDrafting
from paceline.engine.target import TargetEngine
from paceline.errors import ConfigurationError
from paceline.messages import Opened, Verified
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.tiny_models import write_model
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.replicas import Writer, verifier_replica
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.test_self_draft_build import TARGET

CYCLE = (3, 5, 7)
PROMPT = [3, 5, 7, 3, 5, 7, 3]


class NgramEngine(TargetEngine):
    """Drafts by itself with ngram."""

    def __init__(self, runner: ToyRunner, **arguments: Any) -> None:
        super().__init__(runner, self_drafter=SelfDrafting(NgramMethod()), **arguments)


async def test_the_next_block_comes_with_the_verdict_is_replayed_with_it_and_counted() -> None:
    async with (
        verifier_replica(ToyRunner(cycle_law(CYCLE)), engine_class=NgramEngine) as replica,
        replica.connect() as link,
    ):
        writer = Writer.start("s", PROMPT)
        await link.ask(writer.open(), Opened)
        first = replace(writer.verify(), next_depth=4)
        verdict = await link.ask(first, Verified)
        assert (verdict.tokens, verdict.next_block) == ((5,), DraftTree.chain([7, 3, 5, 7]))
        assert (verdict.next_method, len(verdict.next_confidences)) == ("ngram", 4)
        assert 0 <= verdict.timing.draft_us <= verdict.timing.total_us
        assert await link.ask(first, Verified) == verdict
        writer.log.extend(verdict.tokens)
        second = await link.ask(writer.verify(verdict.next_block), Verified)
        assert len(second.accepted_path) == 4
        assert second.next_block == EMPTY_BLOCK, "it was not asked for"
        counted = replica.actor.meter.registry.get_sample_value
        assert counted("paceline_self_draft_num_drafts_total") == 1
        assert counted("paceline_self_draft_num_draft_tokens_total") == 4
        assert counted("paceline_self_draft_failures_total") == 0
        assert (counted("paceline_self_draft_seconds_total") or 0) > 0


def make_settings(target: Path, **changes: Any) -> VerifierSettings:
    return VerifierSettings(model=str(target), kv_cache_bytes=1 << 20, self_draft_kv_bytes=1 << 20, **changes)


def test_a_verifier_with_a_head_says_what_it_is_and_takes(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", TARGET)
    head = samples.eagle31().write(tmp_path / "head")
    plain = load_replica(make_settings(target)).info
    assert (plain.methods, plain.drafting_bytes) == ((), 0)
    drafting = load_replica(make_settings(target, self_draft_method="eagle3", self_draft_model=str(head))).info
    assert drafting.methods == ("eagle3",)
    weights_bytes = drafting.weights_bytes - plain.weights_bytes
    kv_bytes = drafting.kv_bytes - plain.kv_bytes
    assert weights_bytes > 4 * 3 * samples.HIDDEN * samples.HIDDEN
    assert kv_bytes == pytest.approx(1 << 20, rel=0.01)
    # The features are within the target's rows: a row has 12 layers of keys and values of 4 numbers, and 8 features.
    feature_bytes = drafting.drafting_bytes - weights_bytes - kv_bytes
    assert feature_bytes == pytest.approx((1 << 20) * 8 / (12 * 2 * 4 + 8), rel=0.01)


def test_a_verifier_whose_head_is_not_named_does_not_start(tmp_path: Path) -> None:
    target = write_model(tmp_path, TARGET)
    with pytest.raises(ConfigurationError, match="self_draft_model"):
        load_replica(make_settings(target, self_draft_method="medusa"))
