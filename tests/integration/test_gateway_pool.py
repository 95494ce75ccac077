"""Pools over verifiers that say what the test wants, on real streams: who gets which."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from paceline_gateway.commands import FindReplica, Found, WithdrawFind
from paceline_gateway.discovery.static import StaticDiscovery
from paceline_gateway.effects import Lane
from paceline_gateway.link_codec import VERIFIER_CODEC
from paceline_gateway.pool import Pool
from paceline_gateway.routing import Candidate

from paceline.messages import FeatureDtype, FeatureFormat, ModelInfo
from paceline.runtime.supervisor import Supervisor
from tests.integration.fake_verifier import FakeVerifier, fake_verifier
from tests.integration.fleet import until
from tests.integration.node import free_port
from tests.integration.test_gateway_links import INFO, Port, check_verifiers


@contextlib.asynccontextmanager
async def pool_of(
    *infos: ModelInfo, lane: Lane = Lane.VERIFIER
) -> AsyncIterator[tuple[Pool, list[FakeVerifier], list[str]]]:
    async with contextlib.AsyncExitStack() as stack:
        running = [await stack.enter_async_context(fake_verifier(info)) for info in infos]
        addresses = [address for _, address in running]
        supervisor = await stack.enter_async_context(Supervisor("test"))
        pool = Pool(replace(VERIFIER_CODEC, lane=lane), StaticDiscovery(addresses), check_verifiers())
        pool.start(supervisor)
        await until(lambda: len(pool.snapshot.ready) == len(infos))
        yield pool, [peer for peer, _ in running], addresses


def find(session: str, port: Port, **fields: object) -> FindReplica:
    return FindReplica(session, 1, port, **fields)  # type: ignore[arg-type]


async def found_by(port: Port) -> str:
    await until(lambda: bool(port.of(Found)))
    return port.of(Found)[-1].replica.address


async def test_the_replica_with_fewest_sessions_is_picked() -> None:
    async with pool_of(INFO, INFO) as (pool, _, addresses):
        picked = []
        for number in range(6):
            port = Port()
            pool.tell(find(f"s{number}", port))
            picked.append(await found_by(port))
        assert sorted(picked) == sorted(addresses * 3)
        assert pool.loads == dict.fromkeys(addresses, 3)
        assert pool.num_sessions == 6


async def test_sessions_that_have_waited_are_spread_in_one_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is there is looked up once for all of them."""
    async with pool_of(INFO, INFO, INFO) as (pool, _, addresses):
        looked: list[dict[str, Candidate]] = []
        look = pool._candidates

        def remember() -> dict[str, Candidate]:
            looked.append(look())
            return looked[-1]

        monkeypatch.setattr(pool, "_candidates", remember)
        ports = [Port() for _ in range(30)]
        pool._finds = {f"s{number}": find(f"s{number}", port) for number, port in enumerate(ports)}
        pool._serve_waiting()
        assert pool.loads == dict.fromkeys(addresses, 10)
        assert all(len(port.of(Found)) == 1 for port in ports)
        assert (pool.num_searching, len(looked)) == (0, 1)


async def test_a_replica_to_avoid_is_taken_if_there_is_no_other() -> None:
    async with pool_of(INFO, INFO) as (pool, peers, addresses):
        port = Port()
        pool.tell(find("a", port, avoid=addresses[0]))
        assert await found_by(port) == addresses[1]
        peers[1].info = replace(INFO, model="gone")
        peers[1].break_off()
        await until(lambda: len(pool.snapshot.ready) == 1)
        port = Port()
        pool.tell(find("b", port, avoid=addresses[0]))
        assert await found_by(port) == addresses[0]


async def test_the_context_must_be_large_enough() -> None:
    async with pool_of(replace(INFO, max_model_len=64), INFO) as (pool, _, addresses):
        for number in range(3):
            port = Port()
            pool.tell(find(f"s{number}", port, context_len=100))
            assert await found_by(port) == addresses[1]
        assert pool.snapshot.max_model_len == 256


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_session_that_names_a_method_gets_a_replica_that_offers_it(lane: Lane) -> None:
    infos = (replace(INFO, methods=("a", "b")), replace(INFO, methods=("b", "c")))
    async with pool_of(*infos, lane=lane) as (pool, _, addresses):
        assert pool.snapshot.methods == ("a", "b", "c")
        assert [pool.snapshot.offers(method) for method in ("", "a", "b", "c", "a+b", "d")] == [True] * 4 + [False] * 2
        for method, address in (("a", addresses[0]), ("c", addresses[1])):
            for number in range(3):
                port = Port()
                pool.tell(find(f"{method}{number}", port, method=method))
                assert await found_by(port) == address
        # Without a drafter of its method a session decodes plainly; without a verifier it could not decode.
        pool.tell(find("d", port := Port(), method="d"))
        pool.tell(find("after it", last := Port()))
        await found_by(last)
        assert bool(port.of(Found)) == (lane is Lane.VERIFIER)
        pool.tell(WithdrawFind("d"))


async def test_a_drafter_that_builds_on_features_goes_to_sessions_whose_verifier_serves_them() -> None:
    form = FeatureFormat("final_norm", 8)
    async with pool_of(replace(INFO, methods=("h",), features=form), lane=Lane.DRAFTER) as (pool, _, addresses):
        for served in (None, replace(form, width=9), replace(form, kind="layers 1,2")):
            assert not pool.snapshot.offers("h", (served,))
            pool.tell(find("s", Port(), features=served))
        pool.tell(find("s", port := Port(), features=replace(form, dtype=FeatureDtype.BFLOAT16)))
        assert await found_by(port) == addresses[0]
        assert pool.snapshot.offers("h", (None, form))


async def test_a_session_waits_for_the_first_replica_and_may_give_up() -> None:
    port_number = free_port()
    async with Supervisor("test") as supervisor:
        address = f"127.0.0.1:{port_number}"
        pool = Pool(VERIFIER_CODEC, StaticDiscovery([address]), check_verifiers())
        pool.start(supervisor)
        async with asyncio.timeout(10):
            await pool.wait_settled()
        assert address in pool.snapshot.why_not
        waiting, gave_up = Port(), Port()
        pool.tell(find("waiting", waiting))
        pool.tell(find("gave up", gave_up))
        pool.tell(WithdrawFind("gave up"))
        await until(lambda: pool.num_searching == 1)
        async with fake_verifier(INFO, port_number):
            assert await found_by(waiting) == address
            assert gave_up.told == []
            assert pool.num_searching == 0
            # A session that has ended meanwhile does not stay attached, and nobody has read its prompt.
            pool.tell(find("gone", gone := Port(gone=True), prefixes=(7,)))
            await until(lambda: bool(gone.told))
            assert pool.loads == {address: 1}
            assert pool._prefixes.who_knows((7,), frozenset([address])) == ""
