"""Speculation changes no token of the real target: a part of `make verify-lossless`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.lossless import MODES, Case, Lossless, demo_method
from bench.mixed import Mixed, never_preempted
from bench.reference import GREEDY, Mode
from paceline.benchmark.prompts import DEMO_PROMPTS
from paceline.drafting.method import DraftMethod
from paceline.engine.runner_options import RunnerChoice

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(900)]

NUM_TOKENS = 32


@pytest.fixture(scope="module")
def lossless() -> Iterator[Lossless]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield (loaded := Lossless(max_tokens=NUM_TOKENS))
    torch.set_num_threads(threads)
    assert loaded.engine.num_sessions == 0
    assert loaded.engine.kv_pages_in_use == 0
    loaded.engine.check_integrity()


@pytest.fixture(scope="module", params=["draft_model", "ngram"])
def method(request: pytest.FixtureRequest) -> DraftMethod:
    return demo_method(request.param)


def cases(lossless: Lossless, mode: Mode) -> list[Case]:
    return lossless.cases(DEMO_PROMPTS, [mode])


def assert_equal(lossless: Lossless) -> None:
    assert lossless.tally.passed, lossless.tally


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
def test_plain_decoding_equals_the_cache_free_reference(lossless: Lossless, mode: Mode) -> None:
    for case in cases(lossless, mode):
        lossless.check_reference(case)
    assert_equal(lossless)


def test_greedy_plain_decoding_equals_transformers_generate(lossless: Lossless) -> None:
    for case in cases(lossless, GREEDY):
        lossless.check_generate(case)
    assert_equal(lossless)


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)
@pytest.mark.parametrize("num_draft_tokens", [1, 2, 4, 8])
def test_every_block_size_of_every_method_equals_plain_decoding(
    lossless: Lossless, method: DraftMethod, num_draft_tokens: int, mode: Mode
) -> None:
    tokens_per_pass = lossless.check_speculation(cases(lossless, mode), method, num_draft_tokens, together=4)
    assert_equal(lossless)
    # A copy of the target with int8 weights agrees with it most of the time; n-grams now and then.
    at_least = 1 + 0.5 * num_draft_tokens if method.info.name == "draft_model" else 1.0
    assert tokens_per_pass >= at_least


def test_mixed_sessions_in_a_pool_too_small_for_them_equal_plain_decoding(lossless: Lossless) -> None:
    methods = {name: demo_method(name) for name in ("draft_model", "ngram")}
    mixed = Mixed(lossless, methods, RunnerChoice.AUTO)
    # Without the long prompt, which takes as long as all others together.
    sessions = [session for session in mixed.sessions(8) if not session.long]
    report = mixed.check(sessions, together=len(sessions))
    assert_equal(lossless)
    assert report.num_equal == len(sessions) == 7
    assert not report.complaints
    assert not never_preempted([report])
