from __future__ import annotations

import asyncio

import pytest
from paceline_gateway.emission import ClientStream

from paceline.errors import Unavailable
from paceline.generation import Chunk, Evidence, Finished, Started
from paceline.messages import FinishReason, TokenOrigin


def chunk(token: int) -> Chunk:
    return Chunk("x", (token,), (TokenOrigin.PLAIN,), token + 1, True, (1,))


async def test_events_come_out_in_order_and_end() -> None:
    stream = ClientStream(8, 10_000, lambda: None)
    stream.put(Started("s", "m", 1, 0))
    stream.put(chunk(1))
    stream.put(Finished(FinishReason.STOP, 1, 1, Evidence()))
    stream.put(chunk(2))
    stream.fail(Unavailable("too late"))
    kinds = [type(event) for event in [await stream.next(), await stream.next(), await stream.next()]]
    assert kinds == [Started, Chunk, Finished]
    assert await stream.next() is None


async def test_an_error_comes_after_what_was_put_before_it() -> None:
    stream = ClientStream(8, 10_000, lambda: None)
    stream.put(chunk(1))
    stream.fail(Unavailable("gone"))
    stream.put(chunk(2))
    assert isinstance(await stream.next(), Chunk)
    with pytest.raises(Unavailable):
        await stream.next()


async def test_a_reader_is_woken() -> None:
    stream = ClientStream(8, 10_000, lambda: None)
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(stream.next())
        await asyncio.sleep(0)
        stream.put(chunk(1))
    assert isinstance(reading.result(), Chunk)


async def test_full_and_drained_with_hysteresis() -> None:
    drained: list[int] = []
    stream = ClientStream(4, 10_000, lambda: drained.append(1))
    for token in range(3):
        stream.put(chunk(token))
    assert not stream.full
    stream.put(chunk(3))
    assert stream.full
    await stream.next()
    assert not stream.full
    assert not drained
    await stream.next()
    assert drained == [1]
    await stream.next()
    assert drained == [1]


async def test_bytes_fill_it_too() -> None:
    stream = ClientStream(100, 1000, lambda: None)
    stream.put(Chunk("x" * 300, (1,), (TokenOrigin.PLAIN,), 2, True, (300,)))
    assert stream.full
