"""`paceline chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio

from paceline.cli.connection import Connection
from paceline.cli.console import err, read_stdin
from paceline.cli.generate import stream
from paceline.cli.request import RequestOptions
from paceline.client import AsyncClient
from paceline.text.request import ChatMessage, ChatPrompt


async def run_chat(options: RequestOptions, *, connection: Connection, system: str, colour: bool) -> None:
    """Reads a line, answers, and so on, each time with the whole conversation; an empty line or its end ends it.

    Raises:
        InvalidArgument: the connection cannot be what it says, or a line is no text.
        PacelineError: what the gateway says.
    """
    with connection.explaining():
        async with connection.open() as client:
            await _converse(client, options, system, colour)


async def _converse(client: AsyncClient, options: RequestOptions, system: str, colour: bool) -> None:
    answers = 0
    conversation = [ChatMessage("system", system)] if system else []
    # Fails at once when there is no gateway, and not after the first question has been typed.
    models = await client.list_models()
    err().print(f"{', '.join(model.model for model in models)}; an empty line ends", style="dim", markup=False)
    while question := await _read_line():
        conversation.append(ChatMessage("user", question))
        request = options.request(ChatPrompt(tuple(conversation)))
        completion = await stream(client, request, colour=colour, explain=not answers)
        answers += 1
        conversation.append(ChatMessage("assistant", completion.text))


async def _read_line() -> str:
    """The next line without its end, empty at the end of the input; in a thread, so that the connection lives."""
    err().print("> ", end="", style="bold")
    return (await asyncio.to_thread(read_stdin, line=True)).strip()
