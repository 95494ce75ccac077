"""Work between passes: whoever waits gets its result or its error, and the owner's loop survives either."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.errors import NotFound, PacelineError, Unavailable
from paceline.runtime.side_work import SideWork


def raises(error: Exception) -> Any:
    raise error


async def test_the_one_who_waits_gets_the_result() -> None:
    work = SideWork(lambda: 7, asyncio.get_running_loop().create_future())
    work.do()
    assert await work.answer == 7


async def test_an_error_goes_to_the_one_who_waits() -> None:
    refused = SideWork(lambda: raises(NotFound("no such session")), asyncio.get_running_loop().create_future())
    refused.do()
    with pytest.raises(NotFound, match="no such session"):
        await refused.answer
    broken = SideWork(lambda: raises(ZeroDivisionError()), asyncio.get_running_loop().create_future())
    broken.do()
    with pytest.raises(PacelineError, match="internal error"):
        await broken.answer


async def test_what_nobody_waits_for_is_not_done() -> None:
    done: list[int] = []
    work = SideWork(lambda: done.append(1), asyncio.get_running_loop().create_future())
    work.answer.cancel()
    work.do()
    work.refuse(Unavailable("shutting down"))
    assert done == []


async def test_what_is_not_done_any_more_is_refused() -> None:
    work = SideWork(lambda: 7, asyncio.get_running_loop().create_future())
    work.refuse(Unavailable("shutting down"))
    with pytest.raises(Unavailable):
        await work.answer
