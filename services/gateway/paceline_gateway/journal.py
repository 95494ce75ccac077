"""From final tokens to the session's record, and only then to the client. Pure: it says what to write and what to send.

    [0, stored_len)            the record holds them
    [stored_len, len(log))     final, not acknowledged yet

A commit is released to the client when the record holds it. At most one write is on its way, and the next one takes
everything that has gathered. If the store is silent for `ack_timeout_s`, or fails, commits are released at once and
marked undurable until the whole missing suffix has been written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.errors import Fenced
from paceline.session.store import Append, AppendOutcome, Positions, SessionRecord, SessionState
from paceline.token_log import TokenLog
from paceline_gateway.effects import Commit

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class CreateRecord:
    """Write a new record; a session of that name must not exist."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class PutRecord:
    """Write the whole record over what is left of it, or over an older one."""

    record: SessionRecord


@dataclass(frozen=True, slots=True)
class FinishRecord:
    """The generation has ended."""

    session: str
    epoch: int
    owner: str
    state: SessionState
    reason: str


@dataclass(frozen=True, slots=True)
class TouchRecord:
    """Keep the record alive."""

    session: str
    epoch: int
    owner: str


Write = CreateRecord | Append | PutRecord | FinishRecord | TouchRecord


@dataclass(frozen=True, slots=True)
class Released:
    """A commit that may be sent now."""

    commit: Commit
    durable: bool


class Journal:
    """The record of one session as its owner writes it.

    Args:
        record: the session's first record.
        log: the session's committed tokens; shared, only read here.
        positions: where the session stands, asked for at each write.
        ack_timeout_s: silence of the store after which the stream goes on without it.
        touch_every_s: most time without a write.
        stored: the record is there already, tokens and all.
    """

    def __init__(
        self,
        record: SessionRecord,
        log: TokenLog,
        positions: Callable[[], Positions],
        *,
        ack_timeout_s: float,
        touch_every_s: float,
        stored: bool = False,
    ) -> None:
        self._record = record
        self._log = log
        self._positions = positions
        self._ack_timeout_s = ack_timeout_s
        self._touch_every_s = touch_every_s
        self._waiting: deque[Commit] = deque()
        self._in_flight: Write | None = None
        self._sent_at = 0.0
        self._written_at = 0.0
        self._retry_at: float | None = None
        self._retry_s = _FIRST_RETRY_S
        self._exists = stored
        self._rewrite = False
        self._stored_len = len(record.tokens) if stored else 0
        self._ended: tuple[SessionState, str] | None = None
        self._finished = False
        self.silent = False
        """The store does not answer: commits are released without it."""

    @property
    def exists(self) -> bool:
        """The store has acknowledged that the record is there."""
        return self._exists

    @property
    def num_waiting(self) -> int:
        """Commits that were not released yet."""
        return len(self._waiting)

    @property
    def settled(self) -> bool:
        """The record holds everything, the end included."""
        return self._finished

    @property
    def deadline(self) -> float | None:
        """When `tick` or `next_write` has something to do although nothing happened."""
        if self._finished:
            return None
        if self._in_flight is not None:
            return None if self.silent else self._sent_at + self._ack_timeout_s
        return self._retry_at if self._retry_at is not None else self._written_at + self._touch_every_s

    def add(self, commit: Commit) -> None:
        """Tokens became final; the log holds them already."""
        self._waiting.append(commit)

    def end(self, state: SessionState, reason: str) -> None:
        """No commit will come any more."""
        self._ended = (state, reason)

    def abandon(self) -> None:
        """Writes nothing any more: the record belongs to somebody else."""
        self._finished = True

    def tick(self, now: float) -> None:
        """Notes the store's silence.

        A process that was stopped for a while has not listened: it may be the owner no more, and the answer that says
        so waits to be read.
        """
        if self._in_flight is None or now < self._sent_at + self._ack_timeout_s:
            return
        if now >= self._sent_at + 2 * self._ack_timeout_s and not self.silent:
            self._sent_at = now
        else:
            self.silent = True

    def next_write(self, now: float) -> Write | None:
        """What to write now, if anything; counts as on its way."""
        if self._in_flight is not None or self._finished or (self._retry_at is not None and now < self._retry_at):
            return None
        self._retry_at = None
        write = self._choose(now)
        if write is not None:
            self._in_flight = write
            self._sent_at = now
        return write

    def _choose(self, now: float) -> Write | None:
        record = self._record
        if self._rewrite:
            state, reason = self._ended or (SessionState.RUNNING, "")
            tokens = self._log.slice(0, len(self._log))
            return PutRecord(
                replace(record, tokens=tokens, positions=self._positions(), state=state, finish_reason=reason)
            )
        if not self._exists:
            return CreateRecord(record)
        if self._stored_len < len(self._log):
            missing = self._log.slice(self._stored_len, len(self._log))
            return Append(record.session, record.epoch, record.owner, self._stored_len, missing, self._positions())
        if self._ended is not None:
            return FinishRecord(record.session, record.epoch, record.owner, *self._ended)
        if now >= self._written_at + self._touch_every_s:
            return TouchRecord(record.session, record.epoch, record.owner)
        return None

    def answered(self, outcome: AppendOutcome, now: float) -> None:
        """The store has answered the write that was on its way.

        Raises:
            Fenced: somebody else owns the session.
        """
        write, self._in_flight = self._in_flight, None
        self._retry_s = _FIRST_RETRY_S
        self._written_at = now
        if outcome is AppendOutcome.FENCED:
            raise Fenced(f"another gateway has taken over session {self._record.session}")
        if outcome is AppendOutcome.MISSING:
            self._exists = self._rewrite = True
            return
        match write:
            case CreateRecord() | PutRecord():
                self._exists, self._rewrite = True, False
                self._stored_len = len(write.record.tokens)
                self._finished = write.record.state is not SessionState.RUNNING
            case Append():
                self._stored_len = write.from_len + len(write.tokens)
            case FinishRecord():
                self._finished = True
            case _:
                pass
        if self._stored_len == len(self._log):
            self.silent = False

    def failed(self, now: float) -> None:
        """The write that was on its way failed; it is unknown whether it arrived."""
        if isinstance(self._in_flight, CreateRecord):
            # It may be there or not: the owner of a name that it drew itself may overwrite it.
            self._exists = self._rewrite = True
        self._in_flight = None
        self.silent = True
        self._retry_at = now + self._retry_s
        self._retry_s = min(self._retry_s * 2, _LAST_RETRY_S)

    def release(self) -> list[Released]:
        """Commits that may be sent now; each is given once."""
        released: list[Released] = []
        while self._waiting:
            commit = self._waiting[0]
            durable = commit.from_len + len(commit.tokens) <= self._stored_len
            if not durable and not self.silent:
                break
            released.append(Released(self._waiting.popleft(), durable))
        return released
