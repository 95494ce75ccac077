"""The routes under /v1: who asks, what is asked for, and what answers."""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, Depends, Security
from fastapi.security import HTTPBearer
from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import NotFound
from paceline.generation import ServedModel
from paceline.runtime.logs import bind_log_context
from paceline_gateway.caller import Caller
from paceline_gateway.http.answering import Order, answer_stream, answer_whole
from paceline_gateway.http.body import read_request
from paceline_gateway.http.chat import ChatRenderer, chat_ask
from paceline_gateway.http.completions import CompletionRenderer, completion_ask
from paceline_gateway.http.front import Front
from paceline_gateway.http.openapi import body_of, error_responses, stream_response
from paceline_gateway.http.rendering import head_of, wishes_of
from paceline_gateway.http.request_fields import GenerationFields
from paceline_gateway.http.requests import ChatCompletionRequest, CompletionRequest
from paceline_gateway.http.responses import ChatCompletion, ChatCompletionChunk, Completion, ModelCard, ModelList

logger = logging.getLogger(__name__)

_OWNER = "paceline"
_LOGGED_USER_CHARS = 128
_GENERATION_ERRORS = (400, 401, 404, 409, 413, 429, 500, 503, 504)


def openai_routes(front: Front) -> APIRouter:
    """The routes. A caller's key is checked before its body is read."""

    async def identify(request: Request) -> None:
        with front.metrics.counting_refusals():
            tenant = front.keys.tenant(request.headers.get("authorization"))
        request.state.caller = Caller(tenant, request.state.request_id)
        if tenant:
            bind_log_context(tenant=tenant)

    bearer = HTTPBearer(auto_error=False, description="An API key, where the gateway asks for one.")
    routes = APIRouter(prefix="/v1", tags=["OpenAI"], dependencies=[Security(bearer), Depends(identify)])
    _add_chat(routes, front)
    _add_completions(routes, front)
    _add_models(routes, front)
    return routes


def _add_chat(routes: APIRouter, front: Front) -> None:
    @routes.post(
        "/chat/completions",
        response_model=ChatCompletion,
        responses={200: stream_response(ChatCompletionChunk), **error_responses(*_GENERATION_ERRORS)},
        openapi_extra=body_of(ChatCompletionRequest),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Answers a conversation."""
        with front.metrics.counting_refusals():
            door = front.door()
            fields = await read_request(request, ChatCompletionRequest, front.limits)
            ask = chat_ask(fields)
            ask.check(front.limits.max_choices)
        wishes = wishes_of(fields, logprobs=bool(fields.logprobs))
        head = head_of(request.state.request_id, "chatcmpl", door.models()[0].model)
        renderer = ChatRenderer(head, wishes, door.tokenizer)
        return await _answer(
            request, front, fields, Order(door, ask, request.state.caller, renderer, wishes.stream_usage)
        )


def _add_completions(routes: APIRouter, front: Front) -> None:
    @routes.post(
        "/completions",
        response_model=Completion,
        responses={200: stream_response(Completion), **error_responses(*_GENERATION_ERRORS)},
        openapi_extra=body_of(CompletionRequest),
    )
    async def create_completion(request: Request) -> Response:
        """Continues one or several prompts."""
        with front.metrics.counting_refusals():
            door = front.door()
            fields = await read_request(request, CompletionRequest, front.limits)
            ask = completion_ask(fields)
            ask.check(front.limits.max_choices)
        wishes = wishes_of(fields, logprobs=fields.logprobs is not None)
        head = head_of(request.state.request_id, "cmpl", door.models()[0].model)
        renderer = CompletionRenderer(head, wishes, door.tokenizer)
        return await _answer(
            request, front, fields, Order(door, ask, request.state.caller, renderer, wishes.stream_usage)
        )


async def _answer(request: Request, front: Front, fields: GenerationFields, order: Order) -> Response:
    logger.info(
        "http generation",
        extra={
            "path": request.url.path,
            "stream": bool(fields.stream),
            "choices": len(order.ask.prompts) * order.ask.choices_per_prompt,
            "user": (fields.user or "")[:_LOGGED_USER_CHARS],
        },
    )
    if fields.stream:
        return answer_stream(order, front.limits.stall_s)
    return await answer_whole(order, request)


def _add_models(routes: APIRouter, front: Front) -> None:
    started_at = int(time.time())

    def card(served: ServedModel) -> ModelCard:
        return ModelCard(
            id=served.model,
            object="model",
            created=started_at,
            owned_by=_OWNER,
            max_model_len=served.max_model_len or None,
            methods=list(served.methods),
        )

    @routes.get("/models", response_model=ModelList, responses=error_responses(401, 503))
    async def list_models() -> Response:
        """Lists the models that can be asked for."""
        models = ModelList(object="list", data=[card(served) for served in front.door().models()])
        return Response(models.to_json(), media_type="application/json")

    @routes.get("/models/{model:path}", response_model=ModelCard, responses=error_responses(401, 404, 503))
    async def retrieve_model(model: str) -> Response:
        """One of them."""
        for served in front.door().models():
            if served.model == model:
                return Response(card(served).to_json(), media_type="application/json")
        raise NotFound(f"model {model!r} is not served here; /v1/models lists those that are", field="model")
