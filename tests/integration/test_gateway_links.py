"""Links against a verifier that says what the test wants, on a real stream."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, TypeVar

import grpc.aio
import pytest
import tokenizers
from paceline_gateway.commands import LinkBack, LinkLost, Said, SessionCommand
from paceline_gateway.effects import Lane, Replica
from paceline_gateway.fitness import Check, Fitness
from paceline_gateway.link_codec import VERIFIER_CODEC, LinkCodec
from paceline_gateway.links import Link, LinkLimits, LinkState
from tokenizers import models

from paceline.errors import CapacityExceeded, InvalidArgument
from paceline.messages import (
    Close,
    Evicted,
    ModelInfo,
    Open,
    Opened,
    SamplingParams,
    Verify,
)
from paceline.runtime.supervisor import OnError, Supervisor
from paceline.text.tokenizer import Tokenizer
from paceline.v1 import common_pb2, verifier_pb2
from tests.integration.fake_verifier import FakeVerifier, fake_verifier
from tests.integration.fleet import until

TOKENIZER = Tokenizer(tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 2, "d": 3}, unk_token="a")))
HASH = TOKENIZER.fingerprint[:12]
INFO = ModelInfo("toy", 32, 256, (31,), TOKENIZER.fingerprint, "boot-1", max_draft_tokens=8)
CommandT = TypeVar("CommandT", bound=SessionCommand)


class Port:
    """A session as links and pools see it."""

    def __init__(self, *, gone: bool = False) -> None:
        self.told: list[SessionCommand] = []
        self._gone = gone

    def tell(self, command: SessionCommand) -> bool:
        self.told.append(command)
        return not self._gone

    def of(self, kind: type[CommandT]) -> list[CommandT]:
        return [command for command in self.told if isinstance(command, kind)]

    @property
    def events(self) -> list[object]:
        return [said.event for said in self.of(Said)]


def verify(round_number: int, session: str = "s") -> Verify:
    return Verify(session, 1, round_number, 3, 99)


def fitness() -> Fitness:
    return Fitness("toy", TOKENIZER)


def check_verifiers() -> Check:
    return functools.partial(fitness().check, Lane.VERIFIER)


@contextlib.asynccontextmanager
async def linked(
    limits: LinkLimits | None = None, codec: LinkCodec = VERIFIER_CODEC, **options: Any
) -> AsyncIterator[tuple[FakeVerifier, Link]]:
    async with fake_verifier(INFO) as (peer, address), Supervisor("test") as supervisor:
        link = Link(address, codec, check=check_verifiers(), changed=lambda _: None, limits=limits, **options)
        supervisor.spawn("link", link.run, on_error=OnError.FAIL)
        await until(lambda: link.up)
        yield peer, link


async def test_what_gathers_in_one_turn_is_one_frame() -> None:
    async with linked() as (peer, link):
        for number in range(1, 11):
            link.send(verify(number))
        await until(lambda: len(peer.commands) == 10)
        assert len(peer.frames) == 1
        assert peer.commands == [verify(number) for number in range(1, 11)]


async def test_a_frame_is_closed_when_it_is_large() -> None:
    async with linked(LinkLimits(frame_bytes=200)) as (peer, link):
        large = Open("s", 1, tuple(range(1000)), 3, SamplingParams())
        for command in (verify(1), large, verify(2)):
            link.send(command)
        await until(lambda: len(peer.commands) == 3)
        assert [len(frame) for frame in peer.frames] == [1, 1, 1]
        assert peer.commands == [verify(1), large, verify(2)]


async def test_events_go_to_their_sessions_and_to_nobody_else() -> None:
    async with linked() as (peer, link):
        ports = {name: Port() for name in ("a", "b")}
        for name, port in ports.items():
            link.attach(name, port)
        peer.say(Opened("a", 1), Evicted("b", 1, 2), Opened("nobody", 1))
        await until(lambda: all(port.told for port in ports.values()))
        assert ports["a"].told == [Said(Lane.VERIFIER, link, Opened("a", 1))]
        assert ports["b"].events == [Evicted("b", 1, 2)]
        link.detach("a", 1)
        await until(lambda: peer.commands == [Close("a", 1)])
        peer.say(Opened("a", 1), Opened("b", 1))
        await until(lambda: len(ports["b"].told) == 2)
        assert len(ports["a"].told) == 1


async def test_a_message_that_makes_no_sense_hurts_nobody_else() -> None:
    async with linked() as (peer, link):
        port = Port()
        link.attach("s", port)
        unreadable = verifier_pb2.VerifierEvent(
            verified=verifier_pb2.Verified(session="s", epoch=1, round=1, base_len=3, tokens=[-5])
        )
        peer.say_raw(
            [
                verifier_pb2.VerifierEvent(),
                unreadable,
                verifier_pb2.VerifierEvent(opened=common_pb2.Opened(session="s", epoch=1)),
            ]
        )
        await until(lambda: Opened("s", 1) in port.events)
        assert link.up


async def test_a_broken_link_comes_back_and_sessions_are_told() -> None:
    async with linked() as (peer, link):
        port = Port()
        link.attach("s", port)
        peer.break_off()
        await until(lambda: len(port.told) == 2)
        same = Replica(link.address, INFO)
        assert port.told == [LinkLost(Lane.VERIFIER, link), LinkBack(Lane.VERIFIER, link, same, restarted=False)]
        peer.info = replace(INFO, boot_id="boot-2", max_draft_tokens=3, weights_digest="new")
        peer.break_off()
        await until(lambda: len(port.told) == 4)
        new = Replica(link.address, peer.info)
        assert port.told[3] == LinkBack(Lane.VERIFIER, link, new, restarted=True)


async def test_sessions_that_left_while_the_link_was_broken_are_closed_later() -> None:
    async with linked() as (peer, link):
        for name in ("left", "came back", "stays"):
            link.attach(name, Port())
        port = Port()
        link.attach("s", port)
        peer.break_off()
        await until(lambda: bool(port.of(LinkLost)))
        link.detach("left", 1)
        link.detach("came back", 1)
        link.attach("came back", Port())
        link.send(verify(1))  # forgotten: its session says it again
        await until(lambda: peer.commands == [Close("left", 1)])
        # A new life knows nobody: there is nothing to close.
        peer.info = replace(INFO, boot_id="boot-2")
        peer.break_off()
        await until(lambda: len(port.of(LinkLost)) == 2)
        link.detach("stays", 1)
        await until(lambda: len(port.of(LinkBack)) == 2)
        link.send(verify(2))
        await until(lambda: peer.commands == [verify(2)])


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        (LinkLimits(outbox_commands=50, frame_bytes=1), "at most 50 and"),
        (LinkLimits(outbox_bytes=2**20, frame_bytes=1), "at most 8192 and 1048576 may"),
    ],
    ids=["count", "bytes"],
)
async def test_a_peer_that_does_not_read_fills_the_outbox_and_no_more(limits: LinkLimits, refusal: str) -> None:
    async with linked(limits) as (peer, link):
        peer.reading.clear()
        large = Open("s", 1, tuple(range(100_000)), 3, SamplingParams())
        with pytest.raises(CapacityExceeded, match=refusal):
            await send_for_ever(link, large)
        link.attach("s", Port())
        link.detach("s", 1)  # a close is never refused
        peer.reading.set()
        await until(lambda: peer.commands[-1:] == [Close("s", 1)])
        link.send(verify(1))


async def send_for_ever(link: Link, command: Open) -> None:
    while True:
        link.send(command)
        await asyncio.sleep(0)


class LateWriter:
    """A real call whose next write comes after the stream's end, and before the reader hears of that."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._tried = asyncio.Event()

    async def read(self) -> Any:
        frame = await self._call.read()
        if frame is grpc.aio.EOF:
            await self._tried.wait()
        return frame

    async def write(self, frame: Any) -> None:
        await self._call.code()
        try:
            await self._call.write(frame)
        finally:
            self._tried.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)


async def test_a_write_after_the_end_of_the_stream_is_nothing_unexpected(caplog: pytest.LogCaptureFixture) -> None:
    codec = replace(VERIFIER_CODEC, connect=lambda channel: LateWriter(VERIFIER_CODEC.connect(channel)))
    async with linked(codec=codec) as (peer, link):
        link.send(verify(1))
        peer.break_off()
        await until(lambda: peer.num_streams == 2 and link.up)
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "has ended the stream (OK: no reason)" in errors[0]
    assert all("unexpectedly" not in error for error in errors)


async def test_streams_that_end_under_traffic_are_nothing_unexpected(caplog: pytest.LogCaptureFixture) -> None:
    async with linked() as (peer, link):
        large = Open("s", 1, tuple(range(1000)), 3, SamplingParams())
        for flap in range(2, 12):
            peer.break_off()
            while peer.num_streams < flap or not link.up:
                if link.up:
                    link.send(large)
                await asyncio.sleep(0)
        link.send(verify(1))
        await until(lambda: verify(1) in peer.commands)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_frames_stay_within_the_largest_message() -> None:
    async with linked(max_message_bytes=2**16) as (peer, link):
        command = Open("s", 1, tuple(range(10_000)), 3, SamplingParams())  # about 20 kB
        for _ in range(20):
            link.send(command)
        await until(lambda: len(peer.commands) == 20)
        assert max(len(frame) for frame in peer.frames) == 1
        with pytest.raises(InvalidArgument, match="at most 65536"):
            link.send(replace(command, tokens=tuple(range(40_000))))
        link.send(verify(1))
        await until(lambda: peer.commands[-1] == verify(1))
        assert peer.num_streams == 1


async def test_a_restart_between_question_and_stream_is_noticed() -> None:
    async with linked() as (peer, link):
        peer.hello = "boot-2"
        peer.break_off()
        await until(lambda: link.state is LinkState.DOWN and "restarted" in link.trouble)
        peer.hello = None
        await until(lambda: link.up)


async def test_a_replica_that_does_not_fit_is_refused_with_both_sides_named() -> None:
    async with linked() as (peer, link):
        peer.info = replace(INFO, tokenizer_hash="other")
        peer.break_off()
        await until(lambda: link.state is LinkState.REFUSED)
        assert "hash other" in link.trouble
        assert f"hash {HASH}" in link.trouble
