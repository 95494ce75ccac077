"""Expiry with a clock of our own; everything else is in the contract tests that run over all stores."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from paceline.messages import AcceptanceRule, SamplingParams
from paceline.session.memory_store import MemoryStore
from paceline.session.store import Append, AppendOutcome, Positions, SessionRecord, SessionState, SessionStore


def record(name: str) -> SessionRecord:
    return SessionRecord(
        name, 1, "gateway", "", SessionState.RUNNING, "m", SamplingParams(), AcceptanceRule.MATCH, 1, (5,)
    )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


WRITES: dict[str, Callable[[SessionStore], Awaitable[object]]] = {
    "append": lambda store: store.append(Append("a", 1, "gateway", 1, (6,), Positions())),
    "put": lambda store: store.put(record("a")),
    "finish": lambda store: store.finish("a", 1, "gateway", SessionState.FINISHED, "stop"),
    "touch": lambda store: store.touch("a", 1, "gateway"),
    "take_over": lambda store: store.take_over(record("a"), "another", 2),
}


@pytest.mark.parametrize("write", WRITES)
async def test_records_expire_and_every_write_extends_them(write: str) -> None:
    clock = Clock()
    store = MemoryStore(expiry_s=10, clock=clock)
    await store.create(record("a"))
    await store.create(record("b"))
    clock.now = 9.0
    await WRITES[write](store)
    clock.now = 18.9
    assert await store.get("b") is None
    assert await store.get("a") is not None
    clock.now = 19.0
    assert await store.get("a") is None
    assert await store.append(Append("a", 1, "gateway", 1, (6,), Positions())) is AppendOutcome.MISSING
    await store.create(record("a"))


async def test_expired_records_are_forgotten_by_whatever_comes_next() -> None:
    clock = Clock()
    store = MemoryStore(expiry_s=10, clock=clock)
    for index in range(100):
        await store.create(record(f"s{index}"))
    clock.now = 10.0
    await store.create(record("new"))
    assert store.num_records == 1
    await store.close()
    assert store.num_records == 0
