"""A request that is refused leaves one line in the log and one count in the metrics, whichever door it came to."""

from __future__ import annotations

import contextlib
import json
import logging
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from paceline_gateway.service import GatewayService
from paceline_gateway.settings import GatewaySettings

from paceline.client import AsyncClient
from paceline.errors import InvalidArgument, ModelError, NotFound, PacelineError, Unauthenticated
from paceline.messages import SamplingParams
from paceline.runtime.logs import JsonFormatter
from paceline.runtime.supervisor import Supervisor
from paceline.text.request import TextPrompt
from tests.fakes.tiny_tokenizer import write_letters
from tests.fakes.toy_runner import hash_law, poisoned_law
from tests.integration.fleet import VOCAB, Fleet, generate, perfect_method
from tests.integration.scraping import scrape
from tests.integration.test_api_keys import ALICE, keys_file

MALLORY = "sk-mallory-0123456789abcdef"
MAX_BYTES = 2048


@contextlib.asynccontextmanager
async def guarded(folder: Path, **options: Any) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """A fleet with keys, HTTP and small bodies; the HTTP client is alice's."""
    settings = {"api_keys_file": keys_file(folder), "http_port": 0, "max_body_bytes": MAX_BYTES}
    law = options.pop("law", hash_law(VOCAB))
    async with (
        Fleet.start(folder, law, settings=settings, **options) as fleet,
        httpx.AsyncClient(base_url=fleet.http_url, headers={"Authorization": f"Bearer {ALICE}"}) as http,
    ):
        yield fleet, http


async def refusals(service: GatewayService) -> Counter[str]:
    """How many requests the metrics say were refused, by code."""
    seen = await scrape(service.registry)
    return Counter({row["code"]: int(value) for row, value in seen.series("paceline_request_refused_total")})


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Level, message and fields of every refusal; forgets them."""
    names = ("path", "rpc", "status", "code", "field", "reason")
    found = [
        {"level": record.levelname} | {name: vars(record)[name] for name in names if name in vars(record)}
        for record in caplog.records
        if record.message == "request refused"
    ]
    caplog.clear()
    return found


HTTP_REFUSALS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("bad value", {"json": {"prompt": "a", "top_p": 2}}, {"status": 400, "code": "invalid_argument", "field": "top_p"}),
    ("bad type", {"json": {"prompt": 7}}, {"status": 400, "code": "invalid_argument", "field": "prompt"}),
    ("unknown field", {"json": {"prompt": "a", "zq": 1}}, {"status": 400, "code": "invalid_argument", "field": "…"}),
    ("no json", {"content": b"{"}, {"status": 400, "code": "invalid_argument", "field": ""}),
    ("choices", {"json": {"prompt": "a", "n": 99}}, {"status": 400, "code": "invalid_argument", "field": "n"}),
    ("no model", {"json": {"prompt": "a", "model": "zq"}}, {"status": 404, "code": "not_found", "field": "model"}),
    ("large", {"content": b" " * (MAX_BYTES + 1)}, {"status": 413, "code": "payload_too_large", "field": ""}),
    (
        "no key",
        {"content": b"{", "headers": {"Authorization": f"Bearer {MALLORY}"}},
        {"status": 401, "code": "unauthenticated", "field": "authorization"},
    ),
]


async def test_each_refusal_of_http_is_one_line_and_one_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(tmp_path) as (fleet, http):
        for name, call, said in HTTP_REFUSALS:
            before = await refusals(fleet.gateway)
            call["headers"] = {"Content-Type": "application/json", "X-Request-Id": name.replace(" ", "-")} | call.get(
                "headers", {}
            )
            response = await http.post("/v1/completions", **call)
            assert response.status_code == said["status"], name
            (line,) = lines(caplog)
            assert line.pop("reason")
            assert line == {"level": "INFO", "path": "/v1/completions", **said}, name
            assert await refusals(fleet.gateway) - before == Counter([said["code"]]), name


async def test_paths_and_methods_that_are_not_there_leave_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with guarded(tmp_path) as (_, http):
        await http.get("/nothing")
        await http.delete("/v1/completions")
        found = [(line["level"], line["path"], line["status"], line["code"]) for line in lines(caplog)]
        assert found == [
            ("INFO", "/nothing", 404, "not_found"),
            ("INFO", "/v1/completions", 405, "method_not_allowed"),
        ]


async def test_each_refusal_of_grpc_is_one_line_and_one_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def refused(client: AsyncClient, kind: type[PacelineError], **fields: Any) -> dict[str, Any]:
        before = await refusals(fleet.gateway)
        with pytest.raises(kind):
            await generate(client, fleet.request(TextPrompt("abc"), **fields))
        assert await refusals(fleet.gateway) - before == Counter([kind.code])
        (line,) = lines(caplog)
        return line

    async with guarded(tmp_path) as (fleet, _):
        told = {"level": "INFO", "rpc": "/paceline.v1.Generation/Generate"}
        async with fleet.client(ALICE) as client:
            line = await refused(client, InvalidArgument, stop=("",))
            assert line.pop("reason").startswith("stop[0] is empty")
            assert line == {**told, "status": "INVALID_ARGUMENT", "code": "invalid_argument", "field": "stop"}
            line = await refused(client, NotFound, model="zq")
            assert line.pop("reason") == "model … is not served here; served is …"
            assert line == {**told, "status": "NOT_FOUND", "code": "not_found", "field": "model"}
        async with fleet.client(MALLORY) as client:
            line = await refused(client, Unauthenticated)
            assert "sk-" not in line.pop("reason")
            assert line == {**told, "status": "UNAUTHENTICATED", "code": "unauthenticated", "field": "authorization"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_generation_that_fails_is_a_warning_and_no_refusal_in_the_metrics(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    caplog.set_level(logging.INFO)
    law = hash_law(VOCAB)
    broken = poisoned_law(law, lambda prefix: len(prefix) > 12)
    async with guarded(tmp_path, law=broken, method=perfect_method(law)) as (fleet, http):
        ask = {"prompt": [1, 2, 3], "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stream": stream}
        await http.post("/v1/completions", json=ask)
        async with fleet.client(ALICE) as client:
            with pytest.raises(ModelError):
                await generate(client, fleet.request([1, 2, 3], sampling=SamplingParams(0.0, ignore_eos=True)))
        by_http, by_grpc = lines(caplog)
        assert (by_http["level"], by_http["status"], by_http["code"]) == ("WARNING", 500, "model_error")
        assert (by_grpc["level"], by_grpc["status"]) == ("WARNING", "FAILED_PRECONDITION")
        assert (await refusals(fleet.gateway)).total() == 0


async def test_who_asked_is_in_the_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From the context of the log, at both doors."""
    written: list[dict[str, Any]] = []

    class Writer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.message == "request refused":
                written.append(json.loads(JsonFormatter("gateway").format(record)))

    caplog.set_level(logging.INFO)
    writer = Writer()
    logging.getLogger().addHandler(writer)
    try:
        async with guarded(tmp_path) as (fleet, http):
            await http.post("/v1/completions", json={"prompt": ""}, headers={"X-Request-Id": "r-1"})
            async with fleet.client(ALICE) as client:
                with pytest.raises(InvalidArgument):
                    [event async for event in client.generate(fleet.request([]), request_id="r-2")]
    finally:
        logging.getLogger().removeHandler(writer)
    assert [(line["request_id"], line["tenant"]) for line in written] == [("r-1", "alice"), ("r-2", "alice")]


async def test_polls_of_a_gateway_that_starts_are_no_news_and_requests_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    settings = GatewaySettings(
        model=str(write_letters(tmp_path / "model", VOCAB)), model_name="toy", http_port=0, startup_wait_s=30.0,
        verifiers=("127.0.0.1:1",), verifier_wait_ms=50,
    )  # fmt: skip
    service = GatewayService(settings)
    async with Supervisor("test") as supervisor:
        assert service._http is not None
        address = service._http.start(supervisor)
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.post("/v1/completions", json={"prompt": "a"})).status_code == 503
        poll, request = lines(caplog)
        assert (poll["level"], poll["path"]) == ("DEBUG", "/ready")
        assert (request["level"], request["path"], request["code"]) == ("WARNING", "/v1/completions", "unavailable")
        assert await refusals(service) == Counter(["unavailable"])
        await service.stop()
