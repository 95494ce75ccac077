"""Text completions over real HTTP: prompts, choices, seeds, streams, counts, log-probabilities, measurements."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.messages import SamplingParams
from paceline.text.choice_seed import choice_seed
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import BYTE_LEVEL_VOCAB_SIZE, write_byte_level
from tests.fakes.toy_runner import ToyRunner, cycle_law, hash_law, script_law
from tests.integration.fleet import EOS, GREEDY, VOCAB, Fleet, generate, plain_tokens, scripted_methods
from tests.integration.http_calls import COMPLETIONS, ENDPOINTS, ask, ask_stream, asking, events_of, http_fleet

LAW = hash_law(VOCAB, seed=21)
PROMPT = [1, 2, 3]
EVERYTHING: dict[str, Any] = {"return_token_ids": True, "logprobs": 2}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


def sampled(prompt: list[int], seed: int, max_tokens: int = 12) -> list[int]:
    return plain_tokens(LAW, prompt, max_tokens, SamplingParams(seed=seed))


async def test_greedy_text_is_plain_decodings_and_that_of_grpc(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http), fleet.client() as client:
        expected = plain_tokens(LAW, PROMPT, 20)
        answer = await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=0, **EVERYTHING)
        stream = await ask_stream(http, COMPLETIONS, prompt=PROMPT, max_tokens=20, temperature=0, **EVERYTHING, **USAGE)
        run = await generate(client, fleet.request(PROMPT, max_tokens=20, sampling=GREEDY))
        for got in (answer, stream):
            assert got.choices[0].token_ids == expected == run.tokens
            assert got.choices[0].text == run.text == fleet.tokenizer.decode(expected)
            assert got.choices[0].prompt_token_ids == PROMPT
            got.check_counts([PROMPT])


async def test_the_same_text_as_one_and_as_the_other_kind_of_prompt(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http):
        text = fleet.tokenizer.decode(PROMPT)
        whole = {"max_tokens": 9, "seed": 4, **EVERYTHING}
        answers = [await ask(http, COMPLETIONS, prompt=prompt, **whole) for prompt in (text, PROMPT, [text], [PROMPT])]
        assert all(answer == answers[0] for answer in answers)
        assert answers[0].choices[0].token_ids == sampled(PROMPT, 4, 9)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_with_several_choices(tmp_path: Path, stream: bool) -> None:
    prompts = [[1, 2, 3], [4], [5, 6]]
    async with http_fleet(tmp_path, LAW) as (_, http):
        body: dict[str, Any] = {"prompt": prompts, "n": 3, "seed": 11, "max_tokens": 12, **EVERYTHING}
        answer = await (ask_stream(http, COMPLETIONS, **body, **USAGE) if stream else ask(http, COMPLETIONS, **body))
        assert [choice.token_ids for choice in answer.choices] == [
            sampled(prompt, choice_seed(11, prompt_index, choice_index))
            for prompt_index, prompt in enumerate(prompts)
            for choice_index in range(3)
        ]
        assert [choice.prompt_token_ids for choice in answer.choices] == [one for one in prompts for _ in range(3)]
        answer.check_counts(prompts)


async def test_more_choices_do_not_change_the_first(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        body: dict[str, Any] = {"prompt": PROMPT, "seed": -3, "max_tokens": 12}
        one, three = await ask(http, COMPLETIONS, **body), await ask(http, COMPLETIONS, n=3, **body)
        assert three.texts[:1] == one.texts
        assert len(set(three.texts)) == 3
        assert (await ask(http, COMPLETIONS, n=3, **body)).texts == three.texts


async def test_without_a_seed_choices_and_requests_differ(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        answers = [await ask(http, COMPLETIONS, prompt=PROMPT, n=2, max_tokens=12, ignore_eos=True) for _ in range(2)]
        assert len({text for answer in answers for text in answer.texts}) == 4


@pytest.mark.parametrize("name", ["perfect", "wrong_at_2", "garbage"])
async def test_stream_is_the_whole_answer_whatever_the_drafter_does(tmp_path: Path, name: str) -> None:
    method = dict(scripted_methods(LAW))[name]
    async with http_fleet(tmp_path, LAW, method=method) as (_, http):
        for size in (0, 1, 4, 8):
            body: dict[str, Any] = {
                "prompt": PROMPT,
                "n": 2,
                "seed": 5,
                "max_tokens": 25,
                "speculation": {"num_speculative_tokens": size},
                **EVERYTHING,
            }
            whole, stream = await ask(http, COMPLETIONS, **body), await ask_stream(http, COMPLETIONS, **body, **USAGE)
            assert stream == whole
            assert whole.choices[0].token_ids == sampled(PROMPT, 5, 25)


async def test_logprobs_do_not_depend_on_drafts(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        body: dict[str, Any] = {"prompt": PROMPT, "seed": 5, "max_tokens": 15, "logprobs": 3}
        plain = await ask(http, COMPLETIONS, speculation={"enabled": False}, **body)
        drafted = await ask(http, COMPLETIONS, speculation={"num_speculative_tokens": 5}, **body)
        assert drafted == plain
        (choice,) = drafted.choices
        for token, logprob, best in zip(choice.tokens, choice.token_logprobs, choice.top_logprobs, strict=True):
            assert best[token] == logprob < 0
            assert len(best) in (3, 4)
        # Every token of this tokenizer is a letter.
        assert choice.text_offset == list(range(15))


async def test_an_impossible_alternative_is_a_finite_number(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        answer = await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=3, top_k=1, logprobs=2)
        assert {value for best in answer.choices[0].top_logprobs for value in best.values()} == {0.0, -9999.0}


async def test_include_usage_and_its_absence(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        for endpoint in ENDPOINTS:
            body = asking(endpoint, "abc", max_tokens=6, ignore_eos=True)
            with_usage = await events_of(http, endpoint, **body, **USAGE)
            assert with_usage[-1]["choices"] == []
            assert with_usage[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
            assert all(said["usage"] is None for said in with_usage[:-1])
            for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
                without = await events_of(http, endpoint, **body, **options)
                assert all("usage" not in said and said["choices"] for said in without)


STOPPING = [ord(letter) - ord("a") for letter in "xthexendthatxend"]


@pytest.mark.parametrize("size", [0, 1, 3, 8])
async def test_stop_string_over_several_tokens_is_never_sent(tmp_path: Path, size: int) -> None:
    law = script_law(STOPPING, len(PROMPT), EOS, VOCAB)
    async with http_fleet(tmp_path, law) as (_, http):
        for endpoint in ENDPOINTS:
            body = asking(
                endpoint,
                "bcd",
                temperature=0,
                max_tokens=30,
                stop=["endt", "zzz"],
                speculation={"num_speculative_tokens": size},
                return_token_ids=True,
            )
            whole, stream = await ask(http, endpoint, **body), await ask_stream(http, endpoint, **body)
            assert stream.texts == whole.texts == ["xthex"]
            assert whole.choices[0].finish_reason == "stop"
            assert whole.choices[0].token_ids == stream.choices[0].token_ids == STOPPING[:9]
            assert whole.usage == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
            # Held back for a stop string that did not come, and flushed at the natural end.
            almost = {**body, "stop": ["endz"]}
            assert (await ask(http, endpoint, **almost)).texts == (await ask_stream(http, endpoint, **almost)).texts
            assert (await ask(http, endpoint, **almost)).texts == ["xthexendthatxend"]


async def test_characters_over_several_tokens(tmp_path: Path) -> None:
    text = "naïve 日本 😀!"
    folder = write_byte_level(tmp_path / "text")
    tokenizer = Tokenizer.load(folder)
    (end,) = tokenizer.eos_token_ids
    ids = tokenizer.encode(text)
    law = script_law(ids, len(tokenizer.encode("go")), end, BYTE_LEVEL_VOCAB_SIZE)
    options: dict[str, Any] = {
        "vocab_size": BYTE_LEVEL_VOCAB_SIZE,
        "write_model": write_byte_level,
        "runner": lambda law: ToyRunner(law, BYTE_LEVEL_VOCAB_SIZE, max_model_len=256),
        "method": dict(scripted_methods(law, BYTE_LEVEL_VOCAB_SIZE))["wrong_at_2"],
    }
    async with http_fleet(tmp_path, law, **options) as (_, http):
        body: dict[str, Any] = {"prompt": "go", "temperature": 0, "max_tokens": 60, **EVERYTHING}
        whole, stream = await ask(http, COMPLETIONS, **body), await ask_stream(http, COMPLETIONS, **body, **USAGE)
        assert stream == whole
        (choice,) = whole.choices
        assert (choice.text, choice.finish_reason) == (text, "stop")
        assert choice.token_ids == [*ids, end]
        assert "�" not in "".join(choice.tokens)
        assert choice.tokens[-1] == "<|im_end|>"
        assert any(token.startswith("bytes:") for token in choice.tokens)


async def test_measurements_are_given_where_they_are_asked_for(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        body: dict[str, Any] = {"prompt": PROMPT, "n": 2, "temperature": 0, "max_tokens": 21}
        wish = {"metrics": {"speculative_decoding": True}}
        for answer in (
            await ask(http, COMPLETIONS, **body, **wish),
            await ask_stream(http, COMPLETIONS, **body, **wish),
        ):
            for choice in answer.choices:
                measured = choice.metrics["speculative_decoding"]
                assert measured["methods"] == ["scripted"]
                assert measured["draft_acceptance_rate"] == 1.0
                assert sum(measured["acceptance_histogram"]) == measured["num_drafts"] > 0
                assert measured["tokens_per_target_pass"] == 21 / measured["num_target_passes"] > 1
                assert measured["goodput_tokens_per_second"] > 0
                assert measured["drafter_memory_bytes"] == 1000
                assert measured["warnings"] == []
        for metrics in (None, {}, {"speculative_decoding": False}):
            assert all(
                choice.metrics is None for choice in (await ask(http, COMPLETIONS, **body, metrics=metrics)).choices
            )


async def test_without_a_drafter_the_measurements_say_so(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW, method=None) as (_, http):
        answer = await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=5, metrics={"speculative_decoding": True})
        measured = answer.choices[0].metrics["speculative_decoding"]
        assert (measured["num_drafts"], measured["mean_acceptance_length"]) == (0, 1.0)
        assert "no drafter" in measured["warnings"][0]


async def test_ends(tmp_path: Path) -> None:
    law = cycle_law([3, 5, 7, EOS], VOCAB)
    async with http_fleet(tmp_path, law) as (_, http):
        greedy: dict[str, Any] = {"prompt": [0], "temperature": 0, "return_token_ids": True}
        at_end = await ask(http, COMPLETIONS, **greedy)
        assert (at_end.choices[0].token_ids, at_end.choices[0].finish_reason) == ([5, 7, EOS], "stop")
        # Without max_tokens: what the context leaves.
        on = await ask(http, COMPLETIONS, **greedy, ignore_eos=True)
        assert (len(on.choices[0].token_ids), on.choices[0].finish_reason) == (255, "length")
        stopped = await ask(http, COMPLETIONS, **greedy, stop_token_ids=[7])
        assert (stopped.choices[0].token_ids, stopped.choices[0].finish_reason) == ([5, 7], "stop")
        later = await ask(http, COMPLETIONS, **greedy, stop_token_ids=[7], min_tokens=4, max_tokens=6)
        assert later.choices[0].finish_reason == "length" or len(later.choices[0].token_ids) > 4
        biased = await ask(http, COMPLETIONS, **greedy, logit_bias={"9": 100}, max_tokens=2)
        assert biased.choices[0].token_ids == [9, 9]


def official(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0)


async def test_the_official_client_streams(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, _), official(fleet) as client:
        fields: dict[str, Any] = {"model": "toy", "prompt": PROMPT, "seed": 3, "max_tokens": 15, "n": 2}
        whole = await client.completions.create(**fields)
        texts, ends = ["", ""], [0, 0]
        async for chunk in await client.completions.create(stream=True, **fields):
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            ends[choice.index] += choice.finish_reason is not None
        assert texts == [choice.text for choice in whole.choices]
        assert ends == [1, 1]
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.total_tokens) == (3, 3 + whole.usage.completion_tokens)


def test_the_official_blocking_client_streams(tmp_path: Path) -> None:
    async def main() -> None:
        async with http_fleet(tmp_path, LAW) as (fleet, _):
            assert await asyncio.to_thread(blocking, fleet) == fleet.tokenizer.decode(sampled(PROMPT, 3))

    def blocking(fleet: Fleet) -> str:
        with openai.OpenAI(base_url=f"{fleet.http_url}/v1", api_key="none") as client:
            chunks = client.completions.create(model="toy", prompt=PROMPT, seed=3, max_tokens=12, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)

    asyncio.run(main())


async def test_a_crowd_gets_what_each_would_get_alone(tmp_path: Path) -> None:
    options: dict[str, Any] = {"runner": lambda law: ToyRunner(law, VOCAB, max_model_len=256, num_pages=2048)}
    async with http_fleet(tmp_path, LAW, **options) as (_, http):

        async def one(seed: int) -> None:
            body: dict[str, Any] = {"prompt": [seed % 30, 2], "seed": seed, "max_tokens": 12, **EVERYTHING}
            answer = await (
                ask_stream(http, COMPLETIONS, **body, **USAGE) if seed % 2 else ask(http, COMPLETIONS, **body)
            )
            assert answer.choices[0].token_ids == sampled([seed % 30, 2], seed)
            answer.check_counts([[seed % 30, 2]])

        await asyncio.gather(*[one(seed) for seed in range(40)])


async def test_a_session_by_name(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http), fleet.client() as client:
        answer = await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=5, session_id="mine", return_token_ids=True)
        record = await client.get_session("mine")
        assert list(record.tokens) == PROMPT + answer.choices[0].token_ids
