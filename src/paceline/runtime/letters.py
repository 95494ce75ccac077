"""What lies in an actor's mailbox of the things that streams bring; the rest is `side_work`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.messages import Close, Draft, Open, Verify
from paceline.runtime.connect import EventStream

CommandT = TypeVar("CommandT", bound=Open | Close | Verify | Draft)
EventT = TypeVar("EventT")


@dataclass(frozen=True, slots=True)
class Letter(Generic[CommandT, EventT]):
    """A command with where it came from and when, in seconds of the monotonic clock."""

    stream: EventStream[EventT]
    command: CommandT
    arrived_s: float


@dataclass(frozen=True, slots=True)
class StreamEnded(Generic[EventT]):
    """A stream brings no more commands."""

    stream: EventStream[EventT]
