"""Chat completions over real HTTP: messages, streams, choices, log-probabilities, and the official client."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from paceline_gateway.http.chat import ChatRenderer
from paceline_gateway.http.choices import Outcome
from paceline_gateway.http.responses import ChatCompletion, Usage

from paceline.messages import SamplingParams
from paceline.text.choice_seed import choice_seed
from paceline.text.request import ChatMessage, ChatPrompt
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB, Fleet, generate, plain_tokens
from tests.integration.http_calls import CHAT, COMPLETIONS, ask, ask_stream, events_of, http_fleet

LAW = hash_law(VOCAB, seed=31)
MESSAGES = [{"role": "system", "content": "ab"}, {"role": "user", "content": "c"}]
PROMPT = [0, 1, 2]
EVERYTHING: dict[str, Any] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 2}
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}


async def test_the_same_tokens_as_on_grpc_and_as_a_completion(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http), fleet.client() as client:
        prompt = ChatPrompt(tuple([ChatMessage(turn["role"], turn["content"]) for turn in MESSAGES]))
        run = await generate(client, fleet.request(prompt, max_tokens=20))
        chat = await ask(http, CHAT, messages=MESSAGES, temperature=0, max_tokens=20, **EVERYTHING)
        text = await ask(http, COMPLETIONS, prompt="abc", temperature=0, max_tokens=20, return_token_ids=True)
        assert chat.choices[0].token_ids == text.choices[0].token_ids == run.tokens == plain_tokens(LAW, PROMPT, 20)
        assert chat.choices[0].text == run.text
        assert chat.choices[0].prompt_token_ids == PROMPT
        chat.check_counts([PROMPT])


@pytest.mark.parametrize("logprobs", [False, True])
async def test_log_probabilities_are_written_off_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logprobs: bool
) -> None:
    rendered_by: list[threading.Thread] = []
    whole = ChatRenderer.whole

    def watched(self: ChatRenderer, outcomes: Sequence[Outcome], usage: Usage) -> ChatCompletion:
        rendered_by.append(threading.current_thread())
        return whole(self, outcomes, usage)

    monkeypatch.setattr(ChatRenderer, "whole", watched)
    async with http_fleet(tmp_path, LAW) as (_, http):
        await ask(http, CHAT, messages=MESSAGES, max_tokens=3, logprobs=logprobs)
    (thread,) = rendered_by
    assert (thread is not threading.current_thread()) == logprobs


@pytest.mark.parametrize("size", [0, 1, 4, 8])
async def test_three_choices_streamed(tmp_path: Path, size: int) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        body: dict[str, Any] = {
            "messages": MESSAGES,
            "n": 3,
            "seed": 5,
            "max_tokens": 25,
            "speculation": {"num_speculative_tokens": size},
            **EVERYTHING,
        }
        whole, stream = await ask(http, CHAT, **body), await ask_stream(http, CHAT, **body, **USAGE)
        for choice in stream.choices:
            # The prompt is told once for each choice of a stream, and once for a whole answer.
            assert choice.prompt_token_ids == PROMPT
            assert choice.roles == 1
            choice.roles = 0
        assert stream == whole
        assert [choice.token_ids for choice in whole.choices] == [
            plain_tokens(LAW, PROMPT, 25, SamplingParams(seed=choice_seed(5, 0, index))) for index in range(3)
        ]
        whole.check_counts([PROMPT])


async def test_form_of_a_stream(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        events = await events_of(http, CHAT, messages=MESSAGES, temperature=0, max_tokens=9)
        first, *middle, last = [said["choices"][0] for said in events]
        assert first == {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        assert middle
        assert all(choice["delta"].keys() == {"content"} and choice["finish_reason"] is None for choice in middle)
        assert (last["delta"], last["finish_reason"]) == ({}, "length")
        assert {said["object"] for said in events} == {"chat.completion.chunk"}
        assert all(said["id"].startswith("chatcmpl-") for said in events)


async def test_text_parts(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        fields: dict[str, Any] = {"max_tokens": 6, "seed": 1}
        parts = [{"type": "text", "text": "abc"}]
        in_parts = await ask(http, CHAT, messages=[{"role": "user", "content": parts}], **fields)
        assert in_parts == await ask(http, CHAT, messages=[{"role": "user", "content": "abc"}], **fields)


async def test_logprobs_only_where_asked(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        fields: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 6, "seed": 1}
        assert (await ask(http, CHAT, **fields)).choices[0].tokens == []
        alone = (await ask(http, CHAT, **fields, logprobs=True)).choices[0]
        assert len(alone.tokens) == 6
        assert alone.top_logprobs == [{}] * 6


def official(fleet: Fleet) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{fleet.http_url}/v1", api_key="none", max_retries=0)


async def test_the_official_client(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, _), official(fleet) as client:
        fields: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "seed": 5, "max_tokens": 15, "n": 3}
        whole = await client.chat.completions.create(logprobs=True, top_logprobs=1, **fields)
        texts, roles, ends, usage = [""] * 3, [0] * 3, [0] * 3, None
        stream = await client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                roles[choice.index] += choice.delta.role == "assistant"
                ends[choice.index] += choice.finish_reason is not None
            usage = chunk.usage or usage
        assert texts == [choice.message.content for choice in whole.choices]
        assert roles == ends == [1] * 3
        assert usage == whole.usage
        logprobs = whole.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert len(logprobs.content) == 15


async def test_the_official_clients_own_stream_reader(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, _), official(fleet) as client:
        # The reader takes "length" for an error.
        fields: dict[str, Any] = {"model": "toy", "messages": MESSAGES, "seed": 5, "stop": ["a"], "n": 2}
        whole = await client.chat.completions.create(**fields)
        async with client.chat.completions.stream(**fields) as stream:
            final = await stream.get_final_completion()
        assert [choice.message.content for choice in final.choices] == [
            choice.message.content for choice in whole.choices
        ]
        assert [choice.finish_reason for choice in final.choices] == ["stop", "stop"]


async def test_a_conversation_goes_on_with_the_clients_own_answer(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, _), official(fleet) as client:
        fields: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 5}
        said: list[Any] = list(MESSAGES)
        first = await client.chat.completions.create(messages=said, **fields)
        turns: list[Any] = [*MESSAGES, first.choices[0].message, {"role": "user", "content": "d"}]
        second = await client.chat.completions.create(messages=turns, **fields)
        assert second.usage is not None
        assert second.usage.prompt_tokens == 3 + 5 + 1
