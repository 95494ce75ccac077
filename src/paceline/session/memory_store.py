"""Records of sessions in this process's memory: for tests, and for one gateway without Redis.

Behaves as `RedisStore` does, expiry included; the same contract tests run over both.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.session.store import (
    Append,
    AppendOutcome,
    SessionRecord,
    SessionState,
    busy_session,
    unknown_session,
)


@dataclass(slots=True)
class _Entry:
    record: SessionRecord
    expires_at: float


class MemoryStore:
    """A `SessionStore` without a server.

    Args:
        expiry_s: seconds that a record lives after its last write or touch.
        clock: seconds that only grow.
    """

    def __init__(self, *, expiry_s: float = 3600.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._expiry_s = expiry_s
        self._clock = clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # by expiry: every write moves its entry to the end
        self._owners_until: dict[str, float] = {}

    @property
    def num_records(self) -> int:
        """Records held, expired ones that were not noticed yet among them."""
        return len(self._entries)

    async def create(self, record: SessionRecord) -> None:
        """See `SessionStore.create`."""
        before = self._live(record.session)
        if before is not None:
            if before.tenant != record.tenant:
                raise unknown_session(record.session)
            if before.state is SessionState.RUNNING or before.epoch >= record.epoch:
                raise busy_session(record.session)
        self._write(record)

    async def put(self, record: SessionRecord) -> AppendOutcome:
        """See `SessionStore.put`."""
        before = self._live(record.session)
        if before is not None and (
            before.tenant != record.tenant or _refusal(before, record.epoch, record.owner) is AppendOutcome.FENCED
        ):
            return AppendOutcome.FENCED
        self._write(record)
        return AppendOutcome.APPLIED

    async def append(self, append: Append) -> AppendOutcome:
        """See `SessionStore.append`."""
        record = self._live(append.session)
        refusal = _refusal(record, append.epoch, append.owner)
        if record is None or refusal is not None:
            return refusal or AppendOutcome.MISSING
        have, start, stop = record.committed_len, append.from_len, append.from_len + len(append.tokens)
        overlap = min(have, stop) - start
        if have < start or record.tokens[start : start + overlap] != append.tokens[:overlap]:
            return AppendOutcome.MISSING
        if have > stop or (have == stop and append.tokens):
            self._write(record)
            return AppendOutcome.ALREADY_APPLIED
        self._write(
            replace(record, tokens=record.tokens + append.tokens[overlap:], positions=append.positions),
        )
        return AppendOutcome.APPLIED

    async def finish(
        self, session: str, epoch: int, owner: str, state: SessionState, finish_reason: str
    ) -> AppendOutcome:
        """See `SessionStore.finish`."""
        record = self._live(session)
        refusal = _refusal(record, epoch, owner)
        if record is None or refusal is not None:
            return refusal or AppendOutcome.MISSING
        self._write(replace(record, state=state, finish_reason=finish_reason))
        same = record.state is state and record.finish_reason == finish_reason
        return AppendOutcome.ALREADY_APPLIED if same else AppendOutcome.APPLIED

    async def take_over(self, seen: SessionRecord, owner: str, epoch: int) -> AppendOutcome:
        """See `SessionStore.take_over`."""
        record = self._live(seen.session)
        refusal = _refusal(record, seen.epoch, seen.owner)
        if record is None or refusal is not None:
            return refusal or AppendOutcome.MISSING
        self._write(replace(record, epoch=epoch, owner=owner, state=SessionState.RUNNING, finish_reason=""))
        return AppendOutcome.APPLIED

    async def touch(self, session: str, epoch: int, owner: str) -> AppendOutcome:
        """See `SessionStore.touch`."""
        record = self._live(session)
        refusal = _refusal(record, epoch, owner)
        if record is None or refusal is not None:
            return refusal or AppendOutcome.MISSING
        self._write(record)
        return AppendOutcome.APPLIED

    async def get(self, session: str) -> SessionRecord | None:
        """See `SessionStore.get`."""
        return self._live(session)

    async def beat(self, owner: str, life_s: float) -> None:
        """See `SessionStore.beat`."""
        self._owners_until[owner] = self._clock() + life_s

    async def is_alive(self, owner: str) -> bool:
        """See `SessionStore.is_alive`."""
        return self._owners_until.get(owner, 0.0) > self._clock()

    async def ping(self) -> None:
        """Memory always answers."""

    async def close(self) -> None:
        """Forgets all records."""
        self._entries.clear()

    def _write(self, record: SessionRecord) -> None:
        self._entries[record.session] = _Entry(record, self._clock() + self._expiry_s)
        self._entries.move_to_end(record.session)

    def _live(self, session: str) -> SessionRecord | None:
        """The record unless it has expired; drops all that have."""
        now = self._clock()
        while self._entries:
            oldest = next(iter(self._entries))
            if self._entries[oldest].expires_at > now:
                break
            del self._entries[oldest]
        entry = self._entries.get(session)
        return entry.record if entry else None


def _refusal(record: SessionRecord | None, epoch: int, owner: str) -> AppendOutcome | None:
    if record is None or record.epoch < epoch:
        return AppendOutcome.MISSING
    return AppendOutcome.FENCED if record.epoch > epoch or record.owner != owner else None
