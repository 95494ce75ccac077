"""From HTTP fields to what the door takes."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from paceline_gateway.http.body import parse
from paceline_gateway.http.chat import chat_ask
from paceline_gateway.http.choices import Ask
from paceline_gateway.http.completions import completion_ask
from paceline_gateway.http.requests import ChatCompletionRequest, CompletionRequest

from paceline.errors import InvalidArgument
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest, SpeculationOptions, TextPrompt


def ask(**fields: Any) -> Ask:
    return completion_ask(parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest))


def chat(**fields: Any) -> Ask:
    messages = [{"role": "user", "content": "hi"}]
    return chat_ask(parse(json.dumps({"messages": messages, **fields}).encode(), ChatCompletionRequest))


def test_nothing_said_is_the_doors_default() -> None:
    names = {"top_logprobs": "logprobs"}
    assert ask() == Ask((TextPrompt("hi"),), 1, GenerationRequest(TextPrompt("hi")), names)
    prompt = ChatPrompt((ChatMessage("user", "hi"),))
    assert chat() == Ask((prompt,), 1, GenerationRequest(prompt), {"prompt": "messages"})


def test_every_field_arrives() -> None:
    said = ask(
        model="toy",
        n=3,
        seed=-5,
        stop=["a", "b"],
        stop_token_ids=[7],
        ignore_eos=True,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"5": -100, "6": 1.5},
        min_tokens=2,
        max_tokens=9,
        logprobs=3,
        acceptance_rule="ratio",
        speculation={"enabled": False, "method": "ngram", "num_speculative_tokens": 2},
        session_id="mine",
    )
    sampling = SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={5: -100.0, 6: 1.5},
        min_tokens=2,
        stop_token_ids=(7,),
        ignore_eos=True,
        top_logprobs=3,
    )
    assert said.choices_per_prompt == 3
    assert said.request == GenerationRequest(
        TextPrompt("hi"),
        model="toy",
        sampling=sampling,
        seed=-5,
        max_tokens=9,
        stop=("a", "b"),
        rule=AcceptanceRule.RATIO,
        speculation=SpeculationOptions(False, "ngram", 2),
        session="mine",
    )
    # The seed of the sampling parameters is the door's to set, and nothing else was left at its default.
    defaults = SamplingParams()
    same = [
        field.name
        for field in dataclasses.fields(sampling)
        if getattr(sampling, field.name) == getattr(defaults, field.name)
    ]
    assert same == ["seed"]


@pytest.mark.parametrize(("top_k", "kept"), [(-1, 0), (0, 0), (5, 5), (-2, -2)])
def test_both_spellings_of_all_tokens(top_k: int, kept: int) -> None:
    assert ask(top_k=top_k).request.sampling.top_k == kept


def test_zeros_are_values() -> None:
    sampling = ask(temperature=0, top_p=0, repetition_penalty=0).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0, 0, 0)
    assert ask(max_tokens=0).request.max_tokens == 0
    assert ask(n=0).choices_per_prompt == 0
    assert ask(logprobs=0).request.sampling.top_logprobs == 0
    assert ask(speculation={"num_speculative_tokens": 0}).request.speculation.num_speculative_tokens == 0


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_one_stop_string(stop: Any) -> None:
    assert ask(stop=stop).request.stop == ("a",)


def test_two_names_of_one_limit() -> None:
    assert ask(max_tokens=5).request.max_tokens == 5
    assert ask(max_completion_tokens=5).request.max_tokens == 5
    assert ask(max_tokens=5, max_completion_tokens=5).request.max_tokens == 5
    with pytest.raises(InvalidArgument, match="max_tokens is 5 and max_completion_tokens is 6"):
        ask(max_tokens=5, max_completion_tokens=6)


def test_logprobs_of_chat() -> None:
    assert chat().request.sampling.top_logprobs is None
    assert chat(logprobs=False).request.sampling.top_logprobs is None
    assert chat(logprobs=True).request.sampling.top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).request.sampling.top_logprobs == 4
    for logprobs in (None, False):
        with pytest.raises(InvalidArgument, match="top_logprobs needs logprobs"):
            chat(logprobs=logprobs, top_logprobs=4)


@pytest.mark.parametrize("key", ["x", "", "1.0", "1e3", "9" * 5000, "٣", " 1"])
def test_bias_of_no_token(key: str) -> None:
    with pytest.raises(InvalidArgument, match="no token id") as caught:
        ask(logit_bias={key: 1})
    assert caught.value.field == "logit_bias"


def test_stream_options_without_a_stream() -> None:
    for stream in (None, False):
        with pytest.raises(InvalidArgument, match="stream_options needs stream"):
            ask(stream=stream, stream_options={"include_usage": True})
    ask(stream=True, stream_options={"include_usage": True})


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"n": 0}, "n", "n is 0; it must be in [1, 4]"),
        ({"n": -1}, "n", "n is -1"),
        ({"n": 5}, "n", "n is 5; it must be in [1, 4]"),
        ({"n": 2, "prompt": ["a", "b", "c"]}, "prompt", "3 entries with 2 choices each, 6 together; at most 4"),
        ({"prompt": ["a"] * 5}, "prompt", "5 entries"),
        ({"n": 2, "session_id": "s"}, "session_id", "2 choices"),
        ({"prompt": ["a", "b"], "session_id": "s"}, "session_id", "2 choices"),
    ],
)
def test_how_many_choices(fields: dict[str, Any], field: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ask(**fields).check(4)
    assert caught.value.field == field
    assert said in caught.value.message


def test_as_many_choices_as_are_allowed() -> None:
    ask(n=4).check(4)
    ask(n=2, prompt=["a", "b"]).check(4)
    ask(n=1, session_id="s").check(4)
