"""What a client gets: chunks, and the bounded buffer between a session and a client that may be slow."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from paceline.errors import PacelineError
from paceline.generation import Chunk, Finished, GenerationEvent
from paceline_gateway.journal import Released

_BYTES_PER_TOKEN = 16
"""Rough size of one token's part of a chunk besides its text."""


def chunk_of(released: Released) -> Chunk:
    """A released commit as the client sees it."""
    commit = released.commit
    return Chunk(
        text="".join(commit.texts),
        token_ids=commit.tokens,
        origins=commit.origins,
        next_token=commit.from_len + len(commit.tokens),
        durable=released.durable,
        text_lengths=tuple([len(text) for text in commit.texts]),
        logprobs=commit.logprobs,
    )


def _size_bytes(event: GenerationEvent) -> int:
    if not isinstance(event, Chunk):
        return 0
    alternatives = sum(len(entry.top_tokens) for entry in event.logprobs)
    return len(event.text) * 4 + (len(event.token_ids) + alternatives) * _BYTES_PER_TOKEN


class ClientStream:
    """Events for one client. The session puts them in and never waits; it starts no round while this is full.

    It holds at most what two rounds add beyond its bounds: a full buffer stops the rounds, but not one that was sent
    before the verdict.

    Args:
        max_chunks: chunks that may wait.
        max_bytes: their rough size.
        drained: called when a full buffer has room again.
    """

    def __init__(self, max_chunks: int, max_bytes: int, drained: Callable[[], object]) -> None:
        self._max_chunks = max_chunks
        self._max_bytes = max_bytes
        self._drained = drained
        self._events: deque[GenerationEvent] = deque()
        self._bytes = 0
        self._error: PacelineError | None = None
        self._ended = False
        self._was_full = False
        self._wake = asyncio.Event()

    @property
    def full(self) -> bool:
        """Whether no round may be started."""
        return len(self._events) >= self._max_chunks or self._bytes >= self._max_bytes

    def put(self, event: GenerationEvent) -> None:
        """Adds an event; `Finished` ends the stream."""
        if self._ended:
            return
        self._events.append(event)
        self._bytes += _size_bytes(event)
        self._was_full = self._was_full or self.full
        self._ended = isinstance(event, Finished)
        self._wake.set()

    def fail(self, error: PacelineError) -> None:
        """Ends the stream with an error, after what was put before it."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wake.set()

    async def next(self) -> GenerationEvent | None:
        """The next event; None at the end.

        Raises:
            PacelineError: the generation has failed.
        """
        while not self._events:
            if self._ended:
                if self._error is not None:
                    raise self._error
                return None
            self._wake.clear()
            await self._wake.wait()
        event = self._events.popleft()
        self._bytes -= _size_bytes(event)
        # Half empty, not one below the brim: else every read of a slow client would wake the session.
        if self._was_full and len(self._events) * 2 <= self._max_chunks and self._bytes * 2 <= self._max_bytes:
            self._was_full = False
            self._drained()
        return event
