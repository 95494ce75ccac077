"""The mailbox of an actor: bounded by count and bytes, drained in batches by one owner.

| call | refused when | for |
|---|---|---|
| `put` | `max_items` or `max_bytes` of ordinary items wait, or the mailbox is draining | commands from outside |
| `put_reserved` | the mailbox has stopped, or `reserved_items` of reserved items wait | replies, cancel, stop |

Reserved items have slots of their own, so however full the mailbox is a reply finds room: whoever sends a request
that will be answered into a mailbox keeps the number of open requests at or below `reserved_items`.

A mailbox belongs to one event loop and is not for use from other threads.
"""

from __future__ import annotations

import asyncio
from typing import Generic, TypeVar

from paceline.errors import CapacityExceeded, Unavailable

T = TypeVar("T")


class MailboxStopped(Exception):
    """No item will come any more: the owner's signal to leave its loop."""


class Mailbox(Generic[T]):
    """Items for one owner, in the order of arrival.

    Args:
        name: appears in refusals.
        max_items: ordinary items that may wait.
        max_bytes: sum of their stated sizes.
        reserved_items: reserved items that may wait on top.
    """

    def __init__(self, name: str, *, max_items: int, max_bytes: int, reserved_items: int) -> None:
        self.name = name
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._reserved_items = reserved_items
        self._items: list[T] = []
        self._num_ordinary = 0
        self._num_reserved = 0
        self._num_bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._draining = False
        self._stopped = False

    def __len__(self) -> int:
        return len(self._items)

    @property
    def num_bytes(self) -> int:
        """Stated bytes of the ordinary items that wait."""
        return self._num_bytes

    @property
    def draining(self) -> bool:
        """Whether `drain` or `stop` was called."""
        return self._draining

    def put(self, item: T, size_bytes: int = 0) -> None:
        """Adds an item; never waits.

        Raises:
            CapacityExceeded: the mailbox is full; the message has the numbers.
            Unavailable: the mailbox is draining or has stopped.
        """
        if self._draining:
            raise Unavailable(f"{self.name} is shutting down; use another replica")
        if self._num_ordinary >= self._max_items:
            raise CapacityExceeded(f"{self.name} is full: {self._num_ordinary} of {self._max_items} items wait; retry")
        if self._num_bytes + size_bytes > self._max_bytes:
            raise CapacityExceeded(
                f"{self.name} is full: {self._num_bytes} of {self._max_bytes} bytes wait and the new item has "
                f"{size_bytes}; retry"
            )
        self._num_ordinary += 1
        self._num_bytes += size_bytes
        self._add(item)

    def put_reserved(self, item: T) -> None:
        """Adds an item that a full or draining mailbox must not refuse: a reply or a cancel.

        Raises:
            CapacityExceeded: more reserved items wait than slots are reserved, which is a fault of the sender.
            Unavailable: the mailbox has stopped, so nobody waits for the item.
        """
        if self._stopped:
            raise Unavailable(f"{self.name} has stopped")
        if self._num_reserved >= self._reserved_items:
            raise CapacityExceeded(
                f"{self.name} has no reserved slot left: {self._num_reserved} of {self._reserved_items} are taken"
            )
        self._num_reserved += 1
        self._add(item)

    def _add(self, item: T) -> None:
        self._items.append(item)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> list[T]:
        """All that waits now, perhaps nothing; frees its room."""
        items, self._items = self._items, []
        self._num_ordinary = self._num_reserved = self._num_bytes = 0
        return items

    async def get_batch(self) -> list[T]:
        """All that has gathered; waits until there is something.

        Raises:
            MailboxStopped: it is drained and empty, or has stopped.
        """
        while not self._items:
            if self._draining:
                raise MailboxStopped(self.name)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self.take()

    def drain(self) -> None:
        """Refuses ordinary items from now on. The owner still gets what waits; then `get_batch` raises."""
        self._draining = True
        self._wake()

    def stop(self) -> list[T]:
        """Refuses every item from now on and hands over what waited, so that the owner can answer every waiter."""
        self._draining = self._stopped = True
        self._wake()
        return self.take()
