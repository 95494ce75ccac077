"""The OpenAPI document and docs/http_api.md tell the truth about requests and answers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from paceline_drafter.settings import DrafterSettings
from paceline_gateway.api_keys import ApiKeys
from paceline_gateway.http.app import make_app
from paceline_gateway.http.body import parse
from paceline_gateway.http.front import Front, FrontLimits
from paceline_gateway.http.request_fields import StreamOptions
from paceline_gateway.http.requests import ChatCompletionRequest, CompletionRequest
from paceline_gateway.http.responses import SpeculativeDecoding
from paceline_gateway.http.unsupported import CHAT_NO_OPS, COMPLETION_NO_OPS
from paceline_gateway.metrics import GatewayMetrics
from paceline_gateway.servicer import GenerationServicer
from paceline_gateway.sessions import Sessions
from paceline_gateway.settings import GatewaySettings
from prometheus_client import CollectorRegistry

from paceline.errors import InvalidArgument
from paceline.session.memory_store import MemoryStore

ROOT = Path(__file__).parents[4]
PAGE = (ROOT / "docs" / "http_api.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    keys = ApiKeys.load(None)
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry, "toy")
    servicer = GenerationServicer(keys, metrics)
    front = Front(
        door=lambda: servicer.door,
        keys=keys,
        verifiers=lambda: None,
        drafters=lambda: None,
        sessions=Sessions(1),
        store=MemoryStore(expiry_s=1.0),
        registry=registry,
        metrics=metrics,
        limits=FrontLimits(max_body_bytes=1024, max_choices=1, stall_s=1.0),
    )
    return make_app(front).openapi()


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": it for path, methods in document["paths"].items() for method, it in methods.items()
    }


def test_every_reference_leads_somewhere_and_nothing_is_left_over(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    references = set(re.findall(r'"#/components/(\w+)/(\w+)"', text))
    assert references
    for kind, name in references:
        assert name in document["components"][kind]
    unused = {name for name in document["components"]["schemas"] if ("schemas", name) not in references}
    # Named by the description of the stream.
    assert unused == {"ChatCompletionChunk"}


def test_operations(document: dict[str, Any]) -> None:
    found = operations(document)
    assert found.keys() == {
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "GET /v1/models",
        "GET /v1/models/{model}",
        "GET /health",
        "GET /ready",
        "GET /version",
        "GET /metrics",
    }
    assert len({operation["operationId"] for operation in found.values()}) == len(found)
    for name, operation in found.items():
        assert operation["description"]
        assert "422" not in operation["responses"]
        assert all("X-Request-Id" in response["headers"] for response in operation["responses"].values())
        assert ("security" in operation) == ("/v1/" in name)
        assert ("401" in operation["responses"]) == ("/v1/" in name)
        assert f"`{name.split()[1]}`" in PAGE
    for name in ("429", "503"):
        assert "Retry-After" in found["POST /v1/completions"]["responses"][name]["headers"]


@pytest.mark.parametrize("request_model", [ChatCompletionRequest, CompletionRequest])
def test_every_field_is_described(document: dict[str, Any], request_model: type[Any]) -> None:
    schema = document["components"]["schemas"][request_model.__name__]
    assert schema["additionalProperties"] is False
    assert schema["properties"].keys() == request_model.model_fields.keys() | request_model.no_ops.keys()
    for name, field in schema["properties"].items():
        assert field.get("description"), name
        assert f"`{name}`" in PAGE, name


def test_every_option_of_a_stream_is_described() -> None:
    for name in StreamOptions.model_fields.keys() | StreamOptions.no_ops.keys():
        assert re.search(rf"\b{name}\b", PAGE), name


def test_flags_that_newcomers_are_told_exist() -> None:
    section = PAGE.partition("## Coming from vLLM")[2].partition("\n## ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| `--")]
    told = {name.replace("-", "_") for row in rows for name in re.findall(r"`--([a-z-]+)`", row)}
    assert {"model_name", "api_keys_file", "num_speculative_tokens"} <= told
    assert told <= GatewaySettings.model_fields.keys() | DrafterSettings.model_fields.keys()


def test_every_measurement_is_described() -> None:
    for name in SpeculativeDecoding.model_fields:
        assert f"`{name}`" in PAGE, name


MESSAGES = [{"role": "user", "content": "hi"}]
PROMPTS: list[Any] = ["a", ["a"], [1], [[1]], [], 5, None, {}, [None], [1, "a"], [True]]
TURNS: list[Any] = [MESSAGES, "hi", [5], [{}], [{"role": "user"}]]
BODIES: list[tuple[type[Any], Any]] = [
    *[(CompletionRequest, {"prompt": prompt}) for prompt in PROMPTS],
    *[(ChatCompletionRequest, {"messages": turns}) for turns in TURNS],
    *[
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": content}]})
        for content in ("a", [{"type": "text", "text": "a"}], [], [{"type": "image_url"}], [{"type": "text"}], None, 5)
    ],
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a", "name": None, "tool_calls": []}]}),
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "a", "name": "x"}]}),
    (ChatCompletionRequest, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}),
    (ChatCompletionRequest, {"messages": MESSAGES, "logprobs": 3}),
    (CompletionRequest, {"prompt": "a", "logprobs": 3}),
    (CompletionRequest, {"prompt": "a", "logprobs": True}),
    (CompletionRequest, {}),
    (CompletionRequest, []),
    *[
        (CompletionRequest, {"prompt": "a", **fields})
        for fields in (
            {"stop": "x"},
            {"stop": ["x"]},
            {"stop": 5},
            {"temperature": 1},
            {"temperature": "1"},
            {"temperature": True},
            {"seed": "1"},
            {"speculation": {"enabled": False, "method": "ngram", "num_speculative_tokens": 3}},
            {"speculation": {"depth": 1}},
            {"metrics": {"speculative_decoding": True}},
            {"metrics": True},
            {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}},
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            {"logit_bias": {"1": 1}},
            {"logit_bias": [1]},
            {"echo": False},
            {"echo": True},
            {"echo": None},
            {"best_of": 1},
            {"best_of": 2},
            {"unheard_of": 1},
        )
    ],
]


def test_the_document_says_what_is_accepted(document: dict[str, Any]) -> None:
    verdicts = set()
    for model, body in BODIES:
        schema = {"$ref": f"#/components/schemas/{model.__name__}", "components": document["components"]}
        described = jsonschema.Draft202012Validator(schema).is_valid(body)
        try:
            parse(json.dumps(body).encode(), model)
            accepted = True
        except InvalidArgument:
            accepted = False
        assert described == accepted, body
        verdicts.add(accepted)
    assert verdicts == {True, False}


def test_the_page_names_every_field_that_is_not_supported() -> None:
    for name in CHAT_NO_OPS.keys() | COMPLETION_NO_OPS.keys():
        assert f"`{name}`" in PAGE, name
