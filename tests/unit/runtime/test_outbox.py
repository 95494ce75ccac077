from __future__ import annotations

import asyncio

from paceline.runtime.outbox import Outbox
from paceline.v1 import common_pb2


def hello(size_bytes: int) -> common_pb2.Hello:
    message = common_pb2.Hello(boot_id="x" * (size_bytes - 2))  # tag and length take a byte each
    assert message.ByteSize() == size_bytes
    return message


async def test_what_gathers_is_one_frame_until_it_is_large() -> None:
    outbox = Outbox(frame_bytes=100)
    messages = [hello(size_bytes) for size_bytes in (50, 50, 20, 120, 90, 20)]
    for message in messages:
        outbox.put(message)
    assert (len(outbox), outbox.num_bytes) == (6, 350)
    frames = []
    while outbox:
        frames.append(await outbox.next_frame())
    assert frames == [messages[:2], messages[2:3], messages[3:4], messages[4:5], messages[5:]]
    assert outbox.num_bytes == 0


async def test_a_frame_is_waited_for() -> None:
    outbox = Outbox(frame_bytes=100)
    taking = asyncio.create_task(outbox.next_frame())
    await asyncio.sleep(0)
    assert not taking.done()
    outbox.put(hello(10))
    outbox.put(hello(20))
    assert await taking == [hello(10), hello(20)]


async def test_finish_lets_out_what_waits_and_then_ends() -> None:
    outbox = Outbox(frame_bytes=100)
    outbox.put(hello(10))
    outbox.finish()
    assert await outbox.next_frame() == [hello(10)]
    assert await outbox.next_frame() == []


async def test_finish_ends_a_writer_that_waits() -> None:
    outbox = Outbox(frame_bytes=100)
    taking = asyncio.create_task(outbox.next_frame())
    await asyncio.sleep(0)
    outbox.finish()
    assert await taking == []


async def test_what_is_cleared_is_not_sent() -> None:
    outbox = Outbox(frame_bytes=100)
    outbox.put(hello(10))
    outbox.clear()
    assert (len(outbox), outbox.num_bytes) == (0, 0)
    outbox.put(hello(20))
    assert await outbox.next_frame() == [hello(20)]
