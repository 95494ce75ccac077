"""The link actor: one multiplexed `Connect` stream to one replica, for all sessions of this gateway.

    session actors -- send --> outbox --> writer --> stream --> reader --> session mailboxes

* The outbox is bounded by count and bytes; whatever has gathered during one turn of the event loop is one frame.
* Reader and writer are separate tasks, and the reader never waits for a session: answers are never refused.
* A stream begins with the replica's boot_id. A new one means that it has lost all sessions; the sessions are told.
* `owed_answers.py` knows who waits for an answer.
* A broken link is mended with growing, jittered pauses. Sessions stay attached and are told of both.
* A replica that leaves the pool keeps its sessions while the stream lives. When it breaks they are told not to wait.

Knows nothing of rounds and drafts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import grpc.aio

from paceline.errors import CapacityExceeded, Failure, InvalidArgument, ModelError, PacelineError, Unavailable
from paceline.messages import Close, Drafted, Failed, Hello, ModelInfo, Opened, Verified
from paceline.runtime.grpc_client import DEFAULT_MAX_MESSAGE_BYTES, ClientTls, open_channel
from paceline.runtime.grpc_errors import error_from_rpc
from paceline.runtime.outbox import Outbox
from paceline.runtime.supervisor import end_if_cancelled
from paceline_gateway.breaker import FailureCause
from paceline_gateway.commands import LinkBack, LinkLost, ReplicaCommand, ReplicaEvent, Said, SessionPort
from paceline_gateway.effects import Replica
from paceline_gateway.fitness import Check
from paceline_gateway.link_codec import LinkCodec
from paceline_gateway.owed_answers import OwedAnswers

logger = logging.getLogger(__name__)

_HANDSHAKE_TIMEOUT_S = 5.0
_FIRST_PAUSE_S = 0.05
_LAST_PAUSE_S = 2.0
_REFUSED_PAUSE_S = 5.0
_MAX_OWED_CLOSES = 10_000
_TURNED_AWAY_S = 5.0
"""How long a replica that said it takes no session is believed."""
_GOODBYE_S = 2.0
"""For a replica to answer the last closes before its link ends."""
_FRAME_OVERHEAD_BYTES = 16
_OWN_FAULTS = (PacelineError.code, ModelError.code)
"""Errors that a replica answers with for a reason of its own, not of the request or of its load."""


class LinkState(Enum):
    """Where a link stands."""

    CONNECTING = "connecting"
    UP = "up"
    DOWN = "down"
    REFUSED = "refused"
    """The replica does not fit this gateway; tried again now and then, since it may be replaced."""


@dataclass(frozen=True, slots=True)
class LinkLimits:
    """Bounds of one link's outbox.

    Attributes:
        outbox_commands: commands that may wait.
        outbox_bytes: sum of their sizes.
        frame_bytes: a frame is closed when it has this many; one larger command still travels alone.
    """

    outbox_commands: int = 8192
    outbox_bytes: int = 32 * 2**20
    frame_bytes: int = 2**20


class Link:
    """One replica's link. `run` is its owner task; everything is used on one event loop.

    Args:
        address: host:port.
        codec: what is particular to verifiers or drafters.
        check: raises `ConfigurationError` for a replica that does not fit.
        changed: told when the state has changed.
        tls: how to check the replica; None for plain text.
        max_message_bytes: largest frame either way.
        limits: bounds of the outbox.
        judge: told what the replica has failed at, or None each time that it has done a piece of work.
    """

    def __init__(
        self,
        address: str,
        codec: LinkCodec,
        *,
        check: Check,
        changed: Callable[[str], None],
        tls: ClientTls | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        limits: LinkLimits | None = None,
        judge: Callable[[FailureCause | None], None] = lambda cause: None,
    ) -> None:
        self.address = address
        self.state = LinkState.CONNECTING
        self.trouble = "not connected yet"
        """Why it is not up."""
        self.channel: grpc.aio.Channel | None = None
        """For rpcs beside the stream; None while it is broken."""
        self._codec = codec
        self._check = check
        self._changed = changed
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._limits = limits or LinkLimits()
        self._judge = judge
        self._info: ModelInfo | None = None
        self._ports: dict[str, SessionPort] = {}
        # A frame is a little more than its commands, and must not be what makes a message too large.
        self._outbox = Outbox(min(self._limits.frame_bytes, max_message_bytes // 2))
        self._boot_id = ""
        self._owed_closes: dict[str, Close] = {}
        self._owed = OwedAnswers()
        self._turned_away_at: float | None = None
        self._leaving = False
        self._ending = asyncio.Event()

    @property
    def up(self) -> bool:
        """Whether commands reach the replica."""
        return self.state is LinkState.UP

    @property
    def num_sessions(self) -> int:
        """Sessions attached."""
        return len(self._ports)

    @property
    def silent_s(self) -> float:
        """How long the replica has said nothing although an answer is owed, in seconds; 0 while none is."""
        return self._owed.silent_s(time.monotonic())

    @property
    def turns_away(self) -> bool:
        """Whether the replica has just said that it takes no session, because it shuts down."""
        return self._turned_away_at is not None and time.monotonic() - self._turned_away_at < _TURNED_AWAY_S

    @property
    def replica(self) -> Replica | None:
        """What it serves; None before the first handshake."""
        return None if self._info is None else Replica(self.address, self._info)

    # --- what sessions and the pool do --------------------------------------------------------------------------------

    def set_leaving(self, leaving: bool) -> None:
        """Says whether the replica is about to leave the pool, or has left it: it is not waited for when it is lost."""
        if leaving and not self._leaving and not self.up:
            self._tell_all(LinkLost(self._codec.lane, self, gone=True))
        self._leaving = leaving

    def end(self) -> None:
        """Ends the link for good, as soon as the replica has answered the last closes. Attach nothing more."""
        self._ending.set()

    def attach(self, session: str, port: SessionPort) -> None:
        """Delivers the session's events to the port from now on."""
        self._ports[session] = port
        self._owed_closes.pop(session, None)

    def detach(self, session: str, epoch: int, silent: bool = False) -> None:
        """Closes the session on the replica, as soon as it can be reached, and delivers nothing more to it.

        Args:
            session: its name.
            epoch: its fencing number.
            silent: it leaves because the replica owed it an answer for too long.
        """
        if self._ports.pop(session, None) is None:
            return
        now = time.monotonic()
        if silent and self._owed.is_another_silence(session, now):
            self._judge(FailureCause.SILENT)
        close = Close(session, epoch)
        if self.up:
            self._owed.sent(close, now)
            self._outbox.put(self._codec.command_to_pb(close))
        elif len(self._owed_closes) < _MAX_OWED_CLOSES:
            self._owed_closes[session] = close
        self._tell_if_deserted()

    def forget(self, session: str) -> None:
        """Delivers nothing more to a session that was never opened here."""
        self._ports.pop(session, None)
        self._tell_if_deserted()

    def _tell_if_deserted(self) -> None:
        if self._leaving and not self._ports:
            self._changed(self.address)

    def send(self, command: ReplicaCommand) -> None:
        """Queues a command; a broken link forgets it, since the session says it again when the link is back.

        Raises:
            CapacityExceeded: the outbox is full; the message has the numbers.
            InvalidArgument: the command is larger than a message may be, and would break the link for all sessions.
        """
        if not self.up:
            return
        waiting = self._outbox
        if len(waiting) >= self._limits.outbox_commands or waiting.num_bytes >= self._limits.outbox_bytes:
            raise CapacityExceeded(
                f"{len(waiting)} commands of {waiting.num_bytes} bytes wait for {self.address}; "
                f"at most {self._limits.outbox_commands} and {self._limits.outbox_bytes} may"
            )
        message = self._codec.command_to_pb(command)
        size_bytes = message.ByteSize()
        if size_bytes + _FRAME_OVERHEAD_BYTES > self._max_message_bytes:
            raise InvalidArgument(
                f"the session needs a message of {size_bytes + _FRAME_OVERHEAD_BYTES} bytes to {self.address}; at most "
                f"{self._max_message_bytes} may be sent (max_message_bytes)",
                field="prompt",
            )
        waiting.put(message, size_bytes)
        self._owed.sent(command, time.monotonic())

    # --- the owner task -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Connects, serves and mends the link until it is ended or cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                mending = tasks.create_task(self._keep_up(), name=f"mender {self.address}")
                await self._ending.wait()
                # A session whose close is not heard there would hold up a replica that waits for its last one.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_GOODBYE_S):
                        await self._owed.wait_none()
                mending.cancel()
        finally:
            self._down(LinkState.DOWN, "it has left" if self._leaving else "the gateway is shutting down")

    async def _keep_up(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while True:
            state, trouble = LinkState.DOWN, ""
            try:
                # A new channel each time, so that renewed certificates are read.
                async with self._open_channel() as channel:
                    await self._connect(channel)
            except grpc.aio.AioRpcError as error:
                trouble = error_from_rpc(error).message
            except PacelineError as error:
                state = LinkState.DOWN if isinstance(error, Unavailable) else LinkState.REFUSED
                trouble = error.message
            except TimeoutError:
                trouble = f"no answer within {_HANDSHAKE_TIMEOUT_S:g} s"
            except Exception:
                logger.exception("a link failed unexpectedly", extra={"replica": self.address})
                trouble = "internal error; the gateway's log has the details"
            end_if_cancelled()
            if state is LinkState.DOWN and self._info is not None and not self._leaving:
                self._judge(FailureCause.STREAM_LOST if self.up else FailureCause.UNREACHABLE)
            if self.up:
                pause_s = _FIRST_PAUSE_S
            self._down(state, trouble)
            await asyncio.sleep(
                _REFUSED_PAUSE_S if state is LinkState.REFUSED else pause_s * random.uniform(0.5, 1.0)  # noqa: S311
            )
            pause_s = min(pause_s * 2, _LAST_PAUSE_S)

    def _open_channel(self) -> grpc.aio.Channel:
        return open_channel(self.address, tls=self._tls, max_message_bytes=self._max_message_bytes)

    async def _connect(self, channel: grpc.aio.Channel) -> None:
        """One life of the stream; raises when it ends."""
        info = await self._codec.get_info(channel, _HANDSHAKE_TIMEOUT_S)
        await self._check(self.address, info, lambda: self._codec.get_vocabulary(channel, _HANDSHAKE_TIMEOUT_S))
        call = self._codec.connect(channel)
        try:
            async with asyncio.timeout(_HANDSHAKE_TIMEOUT_S):
                events = await self._read_frame(call)
            hello = self._codec.event_from_pb(events[0]) if events else None
            if not isinstance(hello, Hello) or hello.boot_id != info.boot_id:
                raise Unavailable(f"{self.address} was restarted during the handshake")
            self.channel = channel
            self._up(info)
            self._deliver(events[1:])
            await self._serve(call)
        finally:
            self.channel = None
            call.cancel()

    async def _serve(self, call: Any) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._write(call), name=f"writer {self.address}")
                while True:
                    self._deliver(await self._read_frame(call))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _read_frame(self, call: Any) -> list[Any]:
        frame = await call.read()
        if frame is grpc.aio.EOF:
            code = await call.code()
            raise Unavailable(
                f"{self.address} has ended the stream ({code.name}: {await call.details() or 'no reason'})"
            )
        return list(frame.events)

    async def _write(self, call: Any) -> None:
        while True:
            frame = self._codec.frame(await self._outbox.next_frame())
            try:
                await call.write(frame)
            except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
                return  # the stream has ended, which is what the library means by either; the reader hears why

    def _up(self, info: ModelInfo) -> None:
        restarted = self._boot_id != info.boot_id
        self._boot_id, self._info = info.boot_id, info
        self._turned_away_at = None
        self.state, self.trouble = LinkState.UP, ""
        logger.info("link up", extra={"replica": self.address, "boot_id": info.boot_id, "new_life": restarted})
        if not restarted:
            for close in self._owed_closes.values():
                self._outbox.put(self._codec.command_to_pb(close))
        self._owed_closes.clear()
        self._tell_all(LinkBack(self._codec.lane, self, Replica(self.address, info), restarted))
        self._changed(self.address)

    def _tell_all(self, command: LinkBack | LinkLost) -> None:
        for port in list(self._ports.values()):
            port.tell(command)

    def _down(self, state: LinkState, trouble: str) -> None:
        was_up = self.up
        news = (state, trouble) != (self.state, self.trouble)
        self.state, self.trouble = state, trouble
        self._outbox.clear()
        self._owed.clear()
        if news:
            unusual = (was_up and not self._leaving) or state is LinkState.REFUSED
            logger.log(
                logging.WARNING if unusual else logging.INFO,
                "link %s: %s",
                state.value,
                trouble,
                extra={"replica": self.address},
            )
        if was_up:
            self._tell_all(LinkLost(self._codec.lane, self, gone=self._leaving))
        if news:
            self._changed(self.address)

    def _deliver(self, messages: list[Any]) -> None:
        now = time.monotonic()
        self._owed.heard(now)
        worked = failed = False
        for message in messages:
            event: ReplicaEvent | None
            try:
                event = self._codec.event_from_pb(message)
            except PacelineError as error:
                # One bad message hurts the session that it names, and nobody else.
                logger.warning("a message of %s makes no sense: %s", self.address, error.message)
                event = self._nonsense(message, error)
            if event is None or isinstance(event, Hello):
                continue
            if not isinstance(event, Opened):
                self._owed.answered(event, now)
            if isinstance(event, Verified | Drafted):
                worked = True
            elif isinstance(event, Failed):
                failed = failed or event.failure.code in _OWN_FAULTS
                if event.command_id == 0 and event.failure.code == Unavailable.code:
                    self._turned_away_at = now
            port = self._ports.get(event.session)
            if port is not None:
                port.tell(Said(self._codec.lane, self, event))
        # A pass that breaks fails all sessions that were in it: that is one failure.
        if worked or failed:
            self._judge(None if worked else FailureCause.FAILED)

    def _nonsense(self, message: Any, error: PacelineError) -> Failed | None:
        """A message that cannot be read, as a failure of the command that it seems to answer."""
        kind = message.WhichOneof("event")
        if kind not in ("verified", "drafted"):
            return None
        body = getattr(message, kind)
        command_id = body.round if kind == "verified" else body.draft_id
        failure = Failure(PacelineError.code, f"{self.address} sent an unreadable answer: {error.message}")
        return Failed(body.session, body.epoch, command_id, failure)
