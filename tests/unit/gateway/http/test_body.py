"""From bytes to a request: strict JSON, known fields only, and errors that name the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from paceline_gateway.http.body import parse
from paceline_gateway.http.request_fields import GenerationFields
from paceline_gateway.http.requests import ChatCompletionRequest, CompletionRequest
from paceline_gateway.http.unsupported import CHAT_NO_OPS, COMPLETION_NO_OPS
from pydantic import ValidationError

from paceline.errors import InvalidArgument
from paceline.text.request import TextPrompt, TokenPrompt

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatCompletionRequest:
    return parse(json.dumps({"messages": MESSAGES, **fields}).encode(), ChatCompletionRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest)


def refused(model: type[GenerationFields], content: bytes) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        parse(content, model)
    return caught.value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"prompt": NaN}', "not valid JSON"),
        (b'{"prompt": -Infinity}', "not valid JSON"),
        (b'{"prompt": "\\ud800"}', "not valid JSON"),
        (b'{"prompt": "\xff"}', "not valid JSON"),
        (b'{"prompt": "a"} x', "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b'{"a":' * 100_000, "not valid JSON"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"prompt"', "must be a JSON object"),
        (b"null", "must be a JSON object"),
    ],
)
def test_what_is_no_json_object(content: bytes, said: str) -> None:
    assert said in refused(CompletionRequest, content).message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", [1]),
        ("max_tokens", 1.5),
        ("max_tokens", "5"),
        ("max_tokens", True),
        ("n", "2"),
        ("seed", 1.0),
        ("stream", 1),
        ("stream", "true"),
        ("ignore_eos", "no"),
        ("stop", 5),
        ("stop", ["a", 5]),
        ("stop", {"a": 1}),
        ("stop_token_ids", "1"),
        ("model", 5),
        ("user", 5),
        ("session_id", 5),
        ("acceptance_rule", "greedy"),
        ("speculation", True),
        ("metrics", []),
        ("stream_options", True),
        ("logit_bias", [1]),
        ("return_token_ids", 1),
    ],
)
def test_wrong_types_name_the_field(field: str, value: Any) -> None:
    for model, fixed in ((ChatCompletionRequest, {"messages": MESSAGES}), (CompletionRequest, {"prompt": "hi"})):
        error = refused(model, json.dumps({**fixed, field: value}).encode())
        assert error.field == field
        assert error.message.startswith(f"{field} must be")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"temprature": 1}, "temprature"),
        ({"stop_token_ids": [1, "x"]}, "stop_token_ids[1]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"speculation": {"enabled": 1}}, "speculation.enabled"),
        ({"speculation": {"tokens": 1}}, "speculation.tokens"),
        ({"metrics": {"all": True}}, "metrics.all"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream_options": {"other": None}}, "stream_options.other"),
        ({"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats"),
        ({"messages": 5}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": 5, "content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, "messages[0].name"),
        ({"messages": [{"role": "user", "content": "x", "weight": 1}]}, "messages[0].weight"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ],
)
def test_errors_name_the_path(fields: dict[str, Any], path: str) -> None:
    content = json.dumps({"messages": MESSAGES, **fields}).encode()
    error = refused(ChatCompletionRequest, content)
    assert error.field == path
    assert path in error.message


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("stop_token_ids", ["x"] * 5000, "stop_token_ids[0] must be"),
        ("logit_bias", {str(index): "x" for index in range(5000)}, "logit_bias has 5000 entries; at most 1024 are"),
    ],
)
def test_of_many_errors_one_is_made(field: str, value: Any, said: str) -> None:
    fields = {"prompt": "hi", field: value}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(fields)
    assert caught.value.error_count() == 1
    error = refused(CompletionRequest, json.dumps(fields).encode())
    assert error.message.startswith(said)


@pytest.mark.parametrize("where", ["prompt", "speculation"])
def test_of_many_unknown_fields_the_first_is_named(where: str) -> None:
    many = {f"field{index}": 1 for index in range(1000)}
    fields = {"prompt": "hi", **many} if where == "prompt" else {"prompt": "hi", "speculation": many}
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(fields)
    assert caught.value.error_count() == 1
    error = refused(CompletionRequest, json.dumps(fields).encode())
    assert error.field == ("field0" if where == "prompt" else "speculation.field0")
    assert "not a known field" in error.message


def test_a_name_of_any_length_is_cut() -> None:
    error = refused(CompletionRequest, json.dumps({"prompt": "hi", "x" * 100_000: 1}).encode())
    assert error.field == "x" * 200
    assert len(error.message) < 300


def test_what_is_missing() -> None:
    assert refused(ChatCompletionRequest, b"{}").message == "messages is required"
    assert refused(CompletionRequest, b"{}").message == "prompt is required"


WISHES: dict[str, Any] = {
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "tool_choice": "auto",
    "response_format": {"type": "json_object"},
    "echo": True,
    "best_of": 2,
    "suffix": "end",
    "store": True,
    "modalities": ["text", "audio"],
    "service_tier": "flex",
    "metadata": {"a": "b"},
    "priority": 1,
    "length_penalty": 0.5,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "add_generation_prompt": False,
    "parallel_tool_calls": 1,
    "bad_words": ["x"],
}
"""What some of the unsupported fields ask for; the others are refused whatever they hold."""


@pytest.mark.parametrize(
    ("model", "fixed", "name"),
    [
        *[(ChatCompletionRequest, {"messages": MESSAGES}, name) for name in CHAT_NO_OPS],
        *[(CompletionRequest, {"prompt": "hi"}, name) for name in COMPLETION_NO_OPS],
    ],
)
def test_unsupported_fields_are_refused_unless_they_ask_for_nothing(
    model: type[GenerationFields], fixed: dict[str, Any], name: str
) -> None:
    error = refused(model, json.dumps({**fixed, name: WISHES.get(name, "something")}).encode())
    assert error.field == name
    assert error.message.startswith(f"{name} is not supported yet")
    for no_op in (None, *{**CHAT_NO_OPS, **COMPLETION_NO_OPS}[name]):
        parse(json.dumps({**fixed, name: no_op}).encode(), model)


@pytest.mark.parametrize(("name", "value"), [("echo", 0), ("best_of", True), ("skip_special_tokens", 1)])
def test_truth_is_no_number(name: str, value: Any) -> None:
    assert refused(CompletionRequest, json.dumps({"prompt": "hi", name: value}).encode()).field == name


def test_null_is_the_default_everywhere() -> None:
    names = set(CompletionRequest.model_fields) - {"prompt"}
    assert completion(**dict.fromkeys(names)) == completion()
    names = set(ChatCompletionRequest.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_an_answer_of_the_official_client_can_be_sent_back() -> None:
    turn: dict[str, Any] = {
        "role": "assistant",
        "content": "hello",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert [message.content for message in chat(messages=[*MESSAGES, turn]).messages] == ["hi", "hello"]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "one\ntwo"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("hi", (TextPrompt("hi"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt((1, 2)),)),
        ([[1, 2], [3]], (TokenPrompt((1, 2)), TokenPrompt((3,)))),
        # Empty ones are the door's to refuse.
        ("", (TextPrompt(""),)),
        ([], (TokenPrompt(()),)),
        ([[]], (TokenPrompt(()),)),
    ],
)
def test_four_kinds_of_prompt(prompt: Any, prompts: tuple[Any, ...]) -> None:
    assert completion(prompt=prompt).prompt == prompts


@pytest.mark.parametrize(
    "prompt", [None, 5, True, {}, [None], [1, "a"], ["a", [1]], [[1], ["a"]], [1.0], [True], [[True]]]
)
def test_no_kind_of_prompt(prompt: Any) -> None:
    error = refused(CompletionRequest, json.dumps({"prompt": prompt}).encode())
    assert (error.field, error.message[:14]) == ("prompt", "prompt must be")


def test_developer_is_another_name_of_system() -> None:
    turns = [{"role": role, "content": "x"} for role in ("developer", "system", "user", "assistant", "tool")]
    assert [turn.role for turn in chat(messages=turns).messages] == ["system", "system", "user", "assistant", "tool"]
