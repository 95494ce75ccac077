"""A chat completion streamed over HTTP with the least that a client can do: httpx, and lines that begin with `data:`.

For measuring what the server and the wire cost; programs use the `openai` client.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx

_DATA = "data: "
_END = "[DONE]"


async def stream_chat(
    client: httpx.AsyncClient, model: str, text: str, max_tokens: int
) -> AsyncIterator[tuple[str, int]]:
    """Asks greedily and yields the text of each event, and the number of generated tokens once it is told (else 0).

    Args:
        client: with the base URL of a gateway.
        model: name of the served model.
        text: the user's message.
        max_tokens: most tokens to generate.

    Raises:
        httpx.HTTPError: the gateway cannot be reached or refuses.
        ConnectionError: the stream ended without its last event, or tells an error.
    """
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith(_DATA):
                continue
            if (data := line.removeprefix(_DATA)) == _END:
                return
            yield text_and_tokens(data)
    raise ConnectionError("the stream ended without its last event; see the gateway's log")


def text_and_tokens(data: str) -> tuple[str, int]:
    """The text of one event's data, and the number of generated tokens if it tells it (else 0).

    Raises:
        ConnectionError: it tells an error.
    """
    event = json.loads(data)
    if "error" in event:
        raise ConnectionError(event["error"]["message"])
    choices, usage = event["choices"], event.get("usage")
    text = (choices[0]["delta"].get("content") or "") if choices else ""
    return text, usage["completion_tokens"] if usage else 0
