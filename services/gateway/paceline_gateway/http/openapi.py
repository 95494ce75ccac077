"""The OpenAPI document: request bodies are read by hand, so they are described by hand too, from the same models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import paceline
from paceline_gateway.http.errors import ErrorBody
from paceline_gateway.http.requests import ChatCompletionRequest, CompletionRequest
from paceline_gateway.http.responses import ChatCompletionChunk
from paceline_gateway.http.sse import MEDIA_TYPE

_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "A field is wrong, unknown or not supported; `param` names it.",
    401: "No API key, or a wrong one.",
    404: "No such model, or the session is somebody else's.",
    409: "A generation is running on this session.",
    413: "The body is too large.",
    429: "Too many generations are running; try again after Retry-After seconds.",
    500: "The server failed.",
    503: "No verifier is there, or the gateway is starting or draining; try again after Retry-After seconds.",
    504: "The generation took too long.",
}
_NEVER_SENT = ("HTTPValidationError", "ValidationError", "ChatPrompt", "TextPrompt", "TokenPrompt")
"""Schemas that the generators add: the framework's own error, and what a prompt becomes."""
_REQUEST_ID = {"type": "string", "pattern": "^[A-Za-z0-9_.:-]{1,128}$"}
_REQUEST_ID_PARAMETER = {
    "name": "X-Request-Id",
    "in": "header",
    "required": False,
    "schema": _REQUEST_ID,
    "description": "Name of the request, in logs and in the answer; one that does not fit is replaced.",
}
_REQUEST_ID_HEADER = {"schema": _REQUEST_ID, "description": "Name of the request."}
_RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "Seconds to wait."}}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Descriptions of the errors that a route may answer."""
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"model": ErrorBody, "description": _ERRORS[status]}
        if status in (429, 503):
            described[status]["headers"] = dict(_RETRY_AFTER)
    return described


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """Description of a request body."""
    reference = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def stream_response(chunk: type[BaseModel]) -> dict[str, Any]:
    """Description of the answer with `stream`."""
    return {
        "description": f"The answer; with `stream` as server-sent events, each `data: {chunk.__name__}`, and at the "
        "end `data: [DONE]`. A failure after the first event is `data: ErrorBody`, without `data: [DONE]` after it.",
        "content": {MEDIA_TYPE: {"schema": {"type": "string"}}},
    }


def describe(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """Makes the app's `openapi`, which is computed once."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    return document


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="Paceline gateway",
        version=paceline.__version__,
        summary="Speculative decoding as a fleet, with the HTTP interface of OpenAI's completions.",
        routes=app.routes,
    )
    _, definitions = models_json_schema(
        [
            (ChatCompletionRequest, "validation"),
            (CompletionRequest, "validation"),
            (ChatCompletionChunk, "serialization"),
        ],
        ref_template=_REF,
    )
    components = document.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name, schema in definitions["$defs"].items():
        schemas.setdefault(name, schema)
    for name in _NEVER_SENT:
        schemas.pop(name, None)
    components["parameters"] = {"RequestId": _REQUEST_ID_PARAMETER}
    components["headers"] = {"RequestId": _REQUEST_ID_HEADER}
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # the framework's own; nothing here is answered by it
            operation.setdefault("parameters", []).append({"$ref": "#/components/parameters/RequestId"})
            for response in operation["responses"].values():
                response.setdefault("headers", {})["X-Request-Id"] = {"$ref": "#/components/headers/RequestId"}
    return document
