"""Who asks over HTTP: request ids and API keys."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import openai
import pytest

from tests.fakes.toy_runner import hash_law
from tests.integration.fleet import VOCAB
from tests.integration.http_calls import (
    COMPLETIONS,
    ENDPOINTS,
    ask,
    error_of,
    http_fleet,
    post,
)

LAW = hash_law(VOCAB, seed=21)
PROMPT = [1, 2, 3]


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
