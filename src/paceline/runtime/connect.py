"""The server side of a `Connect` stream: frames in, frames out, many sessions on one stream.

A reader hands each command to the actor; a writer sends whatever events have gathered since the last frame, so under
load the cost of a frame is shared. They are separate tasks: a peer that does not read its answers stalls only its own
stream. While half of its outbox waits no more of its commands are taken; if it reads nothing for `unread_timeout_s`
then, or the outbox gets full, the stream is ended. A command that makes no sense is answered with `Failed` and
hurts no other command of its frame.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import grpc.aio
from google.protobuf.message import DecodeError

from paceline.errors import CapacityExceeded, InvalidArgument, PacelineError
from paceline.messages import Failed, Hello
from paceline.runtime.outbox import Outbox
from paceline.wire import CommandRef

logger = logging.getLogger(__name__)

CommandT = TypeVar("CommandT")
EventT = TypeVar("EventT")
CommandT_contra = TypeVar("CommandT_contra", contravariant=True)
EventT_co = TypeVar("EventT_co", covariant=True)
EventT_contra = TypeVar("EventT_contra", contravariant=True)

_COMMANDS_PER_TURN = 512
"""A reader lets everybody else go on after so many commands of one frame."""


@dataclass(frozen=True, slots=True)
class ConnectLimits:
    """Bounds of one stream.

    Attributes:
        outbox_events: events that may wait for a peer that does not read. Half of them are room for answers to
            commands that were taken already, so a full mailbox of an actor should fit in it.
        outbox_bytes: sum of their sizes.
        unread_timeout_s: how long half of that may wait for a peer that reads nothing.
        frame_bytes: a frame is closed when it has this many; one larger event still travels alone.
    """

    outbox_events: int = 32_768
    outbox_bytes: int = 32 * 2**20
    unread_timeout_s: float = 10.0
    frame_bytes: int = 2**20

    @classmethod
    def within(cls, max_message_bytes: int) -> ConnectLimits:
        """Limits of a server whose messages may have so many bytes; a frame is a little more than its events."""
        return cls(frame_bytes=min(cls().frame_bytes, max_message_bytes // 2))


class EventStream(Protocol[EventT_contra]):
    """One peer's stream as the actor sees it. Used on the event loop only."""

    @property
    def name(self) -> str:
        """For logs: the peer and a number."""

    def send(self, event: EventT_contra) -> None:
        """Queues an event. Never waits and never raises: a broken stream forgets it."""

    def finish(self) -> None:
        """Ends the stream when what is queued has been sent."""


class CommandSink(Protocol[CommandT_contra, EventT_co]):
    """What a stream asks of the actor."""

    def submit(self, stream: EventStream[EventT_co], command: CommandT_contra, size_bytes: int) -> None:
        """Takes a command; never waits.

        Raises:
            PacelineError: it is refused; the stream answers with `Failed`.
        """

    def stream_ended(self, stream: EventStream[EventT_co]) -> None:
        """No command will come over this stream any more."""


@dataclass(frozen=True, slots=True)
class ConnectCodec(Generic[CommandT, EventT]):
    """How a service's frames are read and written.

    Attributes:
        command_ref: names a command that cannot be parsed.
        command_from_pb: parses one command; raises `InvalidArgument`.
        event_to_pb: makes one event.
        frame: makes a response frame of events.
    """

    command_ref: Callable[[Any], CommandRef]
    command_from_pb: Callable[[Any], CommandT]
    event_to_pb: Callable[[EventT | Hello | Failed], Any]
    frame: Callable[[Sequence[Any]], Any]


class _Stream(Generic[EventT]):
    """One stream: its bounded outbox and how it ends."""

    _numbers = itertools.count(1)

    def __init__(self, peer: str, to_pb: Callable[[EventT | Hello | Failed], Any], limits: ConnectLimits) -> None:
        self.name = f"{peer}#{next(self._numbers)}"
        self.half_closed = False
        self._to_pb = to_pb
        self._limits = limits
        self._outbox = Outbox(limits.frame_bytes)
        self._finishing = False
        self._broken = False
        self._failure: PacelineError | None = None
        self._failed = asyncio.Event()
        self._taken = asyncio.Event()

    def send(self, event: EventT | Hello | Failed) -> None:
        if self._broken or self._finishing:
            return
        self._outbox.put(self._to_pb(event))
        if self._filled_beyond(1.0):
            self._fail_unread(1.0)

    def _filled_beyond(self, share: float) -> bool:
        limits = self._limits
        return len(self._outbox) > share * limits.outbox_events or self._outbox.num_bytes > share * limits.outbox_bytes

    def _fail_unread(self, share: float) -> None:
        self.fail(
            CapacityExceeded(
                f"the peer does not read: more than {int(share * self._limits.outbox_events)} events or "
                f"{int(share * self._limits.outbox_bytes)} bytes wait for it; connect again and read"
            )
        )

    async def room(self) -> None:
        """Returns when at most half of the outbox waits; fails the stream if the peer reads nothing meanwhile."""
        while self._filled_beyond(0.5):
            self._taken.clear()
            try:
                async with asyncio.timeout(self._limits.unread_timeout_s):
                    await self._taken.wait()
            except TimeoutError:
                self._fail_unread(0.5)

    def finish(self) -> None:
        self._finishing = True
        self._outbox.finish()

    def break_off(self) -> None:
        """Forgets what is queued and whatever comes."""
        self._broken = True
        self._outbox.clear()

    def fail(self, error: PacelineError) -> None:
        """Ends the stream with an error, at once."""
        self.break_off()
        self._failure = self._failure or error
        self._failed.set()

    async def raise_failure(self) -> None:
        """Waits for `fail` and raises its error."""
        while self._failure is None:
            await self._failed.wait()
        raise self._failure

    async def next_frame(self) -> list[Any]:
        """Events for one frame; none when the stream has finished."""
        frame = await self._outbox.next_frame()
        self._taken.set()
        return frame


class ConnectServer(Generic[CommandT, EventT]):
    """Serves the `Connect` rpc of one service.

    Args:
        codec: the service's frames.
        sink: the actor.
        boot_id: identity of this process's life; each stream starts with it.
        limits: bounds of each stream.
    """

    def __init__(
        self,
        codec: ConnectCodec[CommandT, EventT],
        sink: CommandSink[CommandT, EventT],
        boot_id: str,
        limits: ConnectLimits | None = None,
    ) -> None:
        self._codec = codec
        self._sink = sink
        self._boot_id = boot_id
        self._limits = limits or ConnectLimits()
        self._streams: set[_Stream[EventT]] = set()

    @property
    def num_streams(self) -> int:
        """Streams that are open."""
        return len(self._streams)

    def finish_all(self) -> None:
        """Ends every stream when what is queued has been sent."""
        for stream in self._streams:
            stream.finish()

    def fail_all(self, error: PacelineError) -> None:
        """Ends every stream with an error, at once."""
        for stream in self._streams:
            stream.fail(error)

    async def serve(self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Handles one stream until either side ends it.

        Raises:
            CapacityExceeded: the peer does not read its answers.
            InvalidArgument: the peer sends something else than frames.
            PacelineError: what `fail_all` was called with.
        """
        stream: _Stream[EventT] = _Stream(context.peer(), self._codec.event_to_pb, self._limits)
        self._streams.add(stream)
        stream.send(Hello(self._boot_id))
        logger.info("stream opened", extra={"stream": stream.name})
        try:
            async with asyncio.TaskGroup() as tasks:
                reader = tasks.create_task(self._read(stream, requests))
                guard = tasks.create_task(stream.raise_failure())
                await self._write(stream, context)
                reader.cancel()
                guard.cancel()
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            stream.break_off()
            self._streams.discard(stream)
            if not stream.half_closed:
                self._sink.stream_ended(stream)
            logger.info("stream ended", extra={"stream": stream.name})

    async def _read(self, stream: _Stream[EventT], requests: AsyncIterator[Any]) -> None:
        try:
            async for frame in requests:
                for number, message in enumerate(frame.commands):
                    if number % _COMMANDS_PER_TURN == _COMMANDS_PER_TURN - 1:
                        await asyncio.sleep(0)
                    await stream.room()
                    self._hand_over(stream, message)
        except DecodeError as error:
            raise InvalidArgument(f"a frame is not the protobuf message of this rpc: {error}", field="frame") from error
        stream.half_closed = True
        self._sink.stream_ended(stream)

    def _hand_over(self, stream: _Stream[EventT], message: Any) -> None:
        try:
            self._sink.submit(stream, self._codec.command_from_pb(message), message.ByteSize())
        except PacelineError as error:
            ref = self._codec.command_ref(message)
            stream.send(Failed(ref.session, ref.epoch, ref.command_id, error.to_failure()))

    async def _write(self, stream: _Stream[EventT], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        while events := await stream.next_frame():
            await context.write(self._codec.frame(events))
