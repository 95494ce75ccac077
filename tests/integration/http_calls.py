"""HTTP requests to a fleet and what comes back, counted every way there is.

async with http_fleet(tmp_path, LAW) as (fleet, http):
    whole = await ask(http, "completions", prompt=[1, 2, 3], max_tokens=9)
    stream = await ask_stream(http, "completions", prompt=[1, 2, 3], max_tokens=9)
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.toy_runner import Law
from tests.integration.fleet import TIMEOUT_S, Fleet, perfect_method

CHAT, COMPLETIONS = "chat/completions", "completions"
ENDPOINTS = (CHAT, COMPLETIONS)


@contextlib.asynccontextmanager
async def http_fleet(folder: Path, law: Law, **options: Any) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """A fleet with a perfect drafter and an HTTP server, and a client of it."""
    settings = {"http_port": 0, **options.pop("settings", {})}
    options.setdefault("method", perfect_method(law))
    async with Fleet.start(folder, law, settings=settings, **options) as fleet, http_client(fleet) as http:
        yield fleet, http


def http_client(fleet: Fleet) -> httpx.AsyncClient:
    # No pool limits: a crowd shall not wait in its own client.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=fleet.http_url, timeout=TIMEOUT_S, limits=limits)


def asking(endpoint: str, prompt: str, **fields: Any) -> dict[str, Any]:
    """A body for either endpoint."""
    if endpoint == CHAT:
        return {"messages": [{"role": "user", "content": prompt}], **fields}
    return {"prompt": prompt, **fields}


async def post(http: httpx.AsyncClient, endpoint: str, body: Any, **headers: str) -> httpx.Response:
    return await http.post(f"/v1/{endpoint}", json=body, headers=headers)


@dataclass
class Choice:
    """One choice, whole or gathered from a stream."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Any] = field(default_factory=list)
    text_offset: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    roles: int = 0
    metrics: Any = None

    def add_logprobs(self, logprobs: Any) -> None:
        if logprobs is None:
            return
        if "content" in logprobs:
            self.tokens += [entry["token"] for entry in logprobs["content"]]
            self.token_logprobs += [entry["logprob"] for entry in logprobs["content"]]
            self.top_logprobs += [
                {top["token"]: top["logprob"] for top in entry["top_logprobs"]} for entry in logprobs["content"]
            ]
        else:
            self.tokens += logprobs["tokens"]
            self.token_logprobs += logprobs["token_logprobs"]
            self.top_logprobs += logprobs["top_logprobs"]
            self.text_offset += logprobs["text_offset"]


@dataclass
class Answer:
    """The choices in order of their index, and the counts."""

    choices: list[Choice]
    usage: dict[str, int] | None

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    def check_counts(self, prompts: Sequence[Sequence[int]] | None = None) -> None:
        """The same number, whichever way it is counted; for requests with ids, log-probabilities and usage."""
        assert self.usage is not None
        for choice in self.choices:
            assert len(choice.token_ids) == len(choice.tokens) == len(choice.token_logprobs) == len(choice.top_logprobs)
        assert self.usage["completion_tokens"] == sum(len(choice.token_ids) for choice in self.choices)
        if prompts is not None:
            assert self.usage["prompt_tokens"] == sum(map(len, prompts))
        assert self.usage["total_tokens"] == self.usage["prompt_tokens"] + self.usage["completion_tokens"]


async def ask(http: httpx.AsyncClient, endpoint: str, **body: Any) -> Answer:
    """A request without a stream."""
    response = await post(http, endpoint, body)
    assert response.status_code == 200, response.text
    said = response.json()
    choices = []
    for index, raw in enumerate(said["choices"]):
        assert raw["index"] == index
        choice = Choice(finish_reason=raw["finish_reason"], metrics=raw.get("metrics"))
        choice.text = raw["message"]["content"] if endpoint == CHAT else raw["text"]
        choice.token_ids = raw.get("token_ids", [])
        choice.prompt_token_ids = (said if endpoint == CHAT else raw).get("prompt_token_ids", [])
        choice.add_logprobs(raw["logprobs"])
        choices.append(choice)
    return Answer(choices, said["usage"])


async def events_of(http: httpx.AsyncClient, endpoint: str, **body: Any) -> list[dict[str, Any]]:
    """All events of a stream that ends as it should."""
    async with http.stream("POST", f"/v1/{endpoint}", json={"stream": True, **body}) as response:
        lines = [line async for line in response.aiter_lines()]
        assert response.status_code == 200, lines
        assert response.headers["content-type"].startswith("text/event-stream")
    assert all(line == "" for line in lines[1::2]), "every event is one line and an empty one"
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2:2]]


async def ask_stream(http: httpx.AsyncClient, endpoint: str, **body: Any) -> Answer:
    """A request with a stream, gathered, and checked for its form."""
    return gather(endpoint, await events_of(http, endpoint, **body), bool(body.get("stream_options")))


def gather(endpoint: str, events: Sequence[dict[str, Any]], include_usage: bool) -> Answer:
    choices: dict[int, Choice] = {}
    usage = None
    heads = {
        (said["id"], said["created"], said["model"], said["system_fingerprint"], said["object"]) for said in events
    }
    assert len(heads) == 1
    for number, said in enumerate(events):
        assert ("usage" in said) == include_usage
        if include_usage and number == len(events) - 1:
            assert said["choices"] == []
            usage = said["usage"]
            continue
        assert said.get("usage") is None
        (raw,) = said["choices"]
        first = raw["index"] not in choices
        choice = choices.setdefault(raw["index"], Choice())
        assert choice.finish_reason is None, "nothing comes after the last chunk of a choice"
        choice.finish_reason = raw["finish_reason"]
        choice.metrics = raw.get("metrics")
        if endpoint == CHAT:
            assert ("role" in raw["delta"]) == first
            choice.roles += raw["delta"].get("role") == "assistant"
            choice.text += raw["delta"].get("content", "")
        else:
            choice.text += raw["text"]
        choice.token_ids += raw.get("token_ids", [])
        choice.prompt_token_ids += (said if endpoint == CHAT else raw).get("prompt_token_ids", [])
        choice.add_logprobs(raw["logprobs"])
    assert sorted(choices) == list(range(len(choices)))
    assert all(choice.finish_reason is not None for choice in choices.values())
    assert endpoint != CHAT or all(choice.roles == 1 for choice in choices.values())
    return Answer([choices[index] for index in sorted(choices)], usage)


def error_of(response: httpx.Response) -> tuple[int, str, str | None, str]:
    """Status, type, param and code; checks the shape."""
    body = response.json()
    assert body.keys() == {"error"}
    error = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return response.status_code, error["type"], error["param"], error["code"]


def invalid(param: str | None) -> tuple[int, str, str | None, str]:
    return 400, "invalid_request_error", param, "invalid_argument"
