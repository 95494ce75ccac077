"""The mailbox: bounds, reserved slots, batches, the two stop verbs."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import CapacityExceeded, Unavailable
from paceline.runtime.mailbox import Mailbox, MailboxStopped


def make(max_items: int = 3, max_bytes: int = 100, reserved_items: int = 2) -> Mailbox[str]:
    return Mailbox("the test's mailbox", max_items=max_items, max_bytes=max_bytes, reserved_items=reserved_items)


async def test_batch_holds_all_that_has_gathered_in_order() -> None:
    mailbox = make()
    mailbox.put("a", 10)
    mailbox.put_reserved("b")
    mailbox.put("c", 20)
    assert (len(mailbox), mailbox.num_bytes) == (3, 30)
    assert await mailbox.get_batch() == ["a", "b", "c"]
    assert (len(mailbox), mailbox.num_bytes) == (0, 0)


async def test_waiting_owner_is_woken_by_the_first_item() -> None:
    mailbox = make()
    async with asyncio.TaskGroup() as tasks:
        waiting = tasks.create_task(mailbox.get_batch())
        await asyncio.sleep(0)
        mailbox.put("a")
        mailbox.put("b")
    assert waiting.result() == ["a", "b"]


async def test_refusal_by_count_and_by_bytes_names_the_numbers() -> None:
    mailbox = make()
    for item in "abc":
        mailbox.put(item, 1)
    with pytest.raises(CapacityExceeded, match="3 of 3 items"):
        mailbox.put("d")
    assert mailbox.take() == ["a", "b", "c"]
    mailbox.put("a", 60)
    with pytest.raises(CapacityExceeded, match="60 of 100 bytes wait and the new item has 41"):
        mailbox.put("b", 41)
    mailbox.put("b", 40)


async def test_reply_finds_room_in_a_full_mailbox() -> None:
    mailbox = make()
    for item in "abc":
        mailbox.put(item)
    mailbox.put_reserved("reply")
    mailbox.put_reserved("cancel")
    with pytest.raises(CapacityExceeded, match="2 of 2"):
        mailbox.put_reserved("one too many")
    assert mailbox.take() == ["a", "b", "c", "reply", "cancel"]
    mailbox.put_reserved("reply")


async def test_drain_delivers_what_waits_and_takes_replies_only() -> None:
    mailbox = make()
    mailbox.put("a")
    mailbox.drain()
    with pytest.raises(Unavailable):
        mailbox.put("b")
    mailbox.put_reserved("reply")
    assert await mailbox.get_batch() == ["a", "reply"]
    with pytest.raises(MailboxStopped):
        await mailbox.get_batch()


async def test_stop_hands_over_the_waiters_and_refuses_everything() -> None:
    mailbox = make()
    mailbox.put("a")
    mailbox.put_reserved("b")
    assert mailbox.stop() == ["a", "b"]
    with pytest.raises(Unavailable):
        mailbox.put("c")
    with pytest.raises(Unavailable):
        mailbox.put_reserved("c")
    with pytest.raises(MailboxStopped):
        await mailbox.get_batch()


@pytest.mark.parametrize("verb", ["drain", "stop"])
async def test_waiting_owner_learns_of_the_end(verb: str) -> None:
    mailbox = make()
    waiting = asyncio.ensure_future(mailbox.get_batch())
    await asyncio.sleep(0)
    getattr(mailbox, verb)()
    with pytest.raises(MailboxStopped):
        await waiting


async def test_cancelled_owner_loses_nothing() -> None:
    mailbox = make()
    waiting = asyncio.ensure_future(mailbox.get_batch())
    await asyncio.sleep(0)
    mailbox.put("a")
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await mailbox.get_batch() == ["a"]
