"""A conversation's next turn goes where its beginning has been read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.client import AsyncClient
from paceline.session.memory_store import MemoryStore
from tests.fakes.scripted_drafter import StepGate
from tests.integration.fleet import Fleet, generate, perfect_method, plain_tokens, until
from tests.integration.paced import EXPECTED, LAW, request_of
from tests.integration.scraping import scrape

LONG = [index % 29 for index in range(100)]


async def test_the_next_turn_goes_to_the_verifier_that_knows_the_conversation(tmp_path: Path) -> None:
    gate = StepGate()
    options: dict[str, Any] = {
        "num_verifiers": 2,
        "method": perfect_method(LAW, gate=gate),
        "settings": {"draft_wait_floor_ms": 60_000, "draft_wait_ceiling_ms": 60_000},
    }
    async with Fleet.start(tmp_path, LAW, **options) as fleet, fleet.client() as client:
        first, second = (node.address for node in fleet.verifiers)
        # A stream that waits for its draft makes the other verifier the less busy one.
        stream = client.generate(request_of(fleet))
        events = [await anext(stream), await anext(stream)]
        turn = await generate(client, fleet.request(LONG, num_speculative_tokens=0))
        assert (turn.tokens, turn.evidence.verifier) == (plain_tokens(LAW, LONG, 20), second)
        gate.open()
        events += [event async for event in stream]
        assert [token for event in events for token in getattr(event, "token_ids", ())] == EXPECTED
        await until(lambda: not fleet.verifier_pool.num_sessions)
        # Now they are equal, and the first one would be taken.
        begun = [*LONG, *turn.tokens, 3, 4]
        next_turn = await generate(client, fleet.request(begun, num_speculative_tokens=0))
        assert (next_turn.tokens, next_turn.evidence.verifier) == (plain_tokens(LAW, begun, 20), second)
        seen = await scrape(fleet.verifiers[1].alive.service.registry)
        assert seen.sum("paceline_prefix_cache_hits_total") >= 64
        other = await generate(client, fleet.request([5, *begun], num_speculative_tokens=0))
        assert other.evidence.verifier == first


async def test_the_next_turn_by_another_gateway_goes_to_the_verifier_of_the_record_while_it_is_there(
    tmp_path: Path,
) -> None:
    gate = StepGate()
    options: dict[str, Any] = {
        "num_verifiers": 2,
        "store": MemoryStore(),
        "method": perfect_method(LAW, gate=gate),
        "settings": {"draft_wait_floor_ms": 60_000, "draft_wait_ceiling_ms": 60_000},
    }
    async with (
        Fleet.start(tmp_path, LAW, **options) as fleet,
        fleet.another_gateway() as (other, address),
        fleet.client() as client,
        AsyncClient(address, resume=None) as elsewhere,
    ):
        first, second = (node.address for node in fleet.verifiers)
        stream = client.generate(request_of(fleet))  # makes the other verifier the less busy one
        events = [await anext(stream), await anext(stream)]
        chat: dict[str, Any] = {"session": "chat", "num_speculative_tokens": 0}
        turn = await generate(client, fleet.request(LONG, **chat))
        assert turn.evidence.verifier == second
        gate.open()
        events += [event async for event in stream]
        # The other gateway has sent nobody anywhere: all that it knows is the record.
        new = await generate(elsewhere, fleet.request(LONG, num_speculative_tokens=0))
        assert new.evidence.verifier == first
        begun = [*LONG, *turn.tokens, 3, 4]
        turn = await generate(elsewhere, fleet.request(begun, **chat))
        assert (turn.tokens, turn.evidence.verifier) == (plain_tokens(LAW, begun, 20), second)
        await fleet.verifiers[1].kill()
        await until(lambda: other.verifiers is not None and len(other.verifiers.snapshot.ready) == 1)
        turn = await generate(elsewhere, fleet.request(begun, **chat))
        assert (turn.tokens, turn.evidence.verifier) == (plain_tokens(LAW, begun, 20), first)
