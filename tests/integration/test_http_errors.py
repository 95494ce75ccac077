"""What goes wrong over HTTP, and how it is told: bad requests, limits, overload, keys, starting, draining, failing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import ssl
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from paceline_gateway.service import GatewayService
from paceline_gateway.settings import GatewaySettings

import paceline
from paceline.errors import ConfigurationError
from paceline.runtime.supervisor import Supervisor
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import cycle_law, hash_law, poisoned_law
from tests.integration.fleet import VOCAB, Fleet, free_port, until
from tests.integration.http_calls import (
    CHAT,
    COMPLETIONS,
    ENDPOINTS,
    ask,
    asking,
    http_client,
    http_fleet,
    post,
)
from tests.integration.paced import Pace, PacedRunner

LAW = hash_law(VOCAB, seed=21)
PROMPT = [1, 2, 3]


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
    ({"acceptance_rule": "ratio"}, "acceptance_rule"),
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


# --- sizes ------------------------------------------------------------------------------------------------------------


async def test_body_limit(tmp_path: Path) -> None:
    limit = 4096
    async with http_fleet(tmp_path, LAW, settings={"max_body_bytes": limit}) as (fleet, http):

        def body(size: int) -> bytes:
            frame = b'{"max_tokens": 1, "prompt": [1' + b"]}"
            return b'{"max_tokens": 1, "prompt": [1' + b" " * (size - len(frame)) + b"]}"

        async def chunked(content: bytes) -> AsyncIterator[bytes]:
            for start in range(0, len(content), 1000):
                yield content[start : start + 1000]

        for content in (body(limit), chunked(body(limit))):
            assert (await http.post("/v1/completions", content=content)).status_code == 200
        for content in (body(limit + 1), chunked(body(limit + 1)), body(4 * limit), chunked(body(4 * limit))):
            response = await http.post("/v1/completions", content=content)
            assert error_of(response) == (413, "invalid_request_error", None, "payload_too_large")
            assert str(limit) in response.json()["error"]["message"]
        assert (await http.post("/v1/completions", content=body(limit))).status_code == 200
        await fleet.quiet()


async def test_the_stated_size_is_enough_to_refuse(tmp_path: Path) -> None:
    """Nothing of the body is waited for."""
    async with http_fleet(tmp_path, LAW) as (fleet, _):
        host, _, port = fleet.gateway.addresses["http"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n")
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await writer.wait_closed()


async def test_large_bodies_do_not_stall_others(tmp_path: Path) -> None:
    """Reading, parsing and tokenizing are elsewhere, or quick: the long text alone takes more than twice as long."""
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"prompt": [1] * 2_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 5_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": "a" * 1_000_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 300_000}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 100_000}, "messages"),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {str(token): 1 for token in range(100_000)}}, "logit_bias"),
    ]
    async with http_fleet(tmp_path, LAW) as (fleet, _):
        for endpoint, body, param in bodies:
            content = json.dumps(body).encode()
            async with stalls() as worst:
                response = await raw_post(fleet, endpoint, content)
            assert b"HTTP/1.1 400 " in response
            assert f'"param":"{param}"'.encode() in response
            assert worst.stall_s < 1.0, param


@dataclass
class Worst:
    """The longest time in which the event loop did nothing else."""

    stall_s: float = 0.0


@contextlib.asynccontextmanager
async def stalls() -> AsyncIterator[Worst]:
    worst, loop = Worst(), asyncio.get_running_loop()

    async def watch() -> None:
        while True:
            before_s = loop.time()
            await asyncio.sleep(0.001)
            worst.stall_s = max(worst.stall_s, loop.time() - before_s)

    watching = asyncio.create_task(watch())
    try:
        yield worst
    finally:
        watching.cancel()


async def raw_post(fleet: Fleet, endpoint: str, content: bytes) -> bytes:
    """A request whose client costs next to nothing."""
    host, _, port = fleet.gateway.addresses["http"].rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/{endpoint} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    response = await reader.read()
    writer.close()
    await writer.wait_closed()
    return response


# --- names of requests ------------------------------------------------------------------------------------------------


async def test_request_ids(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        body = {"prompt": "a", "max_tokens": 1}
        named = await post(http, COMPLETIONS, body, **{"X-Request-Id": "my.request:1-2_3"})
        assert named.headers.get_list("x-request-id") == ["my.request:1-2_3"]
        assert named.json()["id"] == "cmpl-my.request:1-2_3"
        drawn = set()
        for bad in ("", "has spaces", "a" * 129, "é".encode().decode("latin-1"), 'quote"'):
            headers = {b"X-Request-Id": bad.encode("latin-1")}
            response = await http.post("/v1/completions", json=body, headers=headers)
            drawn.add(response.headers["x-request-id"])
            assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
        assert len(drawn) == 5
        assert bad not in drawn
        for path in ("/health", "/nothing", "/v1/models", "/metrics"):
            assert (await http.get(path, headers={"X-Request-Id": "again"})).headers["x-request-id"] == "again"
        failed = await post(http, COMPLETIONS, {"prompt": ""}, **{"X-Request-Id": "again"})
        assert (failed.status_code, failed.headers["x-request-id"]) == (400, "again")


async def test_request_ids_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with http_fleet(tmp_path, LAW) as (_, http):
        await post(http, COMPLETIONS, {"prompt": "a", "max_tokens": 1, "user": "u" * 1000}, **{"X-Request-Id": "mine"})
    (record,) = [record for record in caplog.records if record.message == "http generation"]
    assert vars(record)["user"] == "u" * 128


# --- who may ask ------------------------------------------------------------------------------------------------------

KEY = "0123456789abcdef"


async def test_api_keys(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann: {KEY}\nbob: {KEY[::-1]}\n")
    async with http_fleet(tmp_path, LAW, settings={"api_keys_file": keys}) as (_, http):
        refused = (401, "authentication_error", "authorization", "unauthenticated")
        for headers in (
            {},
            {"Authorization": KEY},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {KEY}"},
        ):
            for path in ("/v1/models", "/v1/models/toy"):
                assert error_of(await http.get(path, headers=headers)) == refused
            for endpoint in ENDPOINTS:
                # The body is not looked at: it is no JSON.
                response = await http.post(f"/v1/{endpoint}", content=b"{", headers=headers)
                assert error_of(response) == refused
                assert response.headers["www-authenticate"] == "Bearer"
                assert KEY not in response.text
        for path in ("/health", "/ready", "/version", "/metrics", "/openapi.json"):
            assert (await http.get(path)).status_code == 200
        http.headers["Authorization"] = f"Bearer {KEY}"
        assert (await http.get("/v1/models")).status_code == 200
        first = await ask(http, COMPLETIONS, prompt=PROMPT, max_tokens=2, session_id="mine")
        assert first.usage
        http.headers["Authorization"] = f"Bearer {KEY[::-1]}"
        response = await post(http, COMPLETIONS, {"prompt": PROMPT, "max_tokens": 2, "session_id": "mine"})
        assert error_of(response)[0] == 404


async def test_a_wrong_key_in_the_official_client(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"ann: {KEY}\n")
    async with http_fleet(tmp_path, LAW, settings={"api_keys_file": keys}) as (fleet, _):
        for key, right in ((KEY, True), ("wrong", False)):
            async with openai.AsyncOpenAI(base_url=f"{fleet.http_url}/v1", api_key=key, max_retries=0) as client:
                with contextlib.nullcontext() if right else pytest.raises(openai.AuthenticationError):
                    assert [model.id async for model in client.models.list()] == ["toy"]


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


@contextlib.asynccontextmanager
async def lonely_gateway(folder: Path, **settings: Any) -> AsyncIterator[tuple[GatewayService, asyncio.Task[None]]]:
    """A gateway that is starting, as its process would start it: without replicas it waits for them."""
    model = write_letters(folder / "model", VOCAB, max_model_len=256)
    gateway = GatewayService(
        GatewaySettings(model=str(model), **{"verifiers": (f"127.0.0.1:{free_port()}",), "http_port": 0, **settings})
    )
    async with Supervisor("gateway") as supervisor:
        starting = asyncio.create_task(gateway.start(supervisor, lambda healthy: None))
        try:
            yield gateway, starting
        finally:
            starting.cancel()
            await asyncio.wait({starting})
            await gateway.stop()


async def test_while_starting(tmp_path: Path) -> None:
    async with lonely_gateway(tmp_path, startup_wait_s=60) as (gateway, starting):
        await until(lambda: "http" in gateway.addresses)
        async with httpx.AsyncClient(base_url=f"http://{gateway.addresses['http']}") as http:
            health = await http.get("/health")
            assert (health.status_code, health.json()["state"], health.json()["status"]) == (
                200,
                "starting",
                "degraded",
            )
            assert error_of(await http.get("/ready"))[0] == 503
            for path in ("/v1/models", "/v1/models/toy"):
                assert error_of(await http.get(path)) == (503, "server_error", None, "unavailable")
            response = await post(http, COMPLETIONS, {"prompt": PROMPT})
            assert error_of(response) == (503, "server_error", None, "unavailable")
            assert response.headers["retry-after"] == "1"
            assert not starting.done()


async def test_a_port_that_is_taken(tmp_path: Path) -> None:
    async with http_fleet(tmp_path / "one", LAW) as (fleet, _):
        port = int(fleet.gateway.addresses["http"].rpartition(":")[2])
        async with lonely_gateway(tmp_path / "two", http_port=port) as (_, starting):
            with pytest.raises(ConfigurationError, match="for HTTP") as caught:
                await starting
            assert caught.value.field == "http_port"


async def test_without_http_there_is_no_server(tmp_path: Path) -> None:
    async with Fleet.start(tmp_path, LAW, settings={"http_port": None}) as fleet:
        assert fleet.gateway.addresses == {}


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


# --- operations -------------------------------------------------------------------------------------------------------


async def test_version_and_models(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        assert (await http.get("/version")).json() == {"version": paceline.__version__}
        (model,) = (await http.get("/v1/models")).json()["data"]
        assert model == (await http.get("/v1/models/toy")).json()
        assert (model["id"], model["object"], model["max_model_len"]) == ("toy", "model", 256)


async def test_metrics_in_both_formats(tmp_path: Path) -> None:
    async with http_fleet(tmp_path, LAW) as (_, http):
        for accept, kind in (
            ("", "text/plain"),
            ("text/plain", "text/plain"),
            ("application/openmetrics-text; version=1.0.0", "application/openmetrics-text"),
            ("application/openmetrics-text; version=x.y", "text/plain"),
        ):
            response = await http.get("/metrics", headers={"Accept": accept})
            assert response.status_code == 200
            assert response.headers["content-type"].startswith(kind)
            assert response.text.endswith("# EOF\n") == (kind != "text/plain")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "1",
    ]
    subprocess.run([*make, *names, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def test_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = {"tls_cert_file": cert, "tls_key_file": key}
    async with http_fleet(tmp_path, LAW, settings=settings) as (fleet, _):
        url = fleet.http_url.replace("http://", "https://")
        async with httpx.AsyncClient(base_url=url, verify=ssl.create_default_context(cafile=str(cert))) as http:
            assert (await http.get("/ready")).status_code == 200
        with pytest.raises(httpx.HTTPError):
            async with http_client(fleet) as plain:
                await plain.get("/ready")


async def test_tls_files_that_cannot_be_read(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    for files in ((cert, tmp_path / "none"), (key, cert)):
        async with lonely_gateway(tmp_path, tls_cert_file=files[0], tls_key_file=files[1]) as (_, starting):
            with pytest.raises(ConfigurationError, match="TLS"):
                await starting


async def test_mutual_tls(tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = {"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": cert}
    async with http_fleet(tmp_path, LAW, settings=settings) as (fleet, _):
        url = fleet.http_url.replace("http://", "https://")
        context = ssl.create_default_context(cafile=str(cert))
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            with pytest.raises(httpx.HTTPError):
                await http.get("/ready")
        context.load_cert_chain(cert, key)
        async with httpx.AsyncClient(base_url=url, verify=context) as http:
            assert (await http.get("/ready")).status_code == 200
