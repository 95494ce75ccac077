"""Messages that wait for one stream, and frames of them: whatever has gathered since the last frame is the next one.

Filled by anybody, emptied by one writer, on one event loop. How much may wait its owner decides.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any


class Outbox:
    """A queue of protobuf messages with their sizes.

    Args:
        frame_bytes: a frame is closed when it has this many; one larger message still travels alone.

    Attributes:
        num_bytes: sum of the sizes of what waits.
    """

    def __init__(self, frame_bytes: int) -> None:
        self._frame_bytes = frame_bytes
        self._messages: deque[tuple[Any, int]] = deque()
        self._wake = asyncio.Event()
        self._finishing = False
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: Any, size_bytes: int | None = None) -> None:
        """Adds a message, with its size if that is known already."""
        if size_bytes is None:
            size_bytes = message.ByteSize()
        self._messages.append((message, size_bytes))
        self.num_bytes += size_bytes
        self._wake.set()

    def clear(self) -> None:
        """Forgets what waits."""
        self._messages.clear()
        self.num_bytes = 0

    def finish(self) -> None:
        """Lets `next_frame` end when nothing waits any more."""
        self._finishing = True
        self._wake.set()

    async def next_frame(self) -> list[Any]:
        """Messages for one frame, waited for; none after `finish`, when all have been taken."""
        while not self._messages and not self._finishing:
            self._wake.clear()
            await self._wake.wait()
        frame: list[Any] = []
        frame_bytes = 0
        while self._messages and (not frame or frame_bytes + self._messages[0][1] <= self._frame_bytes):
            message, size_bytes = self._messages.popleft()
            frame.append(message)
            frame_bytes += size_bytes
        self.num_bytes -= frame_bytes
        return frame
