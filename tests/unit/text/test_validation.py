"""Rows of "Front door": each refusal names the field and the limit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InvalidArgument
from paceline.messages import SamplingParams
from paceline.text.chat_template import ChatTemplate
from paceline.text.request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    PreparedRequest,
    Prompt,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from paceline.text.tokenizer import Tokenizer
from paceline.text.validation import RequestLimits, prepare, validate, validate_sampling
from tests.fakes.tiny_tokenizer import write_byte_level

VOCAB_SIZE = 300
CONTEXT = 64
GOOD = GenerationRequest(TextPrompt("hello"))


def sampling(**changes: Any) -> GenerationRequest:
    return replace(GOOD, sampling=SamplingParams(**changes))


def prompt(value: Prompt) -> GenerationRequest:
    return replace(GOOD, prompt=value)


def chat(*turns: tuple[str, str]) -> GenerationRequest:
    return prompt(ChatPrompt(tuple(ChatMessage(role, content) for role, content in turns)))


REFUSED = [
    ("empty text", prompt(TextPrompt("")), "prompt", "at least one character"),
    ("lone surrogate", prompt(TextPrompt("a\udc00")), "prompt", "lone surrogate at character 1"),
    ("text too long", prompt(TextPrompt("é" * 60)), "prompt", "120 bytes; 100"),
    ("no ids", prompt(TokenPrompt(())), "prompt", "at least one token"),
    ("id = V", prompt(TokenPrompt((1, 300))), "prompt", r"prompt\[1\] is token id 300; ids must be in \[0, 300\)"),
    ("negative id", prompt(TokenPrompt((-1,))), "prompt", r"token id -1; ids must be in \[0, 300\)"),
    ("no messages", chat(), "messages", "1 to 3"),
    ("too many messages", chat(*[("user", "x")] * 4), "messages", "has 4 entries; it must have 1 to 3"),
    ("role", chat(("user", "x"), ("robot", "x")), "messages[1].role", "system, user, assistant, tool"),
    ("surrogate in a message", chat(("user", "\ud800")), "messages[0].content", "lone surrogate"),
    ("messages too long", chat(("user", "x" * 70), ("user", "x" * 31)), "messages[1].content", "31 bytes; 30"),
    ("max_tokens 0", replace(GOOD, max_tokens=0), "max_tokens", r"max_tokens is 0; it must be in \[1,"),
    ("max_tokens -5", replace(GOOD, max_tokens=-5), "max_tokens", "max_tokens is -5"),
    ("max_tokens huge", replace(GOOD, max_tokens=2**31), "max_tokens", "2147483647"),
    ("min_tokens negative", sampling(min_tokens=-1), "min_tokens", "min_tokens is -1"),
    (
        "min above max",
        replace(sampling(min_tokens=9), max_tokens=8),
        "min_tokens",
        "is 9; it must not exceed max_tokens, which is 8",
    ),
    ("stop empty", replace(GOOD, stop=("a", "")), "stop", r"stop\[1\] is empty"),
    ("stop too long", replace(GOOD, stop=("x" * 257,)), "stop", "257 characters; at most 256"),
    ("too many stops", replace(GOOD, stop=("x",) * 17), "stop", "17 entries; at most 16"),
    ("stop surrogate", replace(GOOD, stop=("\ud800",)), "stop[0]", "lone surrogate"),
    ("stop id = V", sampling(stop_token_ids=(2, 300)), "stop_token_ids", r"\[0, 300\)"),
    ("stop id negative", sampling(stop_token_ids=(-2,)), "stop_token_ids", r"\[0, 300\)"),
    ("too many stop ids", sampling(stop_token_ids=(1,) * 257), "stop_token_ids", "257 entries; at most 256"),
    ("bias beyond V", sampling(logit_bias={300: 1.0}), "logit_bias", r"\[0, 300\)"),
    ("bias too large", sampling(logit_bias={1: 100.5}), "logit_bias", r"100.5; it must be in \[-100, 100\]"),
    ("bias NaN", sampling(logit_bias={1: math.nan}), "logit_bias", "nan"),
    ("bias inf", sampling(logit_bias={1: -math.inf}), "logit_bias", "-inf"),
    (
        "too many biases",
        sampling(logit_bias=dict.fromkeys(range(1025), 0.0)),
        "logit_bias",
        "1025 entries; at most 1024",
    ),
    ("top_k", sampling(top_k=-1), "top_k", "at least 0"),
    ("top_logprobs negative", sampling(top_logprobs=-1), "top_logprobs", r"\[0, 20\]"),
    ("top_logprobs 21", sampling(top_logprobs=21), "top_logprobs", r"21; it must be in \[0, 20\]"),
    ("seed", replace(GOOD, seed=2**63), "seed", "64 bits"),
    ("session empty", replace(GOOD, session=""), "session", "1 to 128"),
    ("session slash", replace(GOOD, session="a/b"), "session", r"\[A-Za-z0-9_.-\]"),
    ("session newline", replace(GOOD, session="a\n"), "session", "1 to 128"),
    ("session braces", replace(GOOD, session="{a}"), "session", "1 to 128"),
    ("session long", replace(GOOD, session="a" * 129), "session", "1 to 128"),
    (
        "block negative",
        replace(GOOD, speculation=SpeculationOptions(num_speculative_tokens=-1)),
        "speculation.num_speculative_tokens",
        r"\[0, 64\]",
    ),
    (
        "block too long",
        replace(GOOD, speculation=SpeculationOptions(num_speculative_tokens=65)),
        "speculation.num_speculative_tokens",
        r"65; it must be in \[0, 64\]",
    ),
    ("method", replace(GOOD, speculation=SpeculationOptions(method="../x")), "speculation.method", "64 characters"),
    (
        "method that nobody has",
        replace(GOOD, speculation=SpeculationOptions(False, "lookahead")),
        "speculation.method",
        "'lookahead' is not known here; known are draft_model, ngram, medusa, eagle, eagle3, layerskip$",
    ),
]
RANGES = [
    ("temperature", (0.0, 1e-6, 1e-5, 2.0, 100.0), (-0.1, 100.1)),
    ("top_p", (1e-9, 0.5, 1.0), (0.0, -0.5, 1.5)),
    ("min_p", (0.0, 1.0), (-0.1, 1.1)),
    ("repetition_penalty", (0.01, 1.0, 100.0), (0.0, 1e-300, 0.009, -1.0, 100.1)),
    ("presence_penalty", (-2.0, 0.0, 2.0), (-2.1, 2.1)),
    ("frequency_penalty", (-2.0, 0.0, 2.0), (-2.1, 2.1)),
]


@pytest.mark.parametrize(("request_", "field", "message"), [case[1:] for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_refusals_name_the_field_and_the_limit(request_: GenerationRequest, field: str, message: str) -> None:
    limits = RequestLimits(max_text_bytes=100, max_messages=3)
    with pytest.raises(InvalidArgument, match=message) as caught:
        validate(request_, vocab_size=VOCAB_SIZE, limits=limits)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "good", "bad"), RANGES)
def test_ranges(field: str, good: tuple[float, ...], bad: tuple[float, ...]) -> None:
    for value in good:
        validate(sampling(**{field: value}), vocab_size=VOCAB_SIZE)
    for value in (*bad, math.nan, math.inf, -math.inf):
        with pytest.raises(InvalidArgument, match=f"^{field} is .*; it must be in ") as caught:
            validate(sampling(**{field: value}), vocab_size=VOCAB_SIZE)
        assert caught.value.field == field


@pytest.mark.parametrize(
    "changes", [{"top_p": 0.0}, {"min_tokens": -1}, {"stop_token_ids": (300,)}, {"logit_bias": {-1: 0}}]
)
def test_a_replicas_door_refuses_the_same_sampling(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        validate_sampling(SamplingParams(**changes), vocab_size=VOCAB_SIZE)
    assert caught.value.field == next(iter(changes))


def test_what_is_at_the_limits_passes() -> None:
    validate(
        GenerationRequest(
            TokenPrompt((0, 299)),
            sampling=SamplingParams(
                logit_bias={0: -100.0, 299: 100.0}, stop_token_ids=(0, 299), top_logprobs=20, min_tokens=5
            ),
            seed=-(2**63),
            max_tokens=5,
            stop=("x" * 256,) * 16,
            speculation=SpeculationOptions(True, "draft_model", 64),
            session="A" * 127 + "-",
        ),
        vocab_size=VOCAB_SIZE,
    )
    validate(replace(GOOD, sampling=SamplingParams(top_logprobs=0)), vocab_size=VOCAB_SIZE)
    validate(chat(*[(role, "") for role in ("system", "user", "assistant", "tool")]), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("method", ["", "draft_model", "ngram", "medusa", "mine"])
def test_methods_of_paceline_and_of_the_fleet_may_be_asked_for(method: str) -> None:
    request = replace(GOOD, speculation=SpeculationOptions(method=method))
    validate(request, vocab_size=VOCAB_SIZE, offered_methods=("mine", "ngram"))
    with pytest.raises(InvalidArgument, match=r"known are draft_model, ngram, medusa, eagle, eagle3, layerskip, mine$"):
        validate(
            replace(GOOD, speculation=SpeculationOptions(method="lookahead")),
            vocab_size=VOCAB_SIZE,
            offered_methods=("mine", "ngram"),
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_level(tmp_path_factory.mktemp("model"))


def prepared(folder: Path, request: GenerationRequest) -> PreparedRequest:
    tokenizer = Tokenizer.load(folder)
    return prepare(
        request,
        tokenizer=tokenizer,
        template=ChatTemplate.load(folder, tokenizer.special_tokens),
        vocab_size=VOCAB_SIZE,
        max_model_len=CONTEXT,
    )


def test_prepare_encodes_each_kind_of_prompt(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert prepared(folder, GOOD).prompt_ids == tokenizer.encode("hello")
    assert prepared(folder, prompt(TokenPrompt((7, 8)))).prompt_ids == (7, 8)
    ids = prepared(folder, chat(("user", "hi"))).prompt_ids
    assert ids == tokenizer.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(("max_tokens", "expected"), [(None, 4), (3, 3), (4, 4), (10_000, 4)])
def test_max_new_tokens_is_cut_to_the_context(folder: Path, max_tokens: int | None, expected: int) -> None:
    request = replace(prompt(TokenPrompt((1,) * 60)), max_tokens=max_tokens)
    assert prepared(folder, request).end.max_new_tokens == expected


def test_end_settings_are_those_of_the_model_and_the_request(folder: Path) -> None:
    request = replace(sampling(min_tokens=2, stop_token_ids=(5,), ignore_eos=True), stop=("x",))
    end = prepared(folder, request).end
    assert end.eos_token_ids == frozenset(Tokenizer.load(folder).eos_token_ids) != frozenset()
    assert (end.stop_token_ids, end.stop, end.min_tokens, end.ignore_eos) == (frozenset({5}), ("x",), 2, True)


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_prompt_over_the_context_names_its_length_and_the_limit(folder: Path, length: int) -> None:
    with pytest.raises(
        InvalidArgument, match=f"prompt has {length} tokens; at most 63 .* context of 64 tokens"
    ) as caught:
        prepared(folder, prompt(TokenPrompt((1,) * length)))
    assert caught.value.field == "prompt"
    assert prepared(folder, prompt(TokenPrompt((1,) * 63))).end.max_new_tokens == 1


def test_min_tokens_that_the_context_cannot_hold_is_refused(folder: Path) -> None:
    request = replace(prompt(TokenPrompt((1,) * 60)), sampling=SamplingParams(min_tokens=5))
    with pytest.raises(InvalidArgument, match=r"min_tokens is 5; after a prompt of 60 tokens .* has room for 4"):
        prepared(folder, request)


def test_a_chat_for_a_model_without_a_template_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match="no chat template") as caught:
        prepare(
            chat(("user", "hi")),
            tokenizer=Tokenizer.load(folder),
            template=ChatTemplate(None),
            vocab_size=VOCAB_SIZE,
            max_model_len=CONTEXT,
        )
    assert caught.value.field == "chat"


class Counting(Tokenizer):
    """Counts the characters that it was given."""

    num_chars = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens)


@pytest.mark.parametrize("chat", [False, True])
def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(tmp_path: Path, chat: bool) -> None:
    tokenizer = Counting.load(write_byte_level(tmp_path))
    assert isinstance(tokenizer, Counting)
    text = "hello " * 100_000
    asked = prompt(ChatPrompt((ChatMessage("user", text),)) if chat else TextPrompt(text))
    with pytest.raises(InvalidArgument, match=r"more tokens than the 63 that are allowed") as refused:
        prepare(
            asked,
            tokenizer=tokenizer,
            template=ChatTemplate.load(tmp_path),
            vocab_size=VOCAB_SIZE,
            max_model_len=CONTEXT,
        )
    assert refused.value.field == "prompt"
    assert tokenizer.num_chars < len(text) / 10


def test_a_long_text_of_few_tokens_is_read_to_its_end(tmp_path: Path) -> None:
    tokenizer = Counting.load(write_byte_level(tmp_path))
    assert isinstance(tokenizer, Counting)
    text = "hello " * 10_000
    num_tokens = len(tokenizer.encode(text))
    tokenizer.num_chars = 0
    ready = prepare(
        prompt(TextPrompt(text)),
        tokenizer=tokenizer,
        template=ChatTemplate.load(tmp_path),
        vocab_size=VOCAB_SIZE,
        max_model_len=num_tokens + 1,
    )
    assert ready.prompt_ids == tokenizer.encode(text)
    with pytest.raises(InvalidArgument, match=f"prompt has {num_tokens} tokens"):
        prepare(
            prompt(TextPrompt(text)),
            tokenizer=tokenizer,
            template=ChatTemplate.load(tmp_path),
            vocab_size=VOCAB_SIZE,
            max_model_len=num_tokens,
        )
