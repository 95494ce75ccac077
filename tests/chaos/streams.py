"""Clients that read streams through the resuming client all the time, and write down what they saw."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

from paceline.client import AsyncClient, ResumeFailed, ResumePolicy
from paceline.errors import PacelineError, SessionBusy, Unavailable
from paceline.generation import Chunk, Finished, GenerationEvent, Started
from paceline.text.request import GenerationRequest
from tests.chaos.conversations import Conversation, Turn, draw_conversation

STREAM_TIMEOUT_S = 240.0
BUSY_PATIENCE_S = 30.0
"""How long the name of a session may stay taken by a gateway that has died."""
_RETRY_S = 0.5
_MAX_TROUBLES = 8
_NUM_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Trouble:
    """A typed error that a client got.

    Attributes:
        error: what it says.
        since: when the last token had come, or the request was made.
        at: when the client gave up.
    """

    error: PacelineError
    since: float
    at: float


@dataclass(slots=True)
class Reading:
    """One generation as its client has seen it. Times on the clock of `time.monotonic`.

    Attributes:
        name: of conversation and turn, in messages.
        request: what was asked for.
        deadline_s: how long its client tries to go on without a new token.
        left: the client left in the middle.
        prompt_tokens: from `Started`; None before it.
        tokens: ids that came.
        text: what they read as.
        finished: the last event.
        troubles: errors that came instead.
        disorder: what makes no sense in the order of the events.
        longest_gap_s: between two events.
        busy_retries: times that its name was still taken.
    """

    name: str
    request: GenerationRequest
    deadline_s: float
    began_at: float = field(default_factory=time.monotonic)
    left: bool = False
    session: str = ""
    prompt_tokens: int | None = None
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finished: Finished | None = None
    troubles: list[Trouble] = field(default_factory=list)
    disorder: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    busy_retries: int = 0
    last_at: float = field(default_factory=time.monotonic)
    resuming: bool = False

    def take(self, event: GenerationEvent) -> None:
        """Takes an event in."""
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self.last_at)
        self.last_at = now
        if self.finished is not None:
            self.disorder.append(f"{type(event).__name__} came after the end")
        match event:
            case Started():
                self._start(event)
            case Chunk():
                self.tokens += event.token_ids
                self.text += event.text
                if event.next_token != (self.prompt_tokens or 0) + len(self.tokens) or not event.token_ids:
                    self.disorder.append(f"a chunk says {event.next_token} after {len(self.tokens)} tokens")
            case Finished():
                self.finished = event

    def _start(self, event: Started) -> None:
        if self.prompt_tokens is not None and not self.resuming:
            self.disorder.append("it began twice")
        self.session, self.prompt_tokens = event.session, event.prompt_tokens
        if self.request.session not in (None, event.session) or event.seed != self.request.seed:
            self.disorder.append(f"it began as {event.session!r} with seed {event.seed}")

    def fail(self, error: PacelineError) -> None:
        """Notes an error."""
        self.troubles.append(Trouble(error, self.last_at, time.monotonic()))
        self.last_at = time.monotonic()


class Load:
    """Keeps so many streams open until it is told to stop.

    Args:
        addresses: of the gateways.
        seed: of the conversations.
        num_streams: how many at once.
        longest: most tokens of a turn.
        deadline_s: how long clients try to go on without a new token, at the start of a stream too.

    Attributes:
        readings: all generations so far.
        crashes: errors of clients that are no `PacelineError`.
    """

    def __init__(self, addresses: list[str], seed: int, num_streams: int, *, longest: int, deadline_s: float) -> None:
        self._addresses = addresses
        self._seed = seed
        self._num_streams = num_streams
        self._longest = longest
        self._deadline_s = deadline_s
        self._numbers = itertools.count()
        self._stop = asyncio.Event()
        self.readings: list[Reading] = []
        self.crashes: list[str] = []

    def stop(self) -> None:
        """No new stream is begun; those that are open go on to their end."""
        self._stop.set()

    @property
    def num_tokens(self) -> int:
        """Tokens that have come so far."""
        return sum(len(reading.tokens) for reading in self.readings)

    async def run(self) -> None:
        """Returns when the last stream has ended after `stop`."""
        policy = ResumePolicy(give_up_after_s=self._deadline_s, start_patience_s=self._deadline_s)
        async with contextlib.AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(AsyncClient(self._addresses, resume=policy))
                for _ in range(min(_NUM_CLIENTS, self._num_streams))
            ]
            async with asyncio.TaskGroup() as tasks:
                for index in range(self._num_streams):
                    tasks.create_task(self._talk(clients[index % len(clients)]))

    async def _talk(self, client: AsyncClient) -> None:
        while not self._stop.is_set():
            conversation = draw_conversation(self._seed, next(self._numbers), longest=self._longest)
            try:
                await self._converse(client, conversation)
            except Exception as error:
                self.crashes.append(f"{conversation.name}: {type(error).__name__}: {error}")

    async def _converse(self, client: AsyncClient, conversation: Conversation) -> None:
        text: tuple[int, ...] = ()
        for index, turn in enumerate(conversation.turns):
            request = turn.after(text)
            if request is None or (index and self._stop.is_set()):
                return
            reading = Reading(f"{conversation.name}, turn {index + 1}", request, self._deadline_s)
            self.readings.append(reading)
            await read(client, turn, reading)
            if reading.finished is None:
                return
            text = (*request.prompt.ids, *reading.tokens)  # type: ignore[union-attr]  # all prompts are ids


async def read(client: AsyncClient, turn: Turn, reading: Reading) -> None:
    """Reads one generation to its end. After a typed error it goes on from there, as its message says.

    Args:
        client: the resuming client.
        turn: says when to leave.
        reading: gets what comes.
    """
    stream = client.generate(reading.request, timeout_s=STREAM_TIMEOUT_S)
    busy_until = time.monotonic() + BUSY_PATIENCE_S
    while True:
        try:
            await _read_stream(stream, turn, reading)
            return
        except SessionBusy as error:
            # Its gateway died between the end and the record of it, or could not record it.
            if reading.prompt_tokens is not None or time.monotonic() >= busy_until:
                reading.fail(error)
                return
            reading.busy_retries += 1
            await asyncio.sleep(_RETRY_S)
            stream = client.generate(reading.request, timeout_s=STREAM_TIMEOUT_S)
        except PacelineError as error:
            reading.fail(error)
            if not isinstance(error, Unavailable) or len(reading.troubles) >= _MAX_TROUBLES:
                return
            await asyncio.sleep(_RETRY_S)
            if isinstance(error, ResumeFailed) and error.point is not None:
                reading.resuming = True
                stream = client.resume(error.point, timeout_s=STREAM_TIMEOUT_S)
            else:
                stream = client.generate(reading.request, timeout_s=STREAM_TIMEOUT_S)


async def _read_stream(stream: AsyncGenerator[GenerationEvent], turn: Turn, reading: Reading) -> None:
    async with contextlib.aclosing(stream):
        async for event in stream:
            reading.take(event)
            if turn.leaves_after is not None and len(reading.tokens) >= turn.leaves_after and not reading.finished:
                reading.left = True
                return
