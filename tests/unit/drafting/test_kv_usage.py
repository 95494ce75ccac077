"""What a drafting method says of the room for its rows."""

from __future__ import annotations

import pytest

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.method import DraftJob, DraftMethod
from paceline.drafting.ngram import NgramMethod
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.kv_usage import HoldsRows, KvUsage
from paceline.messages import SamplingParams
from tests.fakes.toy_runner import ToyRunner, cycle_law


def draft_model() -> DraftModelMethod:
    return DraftModelMethod(TorchDraftRunner(ToyRunner(cycle_law((3, 5, 7)))))


def draft(method: DraftMethod, session: str, context: range) -> None:
    method.open(session)
    method.advance([DraftJob(session, tuple(context), 1, SamplingParams(temperature=0.0))])


@pytest.mark.parametrize("chained", [False, True])
def test_pages_of_a_draft_models_sessions(chained: bool) -> None:
    method: DraftMethod = FallbackMethod([NgramMethod(), draft_model()]) if chained else draft_model()
    assert isinstance(method, HoldsRows)
    empty = method.kv_usage()
    assert empty.used_tokens == 0 < empty.capacity_tokens
    draft(method, "a", range(9))
    one = method.kv_usage()
    assert 9 <= one.used_tokens < empty.capacity_tokens
    assert 0 < one.share < 1
    draft(method, "b", range(1, 10))
    assert method.kv_usage().used_tokens == 2 * one.used_tokens
    for session in "ab":
        method.close(session)
    assert method.kv_usage() == empty


def test_a_method_without_rows_needs_no_room() -> None:
    assert not isinstance(NgramMethod(), HoldsRows)
    assert FallbackMethod([NgramMethod()]).kv_usage() == KvUsage()
    assert KvUsage().share == 0.0
