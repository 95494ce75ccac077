"""What anybody may ask: is the gateway alive, can it serve, what is it, and its metrics."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter
from prometheus_client.exposition import CONTENT_TYPE_LATEST, choose_encoder, generate_latest
from starlette.requests import Request
from starlette.responses import Response

import paceline
from paceline.errors import PacelineError, Unavailable
from paceline_gateway.http.errors import ErrorBody
from paceline_gateway.http.front import Front
from paceline_gateway.http.responses import ResponseModel

_METRICS_CONTENT = {kind: {"schema": {"type": "string"}} for kind in ("text/plain", "application/openmetrics-text")}
_STORE_PATIENCE_S = 0.25
"""A probe does not wait for a store that is away."""


class Health(ResponseModel):
    """How the gateway is. It answers, so it is alive."""

    status: Literal["ok", "degraded"]
    """degraded: no verifier, no drafter though some are configured, or no store."""
    state: Literal["starting", "serving", "draining"]
    verifiers: int
    """Verifiers that are ready."""
    drafters: int
    """Drafters that are ready."""
    store: Literal["ok", "unavailable"]
    """The store of session records."""


class Ready(ResponseModel):
    """The gateway takes requests."""

    status: Literal["ready"]


class Version(ResponseModel):
    """What this is."""

    version: str


def health_routes(front: Front) -> APIRouter:
    """The routes, none of which asks for a key. Load balancers may ask for the head only."""
    routes = APIRouter(tags=["operations"])

    @routes.head("/health", include_in_schema=False)
    @routes.get("/health", response_model=Health)
    async def health() -> Response:
        """Whether the process is alive, and what it has to work with."""
        return _json(await _health(front))

    @routes.head("/ready", include_in_schema=False)
    @routes.get("/ready", response_model=Ready, responses={503: {"model": ErrorBody, "description": "Not now."}})
    async def ready() -> Response:
        """Whether requests are served: not while starting, draining or without a verifier."""
        state, verifiers = _state(front), front.verifiers()
        if state != "serving":
            raise Unavailable(f"the gateway is {state}")
        if verifiers is None or not verifiers.ready:
            raise Unavailable("no verifier is ready")
        return _json(Ready(status="ready"))

    @routes.head("/version", include_in_schema=False)
    @routes.get("/version", response_model=Version)
    async def version() -> Response:
        """The server's version."""
        return _json(Version(version=paceline.__version__))

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={200: {"content": _METRICS_CONTENT}},
    )
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus, in its text format or as OpenMetrics, whichever is accepted."""
        try:
            encode, content_type = choose_encoder(request.headers.get("accept", ""))
        except (TypeError, ValueError):  # a version that is no number
            encode, content_type = generate_latest, CONTENT_TYPE_LATEST
        return Response(encode(front.registry), headers={"Content-Type": content_type})

    return routes


def _json(model: ResponseModel) -> Response:
    return Response(model.to_json(), media_type="application/json")


def _state(front: Front) -> Literal["starting", "serving", "draining"]:
    if front.sessions.draining:
        return "draining"
    try:
        front.door()
    except Unavailable:
        return "starting"
    return "serving"


async def _health(front: Front) -> Health:
    verifiers, drafters = front.verifiers(), front.drafters()
    num_verifiers = len(verifiers.ready) if verifiers else 0
    num_drafters = len(drafters.ready) if drafters else 0
    has_drafters = not drafters or not drafters.troubles or num_drafters > 0
    store_answers = await _store_answers(front)
    return Health(
        status="ok" if num_verifiers and has_drafters and store_answers else "degraded",
        state=_state(front),
        verifiers=num_verifiers,
        drafters=num_drafters,
        store="ok" if store_answers else "unavailable",
    )


async def _store_answers(front: Front) -> bool:
    try:
        async with asyncio.timeout(_STORE_PATIENCE_S):
            await front.store.ping()
    except (PacelineError, TimeoutError):
        return False
    return True
