"""`paceline generate`: one completion, streamed in the colours of its tokens."""

from __future__ import annotations

from rich.console import Console

from paceline.cli.connection import Connection
from paceline.cli.console import err, out, to_json
from paceline.cli.render import Summary, coloured, legend, summary_line
from paceline.cli.request import Completion, RequestOptions, complete
from paceline.client import AsyncClient
from paceline.generation import Chunk, Started
from paceline.text.request import ChatMessage, ChatPrompt, GenerationRequest, Prompt, TextPrompt


async def run_generate(
    text: str,
    options: RequestOptions,
    *,
    connection: Connection,
    chat: bool,
    system: str,
    colour: bool,
    json_output: bool,
) -> None:
    """Generates and prints: the text to standard output, what was measured to standard error, or all as JSON.

    Raises:
        InvalidArgument: the connection cannot be what it says, or no message can hold an option.
        PacelineError: what the gateway says.
    """
    request = options.request(prompt_of(text, chat=chat, system=system))
    with connection.explaining():
        async with connection.open() as client:
            await _run(client, request, colour=colour, json_output=json_output)


async def _run(client: AsyncClient, request: GenerationRequest, *, colour: bool, json_output: bool) -> None:
    if json_output:
        completion = await complete(client, request)
        out().print(to_json(completion), markup=False)
    else:
        await stream(client, request, colour=colour)


def prompt_of(text: str, *, chat: bool, system: str) -> Prompt:
    """The prompt: bare text, or a conversation of one turn."""
    if not chat:
        return TextPrompt(text)
    first = (ChatMessage("system", system),) if system else ()
    return ChatPrompt((*first, ChatMessage("user", text)))


async def stream(client: AsyncClient, request: GenerationRequest, *, colour: bool, explain: bool = True) -> Completion:
    """Prints tokens as they come, then the line with the evidence.

    Args:
        client: a connection to a gateway.
        request: what to generate.
        colour: show where each token came from, in a terminal.
        explain: say what the colours mean.

    Raises:
        PacelineError: what the gateway says.
    """
    console, notes = out(), err()
    if console.is_terminal and colour and explain:
        notes.print(legend())

    def on_start(started: Started) -> None:
        for warning in started.warnings:
            notes.print(f"[yellow]warning:[/] {warning}", markup=True)

    def on_chunk(chunk: Chunk) -> None:
        _print_chunk(console, chunk, colour)

    completion = await complete(client, request, on_start=on_start, on_chunk=on_chunk)
    console.print()
    notes.print(summary_line(summarise(completion)), style="dim")
    if not completion.durable:
        notes.print("[yellow]warning:[/] the session store was silent: the end of this text may not be recorded")
    return completion


def _print_chunk(console: Console, chunk: Chunk, colour: bool) -> None:
    """To a terminal in colours, and never with a control sequence of the model's making; to a file as it is."""
    if console.is_terminal:
        text = coloured(chunk.text.replace("\x1b", "␛"), chunk.text_lengths, chunk.origins)
        console.print(text if colour else text.plain, end="", markup=False)
    else:
        console.file.write(chunk.text)
    console.file.flush()


def summarise(completion: Completion) -> Summary:
    """What the last line tells of a completion."""
    evidence = completion.evidence
    return Summary(
        tokens=len(completion.token_ids),
        passes=evidence.target_passes,
        tokens_per_pass=evidence.tokens_per_target_pass,
        acceptance=completion.acceptance,
        tokens_per_second=completion.tokens_per_second,
        draft_ms=evidence.draft_ms,
        verify_ms=evidence.verify_ms,
        wire_ms=evidence.wire_ms,
    )
