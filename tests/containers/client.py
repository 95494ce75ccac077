"""A client that runs in a container on the fleet's network: `python - COMMAND ...` with this file as standard input.

The gateway's image has all that it needs. It prints one JSON object per line.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from typing import Any

from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from paceline.client.client import AsyncClient
from paceline.generation import Chunk, Finished
from paceline.messages import SamplingParams
from paceline.runtime.grpc_client import open_channel
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest

_HEALTH_TIMEOUT_S = 300.0
_HTTP_TIMEOUT_S = 300.0


def tell(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


async def wait_until_serving(address: str, service: str) -> None:
    """Returns when gRPC health says SERVING."""
    channel = open_channel(address)
    request = health_pb2.HealthCheckRequest(service=service)
    async with asyncio.timeout(_HEALTH_TIMEOUT_S):
        watch = health_pb2_grpc.HealthStub(channel).Watch(request, wait_for_ready=True)
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()
    await channel.close()
    tell(serving=service)


async def generate(address: str, prompt: str, max_tokens: int) -> None:
    """Streams one greedy answer over gRPC; says when the first tokens are there."""
    request = GenerationRequest(
        ChatPrompt((ChatMessage("user", prompt),)),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
    )
    text, chunks, durable = "", 0, True
    async with AsyncClient(address) as client:
        async for event in client.generate(request):
            if isinstance(event, Chunk):
                if not chunks:
                    tell(first=event.text)
                text, chunks, durable = text + event.text, chunks + 1, durable and event.durable
            elif isinstance(event, Finished):
                reason, tokens = event.finish_reason.value, event.completion_tokens
                drafted = event.evidence.draft_tokens
                tell(text=text, chunks=chunks, durable=durable, reason=reason, tokens=tokens, drafted=drafted)


def chat(address: str, model: str, prompt: str, max_tokens: int) -> None:
    """Streams the same over HTTP."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "stream": True,
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    connection = http.client.HTTPConnection(address, timeout=_HTTP_TIMEOUT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != http.HTTPStatus.OK:
        sys.exit(f"{answer.status}: {answer.read().decode()}")
    text, chunks, reason, done = "", 0, None, False
    for line in answer:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            done = True
        elif data:
            for choice in json.loads(data)["choices"]:
                piece = choice["delta"].get("content") or ""
                text, chunks = text + piece, chunks + bool(piece)
                reason = choice["finish_reason"] or reason
    connection.close()
    tell(text=text, chunks=chunks, reason=reason, done=done)


def get(address: str, path: str) -> None:
    """Says what a GET is answered with."""
    connection = http.client.HTTPConnection(address, timeout=_HTTP_TIMEOUT_S)
    connection.request("GET", path)
    answer = connection.getresponse()
    tell(status=answer.status, body=answer.read().decode())
    connection.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["wait", address, service]:
            asyncio.run(wait_until_serving(address, service))
        case ["generate", address, prompt, tokens]:
            asyncio.run(generate(address, prompt, int(tokens)))
        case ["chat", address, model, prompt, tokens]:
            chat(address, model, prompt, int(tokens))
        case ["get", address, path]:
            get(address, path)
