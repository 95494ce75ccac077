"""Runs the choices of one request and sends what they give, whole or as a stream; the same for both endpoints."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import PacelineError
from paceline.generation import Chunk, Finished, Started
from paceline_gateway.caller import Caller
from paceline_gateway.door import Door
from paceline_gateway.http.choices import Ask, Choice, all_of, outcome_of, running
from paceline_gateway.http.leaving import unless_left
from paceline_gateway.http.rendering import Renderer, usage_of
from paceline_gateway.http.responses import ResponseModel
from paceline_gateway.http.sse import EventStream, Write, event


@dataclass(frozen=True, slots=True)
class Order:
    """A request that has been read.

    Attributes:
        door: starts its generations.
        ask: what is asked for.
        caller: by whom.
        renderer: makes the answer.
        stream_usage: a stream ends with the token counts.
    """

    door: Door
    ask: Ask
    caller: Caller
    renderer: Renderer
    stream_usage: bool


async def answer_whole(order: Order, request: Request) -> Response:
    """Answers when all choices have ended.

    Raises:
        PacelineError: one of them failed.
        ClientLeft: nobody waits for the answer any more.
    """
    text = await unless_left(request.receive, _whole(order))
    return Response(text, media_type="application/json")


def answer_stream(order: Order, stall_s: float) -> Response:
    """Answers with events as tokens come.

    Args:
        order: the request.
        stall_s: a client that takes nothing for so long is cut off.
    """

    async def produce(write: Write) -> None:
        async with running(order.door, order.ask, order.caller) as choices:
            ends = await all_of([_stream(choice, order.renderer, write) for choice in choices])
        if order.stream_usage:
            await write(event(order.renderer.counts(usage_of(choices, order.ask.choices_per_prompt, ends))))

    return EventStream(produce, stall_s)


async def _whole(order: Order) -> str:
    async with running(order.door, order.ask, order.caller) as choices:
        outcomes = await all_of([outcome_of(choice) for choice in choices])
    usage = usage_of(choices, order.ask.choices_per_prompt, [outcome.finished for outcome in outcomes])

    def render() -> str:
        return order.renderer.whole(outcomes, usage).to_json()

    # With all alternatives a token takes a third of a millisecond, which is a second for a long answer.
    slow = any(outcome.chunk.logprobs for outcome in outcomes)
    return await asyncio.to_thread(render) if slow else render()


async def _stream(choice: Choice, renderer: Renderer, write: Write) -> Finished:
    """Sends one choice as it comes. Nothing is sent before its first tokens: a failure until then is a plain error."""
    started: Started | None = None
    opened = False
    while (said := await choice.generation.next()) is not None:
        if isinstance(said, Started):
            started = said
            continue
        models: list[ResponseModel | None] = [] if opened else [renderer.opening(choice)]
        opened = True
        if isinstance(said, Chunk):
            models.append(renderer.part(choice, said))
        elif started is not None:
            models.append(renderer.ending(choice, started, said))
        if events := b"".join([event(model) for model in models if model is not None]):
            await write(events)
        if isinstance(said, Finished):
            return said
    raise PacelineError("a generation ended without its last event")
