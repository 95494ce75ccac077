"""The governor in a whole fleet: real services and wire, toy models. It changes when tokens come, never which."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from paceline.messages import SamplingParams
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet, generate, plain_tokens, scripted_methods
from tests.integration.scraping import scrape

LAW = hash_law(VOCAB, seed=3)
METHODS = dict(scripted_methods(LAW))
PROMPT = [1, 2, 3, 4]
SAMPLING = SamplingParams(temperature=0.8, ignore_eos=True)
MAX_TOKENS = 60
EXPECTED = plain_tokens(LAW, PROMPT, MAX_TOKENS, SamplingParams(temperature=0.8, ignore_eos=True, seed=5))
GOVERNED = {"governor": True, "num_speculative_tokens": 8}


@pytest.mark.parametrize("method", METHODS)
async def test_tokens_are_the_same_whatever_is_chosen(tmp_path: Path, method: str) -> None:
    """One after another and at once: later sessions begin with what earlier ones have seen."""
    async with (
        Fleet.start(tmp_path, LAW, method=METHODS[method], settings=GOVERNED) as fleet,
        fleet.client() as client,
    ):
        request = fleet.request(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING, seed=5)
        first = await generate(client, request)
        runs = [first, *await asyncio.gather(*[generate(client, request) for _ in range(4)])]
        assert all(run.tokens == EXPECTED for run in runs)
        seen = await scrape(fleet.gateway.registry)
    evidence = [run.evidence for run in runs]
    passes = sum(each.target_passes for each in evidence)
    assert seen.sum("paceline_governor_rounds_total") == passes
    assert seen.sum("paceline_governor_block_size_tokens_count") == passes
    assert seen.sum("paceline_governor_rounds_total", reason="off") == sum(each.off_rounds for each in evidence)
    assert seen.sum("paceline_governor_rounds_total", reason="probe") == sum(each.probe_rounds for each in evidence)


async def test_drafts_that_do_not_pay_end_and_come_back_as_probes(tmp_path: Path) -> None:
    """A toy's pass takes no time, a draft that is always wrong takes a round trip."""
    async with (
        Fleet.start(tmp_path, LAW, method=METHODS["wrong_at_0"], settings=GOVERNED) as fleet,
        fleet.client() as client,
    ):
        run = await generate(client, fleet.request(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING, seed=5))
        assert run.tokens == EXPECTED
        assert run.evidence.off_rounds > MAX_TOKENS / 2
        assert run.evidence.probe_rounds >= 1
        assert run.evidence.draft_tokens < 8 * MAX_TOKENS / 2


@pytest.mark.parametrize("size", [0, 3])
async def test_a_request_fixes_the_size(tmp_path: Path, size: int) -> None:
    async with (
        Fleet.start(tmp_path, LAW, method=METHODS["wrong_at_0"], settings=GOVERNED) as fleet,
        fleet.client() as client,
    ):
        request = fleet.request(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING, seed=5, num_speculative_tokens=size)
        run = await generate(client, request)
        seen = await scrape(fleet.gateway.registry)
    assert run.tokens == EXPECTED
    assert (run.evidence.off_rounds, run.evidence.probe_rounds) == (0, 0)
    assert run.evidence.draft_tokens >= size * (MAX_TOKENS - 10)
    assert seen.sum("paceline_governor_rounds_total") == 0
