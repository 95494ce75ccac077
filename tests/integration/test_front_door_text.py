"""What comes out is the same through every door, whole and streamed, at every block size: text, ids, counts, values."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest

from paceline.messages import SamplingParams
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest, SpeculationOptions, TokenPrompt
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import BYTE_LEVEL_VOCAB_SIZE, write_byte_level
from tests.fakes.toy_runner import Law, ToyRunner, hash_law, one_hot, script_law
from tests.integration.fleet import EOS, GREEDY, VOCAB, plain_tokens, scripted_methods
from tests.integration.front_door import FLOOR, Answer, FrontDoor, front_door

BLOCK_SIZES = (0, 1, 2, 4, 8)
LAW = hash_law(VOCAB, seed=43)
PROMPT = [1, 2, 3]


def sized(request: GenerationRequest, size: int) -> GenerationRequest:
    return dataclasses.replace(request, speculation=SpeculationOptions(num_speculative_tokens=size))


async def everywhere(front: FrontDoor, request: GenerationRequest, *sizes: int) -> Answer:
    """The one answer that all doors give at all block sizes, its parts checked."""
    answers = [await door.generate(sized(request, size)) for size in sizes for door in front.doors]
    for answer in answers:
        assert "".join(answer.pieces) == answer.text
        assert answer.completion_tokens == len(answer.token_ids)
        assert len(answer.logprobs) == (0 if request.sampling.top_logprobs is None else answer.completion_tokens)
    assert answers == answers[:1] * len(answers)
    return answers[0]


# --- whatever the drafter does ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["perfect", "wrong_at_2", "garbage"])
async def test_one_answer_at_all_doors_and_block_sizes(tmp_path: Path, method: str) -> None:
    async with front_door(tmp_path, LAW, method=dict(scripted_methods(LAW))[method]) as front:
        for sampling in (GREEDY, SamplingParams(temperature=0.8, top_p=0.95, seed=11)):
            request = front.fleet.request(PROMPT, max_tokens=24, sampling=sampling, seed=11)
            answer = await everywhere(front, request, *BLOCK_SIZES)
            assert list(answer.token_ids) == plain_tokens(LAW, PROMPT, 24, sampling)
            assert answer.text == front.fleet.tokenizer.decode(answer.token_ids)
            assert answer.prompt_tokens == len(PROMPT)


@pytest.mark.parametrize("method", ["perfect", "wrong_at_2"])
async def test_logprobs_are_the_tokens_own(tmp_path: Path, method: str) -> None:
    async with front_door(tmp_path, LAW, method=dict(scripted_methods(LAW))[method]) as front:
        sampled = SamplingParams(temperature=0.8, top_logprobs=3, ignore_eos=True)
        request = front.fleet.request(PROMPT, max_tokens=17, sampling=sampled, seed=2)
        as_chat = dataclasses.replace(request, prompt=chat(front, PROMPT))
        answer = await everywhere(front, request, *BLOCK_SIZES)
        assert answer == await everywhere(front, as_chat, *BLOCK_SIZES)
        assert all(FLOOR < value <= 0 for value in answer.logprobs)
        assert all(len(values) == 3 for values in answer.top_logprobs)
        assert all(
            max(value, *values) == values[0] for value, values in zip(answer.logprobs, answer.top_logprobs, strict=True)
        )


async def test_what_cannot_be_is_a_finite_number(tmp_path: Path) -> None:
    async with front_door(tmp_path, LAW) as front:
        only_one = SamplingParams(temperature=1.0, top_k=1, top_logprobs=2, logit_bias={4: -100.0})
        request = front.fleet.request(PROMPT, max_tokens=9, sampling=only_one, seed=2)
        for prompt in (TokenPrompt(tuple(PROMPT)), chat(front, PROMPT)):
            answer = await everywhere(front, dataclasses.replace(request, prompt=prompt), 0, 4)
            assert answer.logprobs == (0.0,) * 9
            assert answer.top_logprobs == ((0.0, FLOOR),) * 9


def chat(front: FrontDoor, ids: list[int]) -> ChatPrompt:
    """Messages that become these ids: the toy's chat template puts nothing between them."""
    text = front.fleet.tokenizer.decode(ids)
    return ChatPrompt((ChatMessage("system", text[:1]), ChatMessage("user", text[1:])))


# --- where a generation ends ------------------------------------------------------------------------------------------

PADDING = [25, 25, 25]


def letters(text: str) -> list[int]:
    return [EOS if letter == "." else ord(letter) - ord("a") for letter in text]


def scripts_law(*texts: str) -> Law:
    """The first token of the prompt says which text is written after the padding; then end-of-sequence for ever."""
    written = [letters(text) for text in texts]

    def law(prefix: tuple[int, ...]) -> Any:
        text, index = written[prefix[0]], len(prefix) - 1 - len(PADDING)
        return one_hot(text[index] if 0 <= index < len(text) else EOS, VOCAB)

    return law


def scripted(number: int, sampling: SamplingParams = GREEDY, **fields: Any) -> GenerationRequest:
    prompt = TokenPrompt((number, *PADDING))
    return GenerationRequest(prompt, sampling=sampling, **{"max_tokens": 20, **fields})


async def test_a_stop_string_ends_alike_at_each_position_of_a_block(tmp_path: Path) -> None:
    text = "abcdefghijkl"
    texts = [text[:position] + "xyz" + text[position:] for position in range(len(text))]
    async with front_door(tmp_path, scripts_law(*texts)) as front:
        for position, whole in enumerate(texts):
            answer = await everywhere(front, scripted(position, stop=("xyz", "never")), 0, 8)
            assert (answer.text, answer.finish_reason) == (text[:position], "stop")
            assert list(answer.token_ids) == letters(whole[: position + 3])


async def test_no_part_of_a_stop_string_is_sent_and_held_text_is_flushed(tmp_path: Path) -> None:
    texts = ("abxyzcd", "abxyw.", "abxyxyzq", "xyxyx.")
    expected = ("ab", "abxyw", "abxy", "xyxyx")
    async with front_door(tmp_path, scripts_law(*texts)) as front:
        for number, text in enumerate(expected):
            for prompt in (scripted(number).prompt, chat(front, [number, *PADDING])):
                request = dataclasses.replace(scripted(number), prompt=prompt, stop=("xyz",))
                answer = await everywhere(front, request, 0, 3, 8)
                assert (answer.text, answer.finish_reason) == (text, "stop")
        # A natural end by length in the middle of what may become a stop string.
        answer = await everywhere(front, scripted(0, stop=("xyz",), max_tokens=4), *BLOCK_SIZES)
        assert (answer.text, answer.finish_reason) == ("abxy", "length")


@pytest.mark.parametrize("method", ["perfect", "eos_at_1"])
async def test_ends_inside_an_accepted_block(tmp_path: Path, method: str) -> None:
    law = scripts_law("absabc", "abcs", "x.yyyy", "bcd.")
    stop_id = dataclasses.replace(GREEDY, stop_token_ids=(letters("s")[0],), top_logprobs=0)
    forced = dataclasses.replace(GREEDY, min_tokens=8)
    async with front_door(tmp_path, law, method=dict(scripted_methods(law))[method]) as front:
        for request, ids, text, reason in [
            (scripted(0, stop_id, max_tokens=5), "abs", "ab", "stop"),
            (scripted(1, stop_id, max_tokens=2), "ab", "ab", "length"),
            (scripted(2), "x.", "x", "stop"),
            # The second choice of the law is "a": the end is masked until eight tokens exist.
            (scripted(3, forced), "bcdaaaaa.", "bcdaaaaa", "stop"),
        ]:
            answer = await everywhere(front, request, *BLOCK_SIZES)
            assert (list(answer.token_ids), answer.text, answer.finish_reason) == (letters(ids), text, reason)


async def test_the_record_holds_what_the_client_got(tmp_path: Path) -> None:
    law = scripts_law("abcdefghijklmnop")
    async with front_door(tmp_path, law) as front, front.fleet.client() as client:
        for door in front.doors:
            for max_tokens in (1, 2, 5, 9, 10):
                name = f"{door.name.replace(' ', '-')}-{max_tokens}"
                answer = await door.generate(sized(scripted(0, session=name, max_tokens=max_tokens), 8))
                record = await client.get_session(name)
                assert list(record.tokens) == [0, *PADDING, *answer.token_ids]
                assert answer.completion_tokens == max_tokens
                # A second turn under the same name begins where that one ended.
                again = dataclasses.replace(scripted(0, session=name), prompt=TokenPrompt(record.tokens), max_tokens=3)
                await door.generate(sized(again, 8))
                assert (await client.get_session(name)).committed_len == record.committed_len + 3


async def test_a_prompt_just_below_the_limit_ends_at_it(tmp_path: Path) -> None:
    async with front_door(tmp_path, LAW) as front:
        prompt = [1 + index % 7 for index in range(253)]
        sampling = dataclasses.replace(GREEDY, ignore_eos=True)
        for max_tokens in (10_000, None):
            request = front.fleet.request(prompt, max_tokens=max_tokens, sampling=sampling)
            answer = await everywhere(front, request, 0, 5)
            assert (answer.completion_tokens, answer.finish_reason) == (3, "length")


# --- characters -------------------------------------------------------------------------------------------------------

CHARACTERS = "Zoë 😀 世界、👩‍👧"


@pytest.mark.parametrize("method", ["perfect", "wrong_at_2"])
async def test_characters_over_several_tokens_arrive_whole_and_once(tmp_path: Path, method: str) -> None:
    tokenizer = Tokenizer.load(write_byte_level(tmp_path / "tokenizer"))
    tokens = tokenizer.encode(CHARACTERS)
    assert len(tokens) > 2 * len(CHARACTERS)  # most characters are two to four tokens
    law = script_law(tokens, len(PROMPT), 299, BYTE_LEVEL_VOCAB_SIZE)
    options: dict[str, Any] = {
        "method": dict(scripted_methods(law, BYTE_LEVEL_VOCAB_SIZE))[method],
        "runner": lambda law: ToyRunner(law, BYTE_LEVEL_VOCAB_SIZE),
        "vocab_size": BYTE_LEVEL_VOCAB_SIZE,
        "write_model": write_byte_level,
    }
    async with front_door(tmp_path, law, **options) as front:
        request = front.fleet.request(PROMPT, max_tokens=len(tokens))
        for size in BLOCK_SIZES:
            for door in front.doors:
                answer = await door.generate(sized(request, size))
                assert answer.text == CHARACTERS
                assert "".join(answer.pieces) == CHARACTERS
                assert not any("\ufffd" in piece for piece in answer.pieces)
        # Cut off in the middle of a character: what is whole of it, at every door.
        for count in (6, 7, 8, 12):
            cut = await everywhere(front, dataclasses.replace(request, max_tokens=count), 0, 4)
            assert cut.completion_tokens == count
            assert CHARACTERS.startswith(cut.text)


# --- crowds -----------------------------------------------------------------------------------------------------------


async def test_a_crowd_at_all_doors_gets_what_each_would_get_alone(tmp_path: Path) -> None:
    source = random.Random(7)
    options: dict[str, Any] = {
        "method": dict(scripted_methods(LAW))["wrong_at_2"],
        "num_verifiers": 2,
        "runner": lambda law: ToyRunner(law, VOCAB, max_model_len=256, num_pages=2048),
    }
    async with front_door(tmp_path, LAW, **options) as front:

        async def one(index: int) -> None:
            shared = [5] * source.choice([0, 12])  # some have a long prefix in common
            prompt = shared + [source.randrange(VOCAB - 1) for _ in range(source.randint(1, 20))]
            sampling = SamplingParams(temperature=source.choice([0.0, 0.8]), top_p=0.9, seed=index)
            count = source.randint(1, 16)
            request = front.fleet.request(prompt, max_tokens=count, sampling=sampling, seed=index)
            answer = await front.doors[index % 3].generate(sized(request, 8 if index % 2 else 0))
            assert list(answer.token_ids) == plain_tokens(LAW, prompt, count, sampling)

        await asyncio.gather(*[one(index) for index in range(50)])


async def test_seeds_belong_to_their_requests(tmp_path: Path) -> None:
    async with front_door(tmp_path, LAW) as front:
        sampling = SamplingParams(temperature=1.0, ignore_eos=True)

        async def batch() -> list[list[tuple[int, ...]]]:
            asked = [(door, seed) for seed in (1, 2, None) for door in front.doors]
            requests = [front.fleet.request(PROMPT, sampling=sampling, seed=seed) for _, seed in asked]
            answers = await asyncio.gather(
                *[door.generate(request) for (door, _), request in zip(asked, requests, strict=True)]
            )
            ids = [answer.token_ids for answer in answers]
            return [ids[:3], ids[3:6], ids[6:]]

        first, second = await batch(), await batch()
        for seed in (1, 2):
            expected = tuple(plain_tokens(LAW, PROMPT, 20, dataclasses.replace(sampling, seed=seed)))
            assert first[seed - 1] == second[seed - 1] == [expected] * 3
        assert len({*first[2], *second[2]}) == 6
