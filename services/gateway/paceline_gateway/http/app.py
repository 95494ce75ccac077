"""Wires routes, errors and the gate into one ASGI app."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from paceline.errors import PacelineError
from paceline_gateway.http.errors import ClientLeft, on_client_left, on_http_exception, on_paceline_error
from paceline_gateway.http.front import Front
from paceline_gateway.http.health import health_routes
from paceline_gateway.http.openai_routes import openai_routes
from paceline_gateway.http.openapi import describe
from paceline_gateway.http.request_gate import RequestGate


def make_app(front: Front) -> FastAPI:
    """The HTTP interface of a gateway."""
    app = FastAPI(
        # The pages would load their scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
        middleware=[Middleware(RequestGate, draining=lambda: front.sessions.draining)],
        exception_handlers={
            PacelineError: on_paceline_error,
            ClientLeft: on_client_left,
            HTTPException: on_http_exception,
        },
    )
    app.include_router(openai_routes(front))
    app.include_router(health_routes(front))
    app.openapi = describe(app)  # type: ignore[method-assign]
    return app
