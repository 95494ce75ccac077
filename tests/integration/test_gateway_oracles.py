"""What must hold whatever the drafter does: the oracles of block-size independence, streaming and counting."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.messages import FinishReason, SamplingParams
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import GREEDY, VOCAB, Fleet, generate, plain_tokens, scripted_methods

LAW = hash_law(VOCAB, seed=3)
METHODS = dict(scripted_methods(LAW))
PROMPT = [1, 2, 3, 4]
BLOCK_SIZES = (0, 1, 2, 4, 8)
SAMPLED = SamplingParams(temperature=0.8, top_p=0.95)


@pytest.mark.parametrize("draft_ahead", [True, False], ids=["ahead", "sequential"])
@pytest.mark.parametrize("method", METHODS)
async def test_tokens_are_the_same_for_every_block_size(tmp_path: Path, method: str, draft_ahead: bool) -> None:
    expected = plain_tokens(LAW, PROMPT, 24)
    async with (
        Fleet.start(tmp_path, LAW, method=METHODS[method], settings={"draft_ahead": draft_ahead}) as fleet,
        fleet.client() as client,
    ):
        for size in BLOCK_SIZES:
            run = await generate(client, fleet.request(PROMPT, max_tokens=24, num_speculative_tokens=size))
            assert run.tokens == expected, f"block size {size}"
            assert run.text == fleet.tokenizer.decode(run.tokens)
            assert run.reason is (FinishReason.LENGTH if len(expected) == 24 else FinishReason.STOP)


@pytest.mark.parametrize("method", ["perfect", "wrong_at_2", "garbage"])
async def test_seeded_sampling_is_the_same_for_every_block_size(tmp_path: Path, method: str) -> None:
    sampling = SamplingParams(temperature=0.8, top_p=0.95, seed=11)
    expected = plain_tokens(LAW, PROMPT, 24, sampling)
    assert expected != plain_tokens(LAW, PROMPT, 24, GREEDY)
    async with Fleet.start(tmp_path, LAW, method=METHODS[method]) as fleet, fleet.client() as client:
        for size in BLOCK_SIZES:
            request = fleet.request(PROMPT, max_tokens=24, sampling=SAMPLED, num_speculative_tokens=size, seed=11)
            run = await generate(client, request)
            assert run.tokens == expected, f"block size {size}"
            assert run.started.seed == 11
