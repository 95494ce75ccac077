"""What a whole fleet writes to its logs: who and what each line is about, and never what was asked, said or shown."""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from paceline.errors import InvalidArgument, ModelError, PacelineError, Unauthenticated
from paceline.generation import Chunk
from paceline.messages import SamplingParams
from paceline.runtime.logs import JsonFormatter
from paceline.text.request import ChatMessage, ChatPrompt, Prompt, TextPrompt
from tests.fakes.tiny_tokenizer import LETTERS
from tests.fakes.toy_runner import hash_law, poisoned_law
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method
from tests.integration.paced import streaming
from tests.integration.test_api_keys import ALICE, keys_file

LAW = hash_law(VOCAB, seed=5)
MARKER = "zqjxkvwyqzj"
"""Letters that no log line has by chance; the toy's tokenizer has a token for each of them."""
POISON = "bad"
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)
OTHERS_KEY = "sk-mallory-0123456789abcdef"


class Lines(logging.Handler):
    """Every record as the JSON line that a service would write; the test's own HTTP client left out."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.setFormatter(JsonFormatter("fleet"))
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.name.startswith(("httpx", "httpcore")):
            self.lines.append(self.format(record))

    def entries(self, message: str, **fields: object) -> list[dict[str, Any]]:
        """Lines of a message with certain fields."""
        entries: list[dict[str, Any]] = [json.loads(line) for line in self.lines]
        return [entry for entry in entries if entry["message"] == message and fields.items() <= entry.items()]

    def one(self, message: str, **fields: object) -> dict[str, Any]:
        (entry,) = self.entries(message, **fields)
        return entry


@pytest.fixture
def log() -> Iterator[Lines]:
    handler, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield handler
    root.removeHandler(handler)
    root.setLevel(level)


def id_lists(tokens: Sequence[int]) -> list[str]:
    """Any three neighbouring ids as lists and tuples are written."""
    return [", ".join(map(str, tokens[at : at + 3])) for at in range(len(tokens) - 2)]


async def everything_that_can_happen(fleet: Fleet) -> list[str]:
    """Good, bad, failing and cancelled requests on both doors; returns the texts that were generated."""
    texts: list[str] = []
    async with fleet.client(ALICE) as client:
        for prompt in (TextPrompt(MARKER), ChatPrompt((ChatMessage("user", MARKER),))):
            run = await generate(client, fleet.request(prompt, sampling=ENDLESS, session="kept"))
            texts.append(run.text)
        for changes in ({"stop": ("",)}, {"prompt": ChatPrompt((ChatMessage(MARKER, MARKER),))}, {"model": MARKER}):
            with pytest.raises(PacelineError):
                await generate(client, fleet.request(**({"prompt": TextPrompt(MARKER)} | changes)))
        with pytest.raises(ModelError):
            await generate(client, fleet.request(TextPrompt(POISON + MARKER), sampling=ENDLESS))
        stream = client.generate(fleet.request(TextPrompt(MARKER), max_tokens=200, sampling=ENDLESS))
        texts += [event.text async for event in _first(stream, 4) if isinstance(event, Chunk)]
        await stream.aclose()
        await fleet.verifiers[0].kill()
        await fleet.verifiers[0].boot()
        texts.append((await generate(client, fleet.request(TextPrompt(MARKER), sampling=ENDLESS))).text)
    async with fleet.client(OTHERS_KEY) as client:
        with pytest.raises(Unauthenticated):
            await client.list_models()
    async with httpx.AsyncClient(base_url=f"http://{fleet.gateway.addresses['http']}") as http:
        body: dict[str, Any] = {"model": "toy", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        for key, wrong in (
            (ALICE, {}),
            (OTHERS_KEY, {}),
            (ALICE, {"stop": 7, MARKER: MARKER}),
            (ALICE, {"logit_bias": {MARKER: 1}}),
            (ALICE, {"logit_bias": {MARKER: MARKER}}),
            (ALICE, {"speculation": {MARKER: MARKER}}),
            (ALICE, {"model": f"it's '{MARKER}'"}),
        ):
            answer = await http.post(
                "/v1/completions",
                json=body | {"prompt": MARKER} | wrong,
                headers={"Authorization": f"Bearer {key}", "X-Request-Id": "over-http"},
            )
            if answer.status_code == 200:
                texts.append(answer.json()["choices"][0]["text"])
    return texts


async def _first(stream: Any, count: int) -> AsyncIterator[Any]:
    for _ in range(count):
        yield await anext(stream)


@contextlib.asynccontextmanager
async def talkative(folder: Path, **settings: Any) -> AsyncIterator[Fleet]:
    """A fleet with keys and HTTP, whose target fails on a certain prompt."""
    poison = tuple(LETTERS.index(letter) for letter in POISON)
    law = poisoned_law(LAW, lambda prefix: tuple(prefix[: len(poison)]) == poison and len(prefix) > 16)
    settings = {"api_keys_file": keys_file(folder), "http_port": 0, **settings}
    async with Fleet.start(folder, law, method=perfect_method(LAW), settings=settings) as fleet:
        yield fleet


async def test_no_line_at_any_level_has_a_prompt_a_text_ids_or_a_key(tmp_path: Path, log: Lines) -> None:
    async with talkative(tmp_path) as fleet:
        texts = await everything_that_can_happen(fleet)
        prompt_ids = fleet.tokenizer.encode(MARKER)
    assert len(texts) >= 5
    written = "\n".join(log.lines)
    assert len(log.entries("generation ended")) >= 6, "the test must have seen what it is about"
    assert log.entries("command failed", code="model_error")
    assert {"grpc", "http"} == {"grpc" if "rpc" in entry else "http" for entry in log.entries("request refused")}
    for text in (MARKER, *[text[:8] for text in texts if len(text) >= 8]):
        assert text not in written
    for ids in (prompt_ids, *[fleet.tokenizer.encode(text) for text in texts]):
        assert not [found for found in id_lists(ids) if found in written]
    for secret in (ALICE, OTHERS_KEY, "sk-"):
        assert secret not in written


@pytest.mark.parametrize(
    ("prompt", "logged"),
    [
        (TextPrompt(MARKER), MARKER),
        (ChatPrompt((ChatMessage("system", "a"), ChatMessage("user", MARKER))), f"system: a\nuser: {MARKER}"),
    ],
)
async def test_with_log_prompts_both_are_there(tmp_path: Path, log: Lines, prompt: Prompt, logged: str) -> None:
    async with talkative(tmp_path, log_prompts=True) as fleet, fleet.client(ALICE) as client:
        run = await generate(client, fleet.request(prompt, sampling=ENDLESS))
    assert log.one("generation started")["prompt"] == logged
    assert log.one("generation ended")["text"] == run.text
    assert ALICE not in "\n".join(log.lines)


async def test_with_log_prompts_token_ids_are_logged_as_such(tmp_path: Path, log: Lines) -> None:
    async with talkative(tmp_path, log_prompts=True) as fleet, fleet.client(ALICE) as client:
        await generate(client, fleet.request([1, 2, 3]))
    assert log.one("generation started")["prompt"] == "token ids [1, 2, 3]"


async def test_each_generation_has_its_two_lines(tmp_path: Path, log: Lines) -> None:
    async with talkative(tmp_path) as fleet, fleet.client(ALICE) as client:
        request = fleet.request([1, 2, 3], session="s-1", sampling=ENDLESS)
        events = [event async for event in client.generate(request, request_id="r-1")]
        assert events
        poisoned = fleet.request(TextPrompt(POISON + MARKER), session="s-2")
        with pytest.raises(ModelError):
            [event async for event in client.generate(poisoned, request_id="r-2")]
        await fleet.quiet()
    names = {"request_id": "r-1", "session": "s-1", "tenant": "alice"}
    started, ended = log.one("generation started", **names), log.one("generation ended", **names)
    assert (started["prompt_tokens"], started["max_tokens"]) == (3, 20)
    assert started["epoch"] > 0
    assert (ended["outcome"], ended["completion_tokens"], ended["reason"]) == ("length", 20, "")
    assert ended["target_passes"] > 0
    failed = log.one("generation ended", request_id="r-2", session="s-2", tenant="alice")
    assert failed["outcome"] == "model_error"
    assert failed["reason"]
    assert {"prompt", "text"}.isdisjoint(set(started) | set(ended))


async def test_lines_of_any_part_name_the_request_and_the_session(
    tmp_path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors deep inside, and the replicas' own lines, have no idea of requests; the context adds them."""
    async with talkative(tmp_path) as fleet, fleet.client(ALICE) as client:

        async def broken(_append: object) -> None:
            raise RuntimeError("scripted")

        monkeypatch.setattr(fleet.gateway.store, "append", broken)
        request = fleet.request([1, 2, 3], session="s-1")
        assert [event async for event in client.generate(request, request_id="r-1")]
        with pytest.raises(InvalidArgument):
            [event async for event in client.generate(fleet.request([]), request_id="r-2")]
        monkeypatch.undo()
        await fleet.quiet()
    broken_lines = log.entries("the session store failed unexpectedly")
    assert broken_lines
    assert {(entry["request_id"], entry["session"]) for entry in broken_lines} == {("r-1", "s-1")}
    refused = log.one("request refused")
    assert (refused["request_id"], refused["code"], refused["field"]) == ("r-2", "invalid_argument", "prompt")
    # The verifier's and the drafter's lines about the session have its name, and no request's.
    for message in ("session opened", "session closed"):
        assert [entry["session"] for entry in log.entries(message)] == ["s-1", "s-1"]


async def test_a_generation_that_is_cut_off_has_its_end_line_too(
    tmp_path: Path, log: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with streaming(tmp_path, request={"session": "s"}) as (fleet, stream):
        await stream.tokens(5)
        (actor,) = fleet.gateway.sessions.actors

        def broken() -> None:
            raise RuntimeError("scripted")

        monkeypatch.setattr(actor, "_settle", broken)
        with pytest.raises(PacelineError, match="internal error"):
            await stream.rest()
    assert log.one("generation ended", session="s")["outcome"] == "cut_off"
    assert "scripted" in log.one("a session failed unexpectedly", session="s")["traceback"]


async def test_generations_at_once_do_not_mix_their_names(tmp_path: Path, log: Lines) -> None:
    async with talkative(tmp_path) as fleet, fleet.client(ALICE) as client:
        streams = [
            client.generate(fleet.request([1, index], session=f"s-{index}"), request_id=f"r-{index}")
            for index in range(8)
        ]
        for stream in streams:
            await anext(stream)
        for stream in streams:
            assert [event async for event in stream]
        await fleet.quiet()
    named = [json.loads(line) for line in log.lines if '"request_id"' in line and '"session"' in line]
    assert len(named) >= 16
    for entry in named:
        assert re.sub("^r", "s", entry["request_id"]) == entry["session"]
