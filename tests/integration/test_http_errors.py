"""What goes wrong over HTTP, and how it is told: bad requests, overload, draining, failing."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.fakes.toy_runner import cycle_law, hash_law, poisoned_law
from tests.integration.fleet import VOCAB, until
from tests.integration.http_calls import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    ask,
    asking,
    error_of,
    http_fleet,
    invalid,
    post,
)
from tests.integration.paced import Pace, PacedRunner

LAW = hash_law(VOCAB, seed=21)
PROMPT = [1, 2, 3]


# --- requests that can never work -------------------------------------------------------------------------------------

BAD_FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e999}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"logit_bias": {"32": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"stop_token_ids": [32]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 10**30}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"n": 0}, "n"),
    ({"n": 10**6}, "n"),
    ({"session_id": "no spaces"}, "session_id"),
    ({"speculation": {"method": "No!"}}, "speculation.method"),
    ({"speculation": {"num_speculative_tokens": 65}}, "speculation.num_speculative_tokens"),
    ({"acceptance_rule": "typical"}, "acceptance_rule"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"guided_json": {}}, "guided_json"),
    ({"temprature": 1}, "temprature"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
]


async def test_a_bad_field_is_named_and_nothing_runs(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http):
        for endpoint in ENDPOINTS:
            for fields, param in BAD_FIELDS:
                for stream in (False, True):
                    body = json.dumps(asking(endpoint, "abc", stream=stream, **fields))
                    response = await http.post(
                        f"/v1/{endpoint}",
                        content=body.replace("Infinity", "1e999"),
                        headers={"Content-Type": "application/json"},
                    )
                    if stream and param == "stream_options":
                        assert response.status_code == 200
                    else:
                        assert error_of(response) == invalid(param), (endpoint, fields)
                        assert param.rpartition(".")[2] in response.json()["error"]["message"]
        assert (await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=3)).usage
        await fleet.quiet()


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (COMPLETIONS, {"prompt": []}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], []]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": ["a", ""]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1, 32]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1], [1, -1]]}, "prompt[1]"),
        (COMPLETIONS, {"prompt": [1] * 256}, "prompt"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": ["a"] * 33}, "prompt"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "narrator", "content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": ""}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 256}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
async def test_a_bad_prompt_is_named(tmp_path: Path, endpoint: str, body: dict[str, Any], param: str) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        response = await post(http, endpoint, body)
        assert error_of(response) == invalid(param)
        assert param in response.json()["error"]["message"]


async def test_bodies_that_are_no_request(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        for content in (b"", b"{", b"[]", b"\xff", b"[" * 50_000):
            response = await http.post("/v1/completions", content=content)
            assert error_of(response) == invalid(None)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml"):
            response = await http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
            assert error_of(response) == invalid(None)
            assert "Content-Type: application/json" in response.json()["error"]["message"]
        # A page of another site may send bytes of no type; then the browser says where the page is from.
        untyped = await http.post(
            "/v1/completions", content=b'{"prompt": "a"}', headers={"Origin": "https://x.example"}
        )
        assert error_of(untyped) == invalid(None)
        for kind in ("application/json", "application/json; charset=utf-8", "Application/JSON"):
            response = await http.post(
                "/v1/completions", content=b'{"prompt": "a", "max_tokens": 1}', headers={"Content-Type": kind}
            )
            assert response.status_code == 200


async def test_load_balancers_may_ask_for_the_head_only(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http):
        for path in ("/health", "/ready", "/version"):
            asked, whole = await http.head(path), await http.get(path)
            assert (asked.status_code, asked.content) == (200, b"")
            assert asked.headers["content-length"] == whole.headers["content-length"] == str(len(whole.content))
        await fleet.verifiers[0].kill()
        await until(lambda: not fleet.verifier_pool.snapshot.ready)
        assert ((await http.head("/ready")).status_code, (await http.head("/health")).status_code) == (503, 200)
        await fleet.verifiers[0].boot()


async def test_unknown_models_paths_and_methods(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        for endpoint in ENDPOINTS:
            response = await post(http, endpoint, asking(endpoint, "a", model="gpt-5", stream=True))
            assert error_of(response) == (404, "not_found_error", "model", "not_found")
        for path in ("/", "/v1", "/v1/", "/v1/embeddings", "/v1/chat/completions/", "/docs", "/redoc", "/%00"):
            assert error_of(await http.get(path)) == (404, "not_found_error", None, "not_found")
        assert error_of(await http.get("/v1/models/gpt-5")) == (404, "not_found_error", "model", "not_found")
        response = await http.get("/v1/completions")
        assert error_of(response) == (405, "invalid_request_error", None, "method_not_allowed")
        assert response.headers["allow"] == "POST"


# --- not now ----------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def held(folder: Path, **options: Any) -> AsyncIterator[tuple[Any, httpx.AsyncClient, Pace]]:
    """A fleet whose passes wait."""
    pace = Pace()
    options = {"runner": lambda law: PacedRunner(law, pace), **options}
    async with http_fleet(folder, LAW, **options) as (fleet, http):
        try:
            yield fleet, http, pace
        finally:
            pace.open()


async def test_overload(tmp_path: Path) -> None:
    async with held(tmp_path, settings={"max_concurrent_generations": 2}) as (fleet, http, pace):
        body = {"prompt": PROMPT, "max_tokens": 3}
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(post(http, COMPLETIONS, body)) for _ in range(2)]
            await until(lambda: fleet.gateway.sessions.num_running == 2)
            for stream in (False, True):
                response = await post(http, COMPLETIONS, {**body, "stream": stream})
                assert error_of(response) == (429, "rate_limit_error", None, "capacity_exceeded")
                assert int(response.headers["retry-after"]) >= 1
            async with openai.AsyncOpenAI(base_url=f"{fleet.http_url}/v1", api_key="x", max_retries=0) as client:
                with pytest.raises(openai.RateLimitError):
                    await client.completions.create(model="toy", prompt="a")
            pace.open()
        assert [task.result().status_code for task in running] == [200, 200]


async def test_choices_that_do_not_all_fit_leave_none_behind(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW, settings={"max_concurrent_generations": 2}) as (fleet, http):
        response = await post(http, COMPLETIONS, {"prompt": PROMPT, "n": 3, "max_tokens": 200})
        assert error_of(response) == (429, "rate_limit_error", None, "capacity_exceeded")
        await fleet.quiet()
        assert len((await ask(http, COMPLETIONS, prompt=PROMPT, n=2, max_tokens=3)).choices) == 2


async def test_a_running_session_is_busy(tmp_path: Path) -> None:
    async with held(tmp_path) as (_, http, pace):
        body = {"prompt": PROMPT, "max_tokens": 3, "session_id": "mine"}
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(post(http, COMPLETIONS, body))
            await pace.entered()
            for stream in (False, True):
                response = await post(http, COMPLETIONS, {**body, "stream": stream})
                assert error_of(response) == (409, "conflict_error", "session_id", "session_busy")
                assert "'mine'" in response.json()["error"]["message"]
            pace.open()
        assert first.result().status_code == 200


async def test_without_a_verifier(tmp_path: Path) -> None:
    settings = {"verifier_wait_ms": 10}
    async with http_fleet(tmp_path, LAW, settings=settings) as (fleet, http):
        ready = await http.get("/ready")
        assert ready.json() == {"status": "ready"}
        assert "connection" not in ready.headers
        assert (await http.get("/health")).json()["status"] == "ok"
        await fleet.verifiers[0].kill()
        await until(lambda: not fleet.verifier_pool.snapshot.ready)
        response = await post(http, COMPLETIONS, {"prompt": PROMPT, "stream": True})
        assert error_of(response) == (503, "server_error", None, "unavailable")
        assert response.headers["retry-after"] == "1"
        assert error_of(await http.get("/ready"))[0] == 503
        health = await http.get("/health")
        assert health.status_code == 200
        assert health.json() == {
            "status": "degraded",
            "state": "serving",
            "verifiers": 0,
            "drafters": 1,
            "store": "ok",
        }
        assert (await http.get("/v1/models")).json()["data"][0]["max_model_len"] is None


async def test_without_a_drafter_it_is_degraded_and_ready(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http):
        await fleet.drafters[0].kill()
        await until(lambda: not fleet.drafter_pool.snapshot.ready)
        assert (await http.get("/health")).json()["status"] == "degraded"
        assert (await http.get("/ready")).status_code == 200


async def test_while_draining(tmp_path: Path) -> None:
    async with held(tmp_path) as (fleet, http, pace):
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(post(http, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 3}))
            await pace.entered()
            draining = tasks.create_task(fleet.gateway.drain())
            await until(lambda: fleet.gateway.sessions.draining)
            assert error_of(await http.get("/ready"))[0] == 503
            assert (await http.get("/health")).json()["state"] == "draining"
            refused = await post(http, COMPLETIONS, {"prompt": PROMPT})
            assert error_of(refused)[0] == 503
            # The next request shall find another gateway.
            assert refused.headers["connection"] == "close"
            assert not draining.done()
            pace.open()
        assert running.result().status_code == 200


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_failure_before_the_first_token_is_an_error_status(tmp_path: Path) -> None:
    law = poisoned_law(LAW, lambda prefix: len(prefix) >= 3)
    async with http_fleet(tmp_path, law, method=None) as (_, http):
        for endpoint in ENDPOINTS:
            for stream in (False, True):
                response = await post(http, endpoint, asking(endpoint, "abc", stream=stream))
                assert error_of(response) == (500, "server_error", None, "model_error")


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_failure_after_the_first_token_is_an_error_event(tmp_path: Path, endpoint: str) -> None:
    law = poisoned_law(cycle_law([3, 5, 7], VOCAB), lambda prefix: len(prefix) >= 8)
    async with http_fleet(tmp_path, law, method=None) as (fleet, http):
        body = asking(endpoint, "abc", n=2, max_tokens=20, return_token_ids=True)
        async with http.stream("POST", f"/v1/{endpoint}", json={**body, "stream": True}) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert response.status_code == 200
        *chunks, last = [json.loads(line.removeprefix("data: ")) for line in lines]
        assert last.keys() == {"error"}
        assert (last["error"]["code"], last["error"]["type"]) == ("model_error", "server_error")
        assert chunks
        assert all(choice["finish_reason"] is None for chunk in chunks for choice in chunk["choices"])
        response = await post(http, endpoint, body)
        assert error_of(response)[0] == 500
        await fleet.quiet()


async def test_the_official_client_sees_the_failure_of_a_stream(tmp_path: Path) -> None:
    law = poisoned_law(cycle_law([3, 5, 7], VOCAB), lambda prefix: len(prefix) >= 8)
    async with (
        http_fleet(tmp_path, law, method=None) as (fleet, _),
        openai.AsyncOpenAI(base_url=f"{fleet.http_url}/v1", api_key="x", max_retries=0) as client,
    ):
        chunks = await client.completions.create(model="toy", prompt="abc", stream=True, max_tokens=20)
        assert (await anext(chunks)).choices[0].text
        with pytest.raises(openai.APIError, match="finite"):
            _ = [chunk async for chunk in chunks]


async def test_a_fault_of_ours_says_nothing_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with http_fleet(tmp_path, LAW) as (fleet, http):

        def broken() -> None:
            raise ValueError("secret")

        monkeypatch.setattr(fleet.gateway.servicer.door, "models", broken)
        for response in (await http.get("/v1/models"), await post(http, COMPLETIONS, {"prompt": "a"})):
            assert error_of(response) == (500, "server_error", None, "internal")
            assert "secret" not in response.text
        assert any("secret" in str(record.exc_info) for record in caplog.records)
