"""The counts of the smoke check, with drafts of which it is known how far they are right."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.cli.smoke_acceptance import DepthRecorder, SmokeAcceptance, measure_acceptance
from paceline.engine.features import FeatureTaps
from paceline.engine.self_draft import SelfDraft, SelfDraftJob
from paceline.engine.target import TargetEngine
from paceline.speculation.tree import DraftTree
from tests.fakes.toy_runner import ToyRunner, cycle_law

CYCLE = [3, 5, 7, 11]
WRONG = 60


class Scripted:
    """Drafts `depth` tokens of the cycle, of which the first `right` are right."""

    method = "scripted"
    taps: FeatureTaps | None = None
    weights_bytes = 12
    kv_bytes = 34

    def __init__(self, depth: int, right: int) -> None:
        self._depth = depth
        self._right = right
        self.forgotten: list[str] = []

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        return [SelfDraft(self._block(job)) for job in jobs]

    def _block(self, job: SelfDraftJob) -> DraftTree:
        depth, start = min(self._depth, job.max_depth), len(job.tokens)
        ahead = [CYCLE[(start + index) % len(CYCLE)] for index in range(depth)]
        return DraftTree.chain(ahead[: self._right] + [WRONG] * max(depth - self._right, 0))

    def forget(self, session: str) -> None:
        self.forgotten.append(session)


def measure(drafter: Scripted, *, max_tokens: int = 21, prompts: int = 2) -> SmokeAcceptance:
    recorder = DepthRecorder(drafter)
    engine = TargetEngine(ToyRunner(cycle_law(CYCLE)), self_drafter=recorder)
    found = measure_acceptance(engine, recorder, [tuple(CYCLE)] * prompts, num_draft_tokens=4, max_tokens=max_tokens)
    assert len(set(drafter.forgotten)) == prompts
    assert (recorder.method, recorder.weights_bytes, recorder.kv_bytes, recorder.taps) == ("scripted", 12, 34, None)
    return found


@pytest.mark.parametrize("right", [0, 1, 2, 4])
def test_each_position_is_counted(right: int) -> None:
    found = measure(Scripted(depth=4, right=right))
    assert found.per_position == tuple(float(position < right) for position in range(4))
    assert found.num_tokens == 42
    assert found.tokens_per_pass == pytest.approx({0: 1.0, 1: 2 * 21 / 22, 2: 2 * 21 / 16, 4: 2 * 21 / 10}[right])


def test_positions_that_no_block_reaches_are_left_out() -> None:
    found = measure(Scripted(depth=2, right=1))
    assert found.per_position == (1.0, 0.0)
    assert found.judged[0] == found.judged[1] == found.accepted[0] > 0


def test_a_drafter_that_drafts_nothing() -> None:
    found = measure(Scripted(depth=0, right=0))
    assert found.per_position == ()
    assert found.tokens_per_pass == 1.0


def test_no_prompts() -> None:
    assert measure(Scripted(depth=4, right=4), prompts=0).tokens_per_pass == 0.0
