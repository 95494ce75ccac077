"""Clients that leave: work that ends with its connection."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from paceline_gateway.http.errors import ClientLeft

ResultT = TypeVar("ResultT")


async def unless_left(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Does the work while the client is there.

    Args:
        receive: the request's, its body read.
        work: cancelled at once when the client leaves.

    Raises:
        ClientLeft: it has left before the work was done.
    """
    try:
        async with asyncio.TaskGroup() as group:
            working = group.create_task(work)
            watching = group.create_task(_disconnected(receive))
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            working.cancel()
            watching.cancel()
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None
    if working.cancelled():
        raise ClientLeft
    return working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
