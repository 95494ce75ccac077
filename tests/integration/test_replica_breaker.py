"""Replicas that can be reached and do not do their work: circuit breakers in pools, on real streams and in a fleet."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline_gateway.breaker import BreakerLimits, BreakerState, FailureCause
from paceline_gateway.commands import Found, LinkBack, WithdrawFind
from paceline_gateway.discovery.static import StaticDiscovery
from paceline_gateway.effects import Lane
from paceline_gateway.link_codec import VERIFIER_CODEC
from paceline_gateway.pool import Pool

from paceline.errors import CapacityExceeded, ModelError, PacelineError
from paceline.messages import Failed, SamplingParams, Verified
from paceline.runtime.supervisor import Supervisor
from tests.fakes.scripted_drafter import ScriptedDrafter, chain_of
from tests.fakes.toy_runner import hash_law
from tests.integration.fake_verifier import FakeVerifier, fake_verifier
from tests.integration.fleet import VOCAB, Fleet, generate, plain_tokens, target_law, until
from tests.integration.scraping import scrape
from tests.integration.test_gateway_links import INFO, Port, check_verifiers, verify
from tests.integration.test_gateway_pool import find

FOR_LONG = BreakerLimits(max_failures=3, pause_s=600.0, max_pause_s=600.0)
SOON = BreakerLimits(max_failures=3, pause_s=0.02, max_pause_s=0.02)


def end_pause(pool: Pool, address: str) -> None:
    breaker = pool._members[address].breaker
    assert breaker._next_try_at is not None, "it is not open"
    breaker._next_try_at = 0.0


class World:
    """A pool over fake replicas, and sessions that find them."""

    def __init__(self, pool: Pool, peers: list[FakeVerifier], addresses: list[str]) -> None:
        self.pool = pool
        self.peers = peers
        self.addresses = addresses
        self.num_sessions = 0

    def search(self, **fields: object) -> Port:
        """A session that looks for a replica."""
        self.num_sessions += 1
        port = Port()
        self.pool.tell(find(f"s{self.num_sessions}", port, **fields))
        return port

    async def found(self) -> str:
        """Where a new session goes."""
        port = self.search()
        await until(lambda: bool(port.of(Found)))
        return port.of(Found)[0].replica.address

    async def says(self, peer: int, *events: Failed | Verified) -> None:
        """The replica says something to a session that is there, and the pool has heard it."""
        port = Port()
        member = self.pool._members[self.addresses[peer]]
        member.link.attach("witness", port)
        self.peers[peer].say(*events)
        await until(lambda: len(port.events) == len(events))
        member.link.forget("witness")

    async def fails(self, peer: int, times: int, error: PacelineError | None = None) -> None:
        failure = (error or PacelineError("scripted")).to_failure()
        for _ in range(times):
            await self.says(peer, Failed("witness", 1, 1, failure))

    async def works(self, peer: int) -> None:
        await self.says(peer, Verified("witness", 1, 1, 3, (), (1,), 3))

    def pause_over(self, peer: int) -> None:
        """Time passes for this replica's breaker."""
        end_pause(self.pool, self.addresses[peer])

    def states(self) -> dict[str, int]:
        return {state.value: count for state, count in self.pool.breakers.items()}


@contextlib.asynccontextmanager
async def world(num_replicas: int, limits: BreakerLimits, lane: Lane = Lane.VERIFIER) -> AsyncIterator[World]:
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(fake_verifier(INFO)) for _ in range(num_replicas)]
        addresses = [address for _, address in running]
        supervisor = await stack.enter_async_context(Supervisor("test"))
        codec = replace(VERIFIER_CODEC, lane=lane)
        pool = Pool(codec, StaticDiscovery(addresses), check_verifiers(), breaker=limits)
        pool.start(supervisor)
        await until(lambda: len(pool.snapshot.ready) == num_replicas)
        yield World(pool, [peer for peer, _ in running], addresses)


# --- what opens it ----------------------------------------------------------------------------------------------------


async def test_errors_of_its_own_in_a_row_turn_new_sessions_elsewhere() -> None:
    async with world(2, FOR_LONG) as made:
        bad, good = made.addresses
        await made.fails(0, 2)
        await made.works(0)
        await made.fails(0, 2)
        assert made.states() == {"closed": 2}
        await made.fails(0, 1, ModelError("nothing but NaN"))
        assert made.states() == {"open": 1, "closed": 1}
        assert [await made.found() for _ in range(4)] == [good] * 4
        assert made.pool.failures == {FailureCause.FAILED: 5}
        assert made.pool.num_openings == 1
        assert bad in {replica.address for replica in made.pool.snapshot.ready}, "sessions that are there go on"


async def test_what_is_no_fault_of_its_own_does_not_open_it() -> None:
    async with world(1, FOR_LONG) as made:
        await made.fails(0, 9, CapacityExceeded("full"))
        assert (made.states(), made.pool.failures) == ({"closed": 1}, {})


async def test_sessions_that_fail_in_one_pass_are_one_failure() -> None:
    async with world(1, FOR_LONG) as made:
        failure = PacelineError("scripted").to_failure()
        await made.says(0, *[Failed("witness", 1, number, failure) for number in range(9)])
        assert (made.states(), made.pool.failures) == ({"closed": 1}, {FailureCause.FAILED: 1})


async def test_sessions_that_wait_behind_one_long_pass_are_one_failure() -> None:
    async with world(1, FOR_LONG) as made:
        link = made.pool._members[made.addresses[0]].link
        names = [f"s{number}" for number in range(5)]
        for name in names:
            link.attach(name, Port())
            link.send(verify(1, name))
        for name in names:
            link.detach(name, 1, silent=True)
        assert (made.states(), made.pool.failures) == ({"closed": 1}, {FailureCause.SILENT: 1})
        # Who asks after that and is not answered either tells of another one.
        link.attach("later", Port())
        link.send(verify(1, "later"))
        link.detach("later", 1, silent=True)
        assert made.pool.failures == {FailureCause.SILENT: 2}


async def test_a_stream_that_breaks_again_and_again_before_anything_is_done() -> None:
    async with world(2, FOR_LONG) as made:
        link = made.pool._members[made.addresses[0]].link
        link.attach("s", port := Port())
        for number in range(3):
            made.peers[0].break_off()
            await until(lambda number=number: len(port.of(LinkBack)) == number + 1)  # type: ignore[misc]
        link.forget("s")
        assert made.pool.failures == {FailureCause.STREAM_LOST: 3}
        assert [await made.found() for _ in range(3)] == [made.addresses[1]] * 3


async def test_one_that_is_away_for_long_is_tried_by_one_session_when_it_is_back() -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(world(1, FOR_LONG))
        replica = contextlib.AsyncExitStack()
        _, address = await replica.enter_async_context(fake_verifier(INFO))
        supervisor = await stack.enter_async_context(Supervisor("of the other pool"))
        discovery = StaticDiscovery([address, made.addresses[0]])
        pool = Pool(VERIFIER_CODEC, discovery, check_verifiers(), breaker=SOON)
        pool.start(supervisor)
        await until(lambda: len(pool.snapshot.ready) == 2)
        made.pool = pool
        await replica.aclose()
        await until(lambda: pool.failures[FailureCause.UNREACHABLE] >= 2)
        assert pool.failures[FailureCause.STREAM_LOST] == 1
        _, again = await stack.enter_async_context(fake_verifier(INFO, int(address.rpartition(":")[2])))
        await until(lambda: len(pool.snapshot.ready) == 2)
        await until(lambda: pool.breakers == {BreakerState.HALF_OPEN: 1, BreakerState.CLOSED: 1})
        assert await made.found() == again


async def test_sessions_that_leave_it_for_its_silence_one_after_the_other_open_it() -> None:
    async with world(2, FOR_LONG) as made:
        link = made.pool._members[made.addresses[0]].link
        for number in range(3):
            assert made.states() == {"closed": 2}
            link.attach(f"silent{number}", Port())
            link.send(verify(1, f"silent{number}"))
            link.detach(f"silent{number}", 1, silent=True)
        assert made.pool.failures == {FailureCause.SILENT: 3}
        assert made.states() == {"open": 1, "closed": 1}
        assert await made.found() == made.addresses[1]


# --- half open --------------------------------------------------------------------------------------------------------


async def test_after_the_pause_one_session_tries_and_work_done_closes_it() -> None:
    async with world(2, FOR_LONG) as made:
        bad, good = made.addresses
        for _ in range(4):
            await made.found()
        await made.fails(0, 3)
        made.pause_over(0)
        assert made.states() == {"half_open": 1, "closed": 1}
        assert [await made.found(), await made.found()] == [bad, good]
        await made.fails(0, 1)  # the one that tried
        assert made.pool.num_openings == 2
        assert await made.found() == good
        made.pause_over(0)
        assert await made.found() == bad
        await made.works(0)
        assert made.states() == {"closed": 2}
        loads = made.pool.loads
        assert (await made.found() == bad) == (loads[bad] <= loads[good])


async def test_a_session_that_has_ended_meanwhile_is_no_try() -> None:
    async with world(1, FOR_LONG, Lane.DRAFTER) as made:
        await made.fails(0, 3)
        made.pause_over(0)
        gone = Port(gone=True)
        made.pool.tell(find("gone", gone))
        await until(lambda: bool(gone.told))
        assert await made.found() == made.addresses[0]


async def test_a_verifier_is_asked_all_the_same_if_there_is_no_other() -> None:
    async with world(1, FOR_LONG) as made:
        await made.fails(0, 3)
        assert made.states() == {"open": 1}
        assert await made.found() == made.addresses[0]


async def test_drafters_are_waited_for_until_one_may_be_tried() -> None:
    async with world(1, FOR_LONG, Lane.DRAFTER) as made:
        await made.fails(0, 3)
        ports = [made.search() for _ in range(3)]
        made.pool.tell(WithdrawFind("s1"))
        await until(lambda: made.pool.num_searching == 2)
        made.pause_over(0)
        # Nobody says that the pause is over: the pool looks by itself, and then one session tries.
        await until(lambda: any(port.of(Found) for port in ports))
        assert (len(ports[0].told), made.pool.num_searching) == (0, 1)
        await made.works(0)
        await until(lambda: made.pool.num_searching == 0)
        assert [len(port.of(Found)) for port in ports] == [0, 1, 1]


# --- in a fleet -------------------------------------------------------------------------------------------------------

LAW = hash_law(VOCAB, seed=8)


async def test_a_drafter_that_fails_at_everything_is_left_alone_and_is_used_when_it_works_again(tmp_path: Path) -> None:
    """Eight streams at once, and again: the drafter is asked a few times, not a few times by each."""
    healthy = False
    choose = target_law(LAW)

    def script(context: Sequence[int], sampling: SamplingParams, depth: int) -> list[int]:
        if not healthy:
            raise ModelError("scripted failure")
        return chain_of(choose, context, sampling, depth)

    settings: dict[str, Any] = {"breaker_failures": 3, "breaker_pause_ms": 20_000}
    async with (
        Fleet.start(tmp_path, LAW, method=lambda: ScriptedDrafter(script), settings=settings) as fleet,
        fleet.client() as client,
    ):
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        request = fleet.request([1, 2, 3], max_tokens=30, sampling=sampling)
        expected = plain_tokens(LAW, [1, 2, 3], 30, sampling)
        for _ in range(2):
            runs = await asyncio.gather(*[generate(client, request) for _ in range(8)])
            assert all(run.tokens == expected for run in runs)
        assert fleet.drafter_pool.breakers == {BreakerState.OPEN: 1}
        method = fleet.drafters[0].model
        assert isinstance(method, ScriptedDrafter)
        asked = len(method.contexts)
        run = await generate(client, request)
        assert (run.tokens, len(method.contexts)) == (expected, asked), "it is left alone"
        seen = await scrape(fleet.gateway.registry)
        assert seen.sum("paceline_replica_breakers", pool="drafter", state="open") == 1
        assert seen.sum("paceline_replica_breakers", pool="verifier", state="closed") == 1
        assert seen.sum("paceline_replica_breaker_openings_total", pool="drafter") == 1
        assert seen.sum("paceline_replica_failures_total", pool="drafter", cause="failed") >= 3
        # Its pause is over: the next session that drafts closes the breaker.
        healthy = True
        end_pause(fleet.drafter_pool, fleet.drafters[0].address)
        run = await generate(client, request)
        assert run.tokens == expected
        assert run.evidence.accepted_tokens > 0
        assert fleet.drafter_pool.breakers == {BreakerState.CLOSED: 1}
