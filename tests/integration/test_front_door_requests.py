"""Requests that can never work: each door names the same field and the same limit, and nobody else is hurt."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from paceline.errors import InvalidArgument, NotFound
from paceline.messages import SamplingParams
from paceline.text.request import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    SpeculationOptions,
    TextPrompt,
    TokenPrompt,
)
from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import GREEDY, VOCAB, plain_tokens
from tests.integration.front_door import FrontDoor, body_of, content_of, error_of, front_door
from tests.integration.http_calls import CHAT, COMPLETIONS

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAW = hash_law(VOCAB, seed=41)
PROMPT = [1, 2, 3]
GOOD = GenerationRequest(TokenPrompt((1, 2, 3)), sampling=GREEDY, max_tokens=9)
INT32, INT64 = 2**31, 2**63
LONE = "ab\ud800"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path_factory.mktemp("front"), LAW) as front:
        yield front


def greedy(**changes: Any) -> dict[str, Any]:
    return {"sampling": dataclasses.replace(GREEDY, **changes)}


def said(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"prompt": ChatPrompt(tuple([ChatMessage(role, content) for role, content in turns]))}


def ids(*tokens: int) -> dict[str, Any]:
    return {"prompt": TokenPrompt(tokens)}


def speculation(**options: Any) -> dict[str, Any]:
    return {"speculation": SpeculationOptions(**options)}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "empty text": ({"prompt": TextPrompt("")}, "prompt", "at least one"),
    "no ids": (ids(), "prompt", "at least one"),
    "no messages": (said(), "messages", "1 to"),
    "empty messages": (said(("user", "")), "prompt", "at least one"),
    "too many messages": (said(*[("user", "a")] * 4097), "messages", "4096"),
    "unknown role": (said(("robot", "a")), "messages[0].role", "system, user"),
    "id of the vocabulary's size": (ids(1, VOCAB), "prompt", f"[0, {VOCAB})"),
    "negative id": (ids(1, -1), "prompt", f"[0, {VOCAB})"),
    "id beyond 32 bits": (ids(1, INT32), "prompt", ""),
    "id below 32 bits": (ids(-INT32 - 1), "prompt", ""),
    "id beyond 64 bits": (ids(INT64), "prompt", ""),
    "id beyond everything": (ids(10**1000), "prompt", ""),
    "prompt over the context": (ids(*[1] * 256), "prompt", "at most 255"),
    "text over the context": ({"prompt": TextPrompt("a" * 300)}, "prompt", "at most 255"),
    "messages over the context": (said(("user", "a" * 200), ("user", "a" * 100)), "prompt", "at most 255"),
    "stop id of the vocabulary's size": (greedy(stop_token_ids=(3, VOCAB)), "stop_token_ids", f"[0, {VOCAB})"),
    "negative stop id": (greedy(stop_token_ids=(-1,)), "stop_token_ids", f"[0, {VOCAB})"),
    "stop id beyond 64 bits": (greedy(stop_token_ids=(INT64,)), "stop_token_ids", ""),
    "too many stop ids": (greedy(stop_token_ids=(1,) * 257), "stop_token_ids", "at most 256"),
    "bias of the vocabulary's size": (greedy(logit_bias={VOCAB: 1.0}), "logit_bias", f"[0, {VOCAB})"),
    "bias of a negative id": (greedy(logit_bias={-1: 1.0}), "logit_bias", f"[0, {VOCAB})"),
    "bias beyond 32 bits": (greedy(logit_bias={INT32: 1.0}), "logit_bias", ""),
    "bias beyond 64 bits": (greedy(logit_bias={INT64: 1.0}), "logit_bias", ""),
    "bias too large": (greedy(logit_bias={1: 100.5}), "logit_bias", "[-100, 100]"),
    "bias without end": (greedy(logit_bias={1: -math.inf}), "logit_bias", "[-100, 100]"),
    "bias that is no number": (greedy(logit_bias={1: math.nan}), "logit_bias", ""),
    "empty stop": ({"stop": ("",)}, "stop", "at least one character"),
    "empty stop among others": ({"stop": ("a", "")}, "stop", "at least one character"),
    "long stop": ({"stop": ("a" * 257,)}, "stop", "at most 256"),
    "too many stops": ({"stop": ("a",) * 17}, "stop", "at most 16"),
    "lone surrogate in the prompt": ({"prompt": TextPrompt(LONE)}, "prompt", "surrogate"),
    "lone surrogate in a message": (said(("user", "a"), ("user", LONE)), "messages[1].content", "surrogate"),
    "lone surrogate in a role": (said((LONE, "a")), "messages[0].role", ""),
    "lone surrogate in a stop": ({"stop": ("b", LONE)}, "stop", "surrogate"),
    "lone surrogate in the session": ({"session": LONE}, "session", ""),
    "lone surrogate in the method": (speculation(method=LONE), "speculation.method", ""),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "[1, "),
    "max_tokens -1": ({"max_tokens": -1}, "max_tokens", "[1, "),
    "max_tokens beyond 32 bits": ({"max_tokens": INT32}, "max_tokens", str(INT32 - 1)),
    "max_tokens beyond 64 bits": ({"max_tokens": INT64}, "max_tokens", str(INT32 - 1)),
    "temperature -1": (greedy(temperature=-1.0), "temperature", "[0, 100]"),
    "temperature 1000": (greedy(temperature=1000.0), "temperature", "[0, 100]"),
    "temperature without end": (greedy(temperature=math.inf), "temperature", "[0, 100]"),
    "temperature that is no number": (greedy(temperature=math.nan), "temperature", ""),
    "top_p 0": (greedy(top_p=0.0), "top_p", "(0, 1]"),
    "top_p 1.5": (greedy(top_p=1.5), "top_p", "(0, 1]"),
    "top_p that is no number": (greedy(top_p=math.nan), "top_p", ""),
    "top_k -2": (greedy(top_k=-2), "top_k", "at least 0"),
    "top_k beyond 64 bits": (greedy(top_k=INT64), "top_k", ""),
    "min_p 2": (greedy(min_p=2.0), "min_p", "[0, 1]"),
    "repetition_penalty 0": (greedy(repetition_penalty=0.0), "repetition_penalty", "[0.01, 100]"),
    "presence_penalty 3": (greedy(presence_penalty=3.0), "presence_penalty", "[-2, 2]"),
    "frequency_penalty -3": (greedy(frequency_penalty=-3.0), "frequency_penalty", "[-2, 2]"),
    "min_tokens over max_tokens": (greedy(min_tokens=10), "min_tokens", "max_tokens, which is 9"),
    "min_tokens over the context": (greedy(min_tokens=254) | {"max_tokens": None}, "min_tokens", "room for 253"),
    "min_tokens -1": (greedy(min_tokens=-1), "min_tokens", "[0, "),
    "too many alternatives": (greedy(top_logprobs=21), "top_logprobs", "[0, 20]"),
    "seed beyond 64 bits": ({"seed": INT64}, "seed", ""),
    "session with a space": ({"session": "a b"}, "session", "128"),
    "session without a name": ({"session": ""}, "session", "128"),
    "session with a long name": ({"session": "a" * 129}, "session", "128"),
    "session of another line": ({"session": "a\n"}, "session", "128"),
    "method with a bad name": (speculation(method="No!"), "speculation.method", "64"),
    "method with a long name": (speculation(method="a" * 65), "speculation.method", "64"),
    "method that nobody has": (speculation(method="lookahead"), "speculation.method", "draft_model, ngram"),
    "block of 65": (speculation(num_speculative_tokens=65), "speculation.num_speculative_tokens", "[0, 64]"),
    "block of -1": (speculation(num_speculative_tokens=-1), "speculation.num_speculative_tokens", "[0, 64]"),
}
HTTP_NAMES = {"session": "session_id", "prompt": "messages", "top_logprobs": "logprobs"}


@pytest.mark.parametrize("name", REFUSED)
async def test_every_door_names_the_field_and_the_limit(front: FrontDoor, name: str) -> None:
    changes, field, limit = REFUSED[name]
    request = dataclasses.replace(GOOD, **changes)
    for door in front.doors:
        with pytest.raises(InvalidArgument) as caught:
            await door.generate(request)
        named = caught.value.field
        # An entry of a list may be named, and HTTP has some names of its own.
        assert named.startswith(field) or (door.name != "grpc" and named == HTTP_NAMES[field])
        assert limit in caught.value.message
        assert len(caught.value.message) < 6000
    assert not front.fleet.gateway.sessions.num_running
    good = front.doors[len(name) % len(front.doors)]
    assert list((await good.generate(GOOD)).token_ids) == plain_tokens(LAW, PROMPT, 9)


async def test_a_model_that_is_not_served_is_not_found(front: FrontDoor) -> None:
    for door in front.doors:
        for model in ("other", "TOY", "toy ", "../toy", "a" * 5000, "\u0000"):
            with pytest.raises(NotFound, match="'toy'") as caught:
                await door.generate(dataclasses.replace(GOOD, model=model))
            assert caught.value.field == "model"
        assert (await door.generate(dataclasses.replace(GOOD, model="toy"))).completion_tokens == 9


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
async def test_numbers_of_choices(front: FrontDoor, endpoint: str, stream: bool) -> None:
    prompt = said(("user", "abc")) if endpoint == CHAT else {}
    for number in (0, -1, 33, INT64):
        body = body_of(dataclasses.replace(GOOD, **prompt), n=number, stream=stream)
        response = await front.http.post(f"/v1/{endpoint}", content=content_of(body))
        error = error_of(response)
        assert (type(error), error.field) == (InvalidArgument, "n")
        assert "[1, 32]" in error.message


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS])
async def test_bytes_that_are_no_text(front: FrontDoor, endpoint: str) -> None:
    request = dataclasses.replace(GOOD, **(said(("user", "abc")) if endpoint == CHAT else {}))
    body = content_of(body_of(request, user="HERE"))
    for wrong in (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"):
        error = error_of(await front.http.post(f"/v1/{endpoint}", content=body.replace(b"HERE", wrong)))
        assert isinstance(error, InvalidArgument)
        assert "JSON" in error.message


async def test_doors_understand_a_request_alike(front: FrontDoor) -> None:
    sampling = SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=20,
        min_p=0.01,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=-0.2,
        logit_bias={3: -100.0, 4: 2.0},
        min_tokens=30,
        stop_token_ids=(7,),
        ignore_eos=True,
    )
    request = dataclasses.replace(GOOD, sampling=sampling, seed=-5, max_tokens=40)
    usual = dataclasses.replace(request, sampling=SamplingParams(ignore_eos=True))
    answers = [await door.generate(request) for door in front.doors]
    assert answers == answers[:1] * 3
    assert answers[0].completion_tokens >= 30
    others = [await door.generate(usual) for door in front.doors]
    assert others == others[:1] * 3
    assert others[0] != answers[0]
