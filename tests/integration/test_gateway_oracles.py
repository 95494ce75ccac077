"""What must hold whatever the drafter does: the oracles of block-size independence, streaming and counting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.messages import FinishReason, SamplingParams
from paceline.text.tokenizer import Tokenizer
from tests.fakes.scripted_drafter import ScriptedDrafter, perfect
from tests.fakes.tiny_tokenizer import BYTE_LEVEL_VOCAB_SIZE, write_byte_level
from tests.fakes.toy_runner import ToyRunner, hash_law, script_law
from tests.integration.fleet import GREEDY, VOCAB, Fleet, generate, plain_tokens, scripted_methods, target_law

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


@pytest.mark.parametrize("size", BLOCK_SIZES)
async def test_characters_split_over_tokens_arrive_whole(tmp_path: Path, size: int) -> None:
    text = "Zoë 😀👩‍👩‍👧 世界 end"
    folder = write_byte_level(tmp_path / "tokenizer")
    tokens = Tokenizer.load(folder).encode(text)
    assert len(tokens) > len(text)
    law = script_law(tokens, len(PROMPT), eos=299, vocab_size=BYTE_LEVEL_VOCAB_SIZE)
    options: dict[str, Any] = {
        "method": lambda: ScriptedDrafter(perfect(target_law(law, BYTE_LEVEL_VOCAB_SIZE))),
        "runner": lambda law: ToyRunner(law, BYTE_LEVEL_VOCAB_SIZE),
        "vocab_size": BYTE_LEVEL_VOCAB_SIZE,
        "write_model": lambda _: folder,
        "settings": {"num_speculative_tokens": size},
    }
    async with Fleet.start(tmp_path, law, **options) as fleet, fleet.client() as client:
        run = await generate(client, fleet.request(PROMPT, max_tokens=len(tokens)))
        assert run.tokens == list(tokens)
        assert run.text == text
        assert not any("\ufffd" in chunk.text for chunk in run.chunks)
