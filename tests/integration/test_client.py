"""The clients on scripted gateways: several addresses, broken streams, and the one without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from paceline.client import AsyncClient, Client, ResumeFailed, ResumePolicy
from paceline.errors import Cancelled, InvalidArgument, ModelError, NotFound, Unavailable
from paceline.generation import Chunk, Evidence, Finished, GenerationEvent, Started
from paceline.messages import FinishReason, TokenOrigin
from paceline.text.request import GenerationRequest, ResumeRequest, TextPrompt
from tests.fakes.scripted_gateway import ScriptedGateway, serving
from tests.integration.node import free_port

REQUEST = GenerationRequest(TextPrompt("Once"), session="s")
STARTED = Started("s", "tiny", 3, 4)
HASTY = ResumePolicy(give_up_after_s=0.3, first_pause_s=0.01, max_pause_s=0.05)


def chunk(first: int, *ids: int) -> Chunk:
    lengths = (1,) * len(ids)
    return Chunk("x" * len(ids), ids, (TokenOrigin.PLAIN,) * len(ids), first + len(ids), True, lengths)


WHOLE: tuple[GenerationEvent, ...] = (
    STARTED,
    chunk(3, 10, 11),
    chunk(5, 12),
    Finished(FinishReason.LENGTH, 3, 3, Evidence()),
)
GONE = Unavailable("the gateway is shutting down")


@contextmanager
def served(*gateways: ScriptedGateway) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(gateway)) for gateway in gateways]


def tokens_of(events: Sequence[GenerationEvent]) -> list[int]:
    return [token for event in events if isinstance(event, Chunk) for token in event.token_ids]


async def test_a_stream_that_breaks_goes_on_unseen() -> None:
    gateway = ScriptedGateway(WHOLE[:2], GONE, resumed=(STARTED, *WHOLE[2:]))
    with served(gateway) as addresses:
        async with AsyncClient(addresses, api_key="sk-1", resume=HASTY) as client:
            assert [event async for event in client.generate(REQUEST, request_id="r1")] == list(WHOLE)
    assert gateway.resumes == [ResumeRequest.after("s", 3, [10, 11])]
    assert all(sent["x-request-id"] == "r1" and sent["authorization"] == "Bearer sk-1" for sent in gateway.metadata)
    assert len(gateway.metadata) == 2


async def test_another_address_is_asked_after_a_break() -> None:
    one, two = (ScriptedGateway(WHOLE[:2], GONE, resumed=(STARTED, *WHOLE[2:])) for _ in range(2))
    with served(one, two) as addresses:
        async with AsyncClient(addresses, resume=HASTY) as client:
            first = client.address
            assert [event async for event in client.generate(REQUEST)] == list(WHOLE)
            assert client.address != first
    assert sorted([len(one.resumes), len(two.resumes)]) == [0, 1]
    assert len(one.requests) + len(two.requests) == 1
    assert bool(one.resumes) != bool(one.requests)


async def test_a_dead_address_is_passed_by() -> None:
    with served(ScriptedGateway(WHOLE)) as addresses:
        for _ in range(8):  # wherever it begins
            async with AsyncClient([f"127.0.0.1:{free_port()}", *addresses], resume=HASTY) as client:
                assert [event async for event in client.generate(REQUEST)] == list(WHOLE)
                assert client.address == addresses[0]
                assert (await client.list_models())[0].model == "tiny"
                with pytest.raises(NotFound):
                    await client.get_session("s")


async def test_without_any_gateway_each_address_is_tried_once() -> None:
    async with AsyncClient([f"127.0.0.1:{free_port()}" for _ in range(3)], resume=HASTY) as client:
        with pytest.raises(Unavailable) as caught:
            await anext(client.generate(REQUEST))
        assert caught.value.__cause__ is not None
        with pytest.raises(Unavailable):
            await client.list_models()


async def test_what_cannot_be_resumed_is_a_typed_error_that_says_where_the_reader_is() -> None:
    gateway = ScriptedGateway(WHOLE[:2], GONE, resumed=(), resume_error=GONE)
    with served(gateway) as addresses:
        async with AsyncClient(addresses, resume=HASTY) as client:
            events = []
            with pytest.raises(ResumeFailed) as caught:
                events += [event async for event in client.generate(REQUEST)]
    assert caught.value.point == ResumeRequest.after("s", 3, [10, 11])
    assert isinstance(caught.value.__cause__, Unavailable)
    assert len(gateway.resumes) > 2


async def test_a_forgotten_session_is_begun_again() -> None:
    gateway = ScriptedGateway(WHOLE, breaks_after=2, error=GONE, resume_error=NotFound("gone"))
    with served(gateway) as addresses:
        async with AsyncClient(addresses, resume=HASTY) as client:
            assert [event async for event in client.generate(REQUEST)] == list(WHOLE)
    first, again = gateway.requests
    assert first.seed is not None  # the name is the client's own, so its generations are told apart by their seeds
    assert again.seed == 4


async def test_one_that_resumes_nothing_hands_the_break_over() -> None:
    gateway = ScriptedGateway(WHOLE[:2], GONE)
    with served(gateway) as addresses:
        async with AsyncClient(addresses, resume=None) as client:
            stream = client.generate(REQUEST)
            assert [await anext(stream), await anext(stream)] == list(WHOLE[:2])
            with pytest.raises(Unavailable):
                await anext(stream)
    assert not gateway.resumes


async def test_a_client_that_is_closed_resumes_nothing() -> None:
    gateway = ScriptedGateway(WHOLE[:2], hangs=True)
    with served(gateway) as addresses:
        client = AsyncClient(addresses)
        stream = client.generate(REQUEST)
        assert [await anext(stream), await anext(stream)] == list(WHOLE[:2])
        rest = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        await client.close()
        with pytest.raises((Cancelled, asyncio.CancelledError)):
            await rest
        with pytest.raises(Unavailable, match="closed"):
            await anext(client.generate(REQUEST))
    assert not gateway.resumes


async def test_an_address_is_needed() -> None:
    with pytest.raises(InvalidArgument, match="address"):
        AsyncClient([])


def test_without_an_event_loop() -> None:
    gateway = ScriptedGateway(WHOLE[:2], GONE, resumed=(STARTED, *WHOLE[2:]))
    before = threading.active_count()
    with served(gateway) as addresses:
        with Client(addresses, resume=HASTY) as client:
            assert list(client.generate(REQUEST)) == list(WHOLE)
            assert list(client.resume(ResumeRequest.after("s", 3, [10, 11]))) == [STARTED, *WHOLE[2:]]
            assert client.list_models()[0].model == "tiny"
            with pytest.raises(NotFound):
                client.get_session("s")
            stream = client.generate(REQUEST)
            assert next(stream) == STARTED
            stream.close()  # leaves it
        with pytest.raises(Unavailable, match="closed"):
            client.list_models()
        client.close()
    assert threading.active_count() == before


def test_without_an_event_loop_errors_are_the_same() -> None:
    gateway = ScriptedGateway(WHOLE[:2], ModelError("a row of the output is not finite"))
    with served(gateway) as addresses, Client(addresses[0]) as client:
        stream = client.generate(REQUEST)
        assert tokens_of([next(stream), next(stream)]) == [10, 11]
        with pytest.raises(ModelError):
            next(stream)
    with pytest.raises(InvalidArgument):
        Client([], api_key="a key")
