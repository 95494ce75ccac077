"""A pool whose endpoints come, drain and go, with verifiers that say what the test wants, on real streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from paceline_gateway.commands import Found, LinkBack, LinkLost, WithdrawFind
from paceline_gateway.discovery.endpoint import Endpoint, Tell
from paceline_gateway.link_codec import VERIFIER_CODEC
from paceline_gateway.links import Link
from paceline_gateway.pool import Pool

from paceline.errors import CapacityExceeded, Unavailable
from paceline.messages import Close, Closed, Failed, ModelInfo
from paceline.runtime.supervisor import Supervisor
from tests.integration.fake_verifier import FakeVerifier, fake_verifier
from tests.integration.fleet import until
from tests.integration.node import free_port
from tests.integration.test_gateway_links import INFO, Port, check_verifiers
from tests.integration.test_gateway_pool import find


class ToldByTheTest:
    """A discovery that says what the test says."""

    name = "the test"

    def __init__(self) -> None:
        self._tell: Tell | None = None

    async def run(self, tell: Tell) -> None:
        self._tell = tell

    def say(self, *addresses: str, draining: tuple[str, ...] = ()) -> None:
        """The complete set."""
        assert self._tell is not None, "the pool has not started it"
        self._tell(tuple([Endpoint(one) for one in addresses] + [Endpoint(one, True) for one in draining]))


class Setup:
    """A pool and its replicas."""

    def __init__(self, pool: Pool, discovery: ToldByTheTest, supervisor: Supervisor) -> None:
        self.pool = pool
        self.discovery = discovery
        self.supervisor = supervisor
        self.peers: list[FakeVerifier] = []
        self.addresses: list[str] = []
        self._num_sessions = 0

    async def present(self, *numbers: int, draining: tuple[int, ...] = ()) -> None:
        """Says which replicas are there, and returns when the pool knows and has reached them."""
        self.discovery.say(
            *[self.addresses[number] for number in numbers], draining=tuple([self.addresses[one] for one in draining])
        )
        await until(lambda: self.ready == {self.addresses[number] for number in numbers})

    @property
    def ready(self) -> set[str]:
        return {replica.address for replica in self.pool.snapshot.ready}

    @property
    def num_links(self) -> int:
        return sum(task.get_name().startswith("link ") for task in self.supervisor.children)

    async def session(self, **fields: object) -> tuple[Port, Found]:
        """A new session that has found a replica."""
        self._num_sessions += 1
        port = Port()
        self.pool.tell(find(f"s{self._num_sessions}", port, **fields))
        await until(lambda: bool(port.of(Found)))
        return port, port.of(Found)[0]

    async def on(self, number: int) -> tuple[Port, Found]:
        """A session on this replica."""
        port, found = await self.session()
        assert found.replica.address == self.addresses[number]
        return port, found

    async def settled(self) -> None:
        """Returns when the pool has handled what it was told."""
        port = Port()
        self.pool.tell(find("probe", port, method="nobody offers it"))
        await until(lambda: self.pool.num_searching == 1)
        self.pool.tell(WithdrawFind("probe"))


@contextlib.asynccontextmanager
async def setup(num_replicas: int, info: ModelInfo = INFO) -> AsyncIterator[Setup]:
    async with contextlib.AsyncExitStack() as stack:
        peers = [await stack.enter_async_context(fake_verifier(info)) for _ in range(num_replicas)]
        discovery = ToldByTheTest()
        async with Supervisor("test") as supervisor:
            pool = Pool(VERIFIER_CODEC, discovery, check_verifiers())
            pool.start(supervisor)
            await until(lambda: discovery._tell is not None)
            made = Setup(pool, discovery, supervisor)
            made.peers = [peer for peer, _ in peers]
            made.addresses = [address for _, address in peers]
            yield made
        assert not supervisor.children


async def test_nothing_is_settled_before_discovery_has_answered() -> None:
    async with setup(1) as made:
        assert not made.pool.snapshot.settled
        assert made.pool.snapshot.why_not == "the test has not answered yet"
        made.discovery.say()
        async with asyncio.timeout(5.0):
            await made.pool.wait_settled()
        assert made.pool.snapshot.why_not == "the test names no replica that takes sessions"
        made.discovery.say(made.addresses[0], "127.0.0.1:1")
        await until(lambda: bool(made.ready))
        await until(lambda: made.pool.snapshot.settled)
        assert made.pool.snapshot.why_not.startswith("127.0.0.1:1: ")


async def test_a_session_that_waits_gets_the_first_replica_that_comes() -> None:
    async with setup(1) as made:
        port = Port()
        made.pool.tell(find("early", port))
        await until(lambda: made.pool.num_searching == 1)
        made.discovery.say(made.addresses[0])
        await until(lambda: bool(port.of(Found)))


async def test_new_replicas_get_the_new_sessions() -> None:
    async with setup(3) as made:
        await made.present(0)
        for _ in range(4):
            await made.on(0)
        await made.present(0, 1, 2)
        for _ in range(8):
            await made.session()
        assert sorted(made.pool.loads.values()) == [4, 4, 4]


async def test_a_draining_replica_keeps_its_sessions_and_gets_no_other() -> None:
    async with setup(2) as made:
        await made.present(0)
        port, found = await made.on(0)
        await made.present(1, draining=(0,))
        for _ in range(3):
            await made.on(1)
        assert port.told == [found]
        assert made.pool.snapshot.draining == (made.addresses[0],)
        assert made.pool.snapshot.troubles == ()
        assert made.pool.loads == {made.addresses[0]: 1, made.addresses[1]: 3}


async def test_the_only_replica_drains_and_a_search_waits_for_the_next_one() -> None:
    async with setup(2) as made:
        await made.present(0)
        await made.present(draining=(0,))
        port = Port()
        made.pool.tell(find("late", port, avoid=made.addresses[1]))
        await until(lambda: made.pool.num_searching == 1)
        await made.present(1, draining=(0,))
        await until(lambda: bool(port.of(Found)))
        assert port.of(Found)[0].replica.address == made.addresses[1]


@pytest.mark.parametrize("how", ["draining", "gone", "broken"])
async def test_the_loss_of_the_last_ready_replica_is_a_warning(how: str, caplog: pytest.LogCaptureFixture) -> None:
    def lost() -> list[str]:
        return [record.getMessage() for record in caplog.records if "last ready replica is lost" in record.message]

    async with setup(2) as made:
        await made.present(0, 1)
        await made.present(1)
        assert not lost()
        if how == "broken":
            made.peers[1].break_off()
        else:
            made.discovery.say(draining=(made.addresses[1],) if how == "draining" else ())
        await until(lambda: bool(lost()))
    assert len(lost()) == 1
    assert all(record.levelname == "WARNING" for record in caplog.records if "is lost" in record.message)


async def test_a_replica_that_only_drains_is_not_even_called() -> None:
    async with setup(1) as made:
        await made.present(draining=(0,))
        await made.settled()
        assert (made.pool.loads, made.num_links) == ({}, 0)
        await made.present(0)
        await made.on(0)


async def test_a_replica_that_is_gone_and_unused_loses_its_link_at_once() -> None:
    async with setup(2) as made:
        await made.present(0, 1)
        assert made.num_links == 2
        await made.present(1)
        await until(lambda: made.num_links == 1)
        assert made.pool.snapshot.draining == ()
        assert made.pool.loads == {made.addresses[1]: 0}


async def test_an_address_that_never_answered_loses_its_link_too() -> None:
    async with setup(1) as made:
        dead = f"127.0.0.1:{free_port()}"
        made.discovery.say(dead, made.addresses[0])
        await until(lambda: dict(made.pool.snapshot.troubles).keys() == {dead} and bool(made.ready))
        await made.present(0)
        await until(lambda: made.num_links == 1)
        assert made.pool.snapshot.troubles == ()


async def test_a_replica_that_is_gone_keeps_its_sessions_and_hears_of_each_close_before_the_link_ends() -> None:
    async with setup(2) as made:
        await made.present(0)
        (first_port, first), (_, second) = await made.on(0), await made.on(0)
        await made.present(1)
        assert made.pool.snapshot.draining == (made.addresses[0],)
        await made.on(1)
        assert first_port.told == [first]
        peer = made.peers[0]
        first.link.detach("s1", 1)
        second.link.detach("s2", 1)
        await until(lambda: peer.commands == [Close("s1", 1), Close("s2", 1)])
        assert made.num_links == 2, "a replica that waits for its last session must hear of it"
        peer.say(Closed("s1", 1), Closed("s2", 1))
        await until(lambda: made.num_links == 1)
        assert made.addresses[0] not in made.pool.loads


async def test_a_replica_that_is_gone_and_answers_no_close_is_not_waited_for_long() -> None:
    async with setup(2) as made:
        await made.present(0)
        _, found = await made.on(0)
        await made.present(1)
        found.link.detach("s1", 1)
        await until(lambda: made.num_links == 1, 5.0)


@pytest.mark.parametrize("is_gone", [True, False])
async def test_sessions_of_a_replica_that_leaves_are_told_not_to_wait_when_its_stream_breaks(is_gone: bool) -> None:
    async with setup(2) as made:
        await made.present(0)
        port, found = await made.on(0)
        await made.present(1, draining=() if is_gone else (0,))
        made.peers[0].break_off()
        await until(lambda: bool(port.of(LinkLost)))
        assert port.of(LinkLost) == [LinkLost(found.lane, found.link, gone=True)]
        if is_gone:
            await until(lambda: made.num_links == 1)
            assert made.addresses[0] not in made.pool.loads


async def test_sessions_that_wait_for_a_lost_replica_are_told_when_it_is_gone() -> None:
    async with contextlib.AsyncExitStack() as stack:
        made = await stack.enter_async_context(setup(1))
        replica = contextlib.AsyncExitStack()
        _, address = await replica.enter_async_context(fake_verifier(INFO))
        made.discovery.say(address)
        await until(lambda: made.ready == {address})
        port, found = await made.session()
        await replica.aclose()
        await until(lambda: port.of(LinkLost) == [LinkLost(found.lane, found.link)])
        await made.present(0)
        assert port.of(LinkLost)[1:] == [LinkLost(found.lane, found.link, gone=True)]
        await until(lambda: made.num_links == 1)


async def test_a_replica_that_comes_back_before_its_link_has_ended_is_used_again_over_the_same_link() -> None:
    async with setup(2) as made:
        await made.present(0)
        port, found = await made.on(0)
        await made.present(1)
        await made.present(0, 1)
        _, again = await made.session()
        _, other = await made.session()
        assert {again.link, other.link} > {found.link}
        assert made.num_links == 2
        # What breaks now is waited for as ever.
        made.peers[0].break_off()
        await until(lambda: bool(port.of(LinkBack)))
        assert port.of(LinkLost) == [LinkLost(found.lane, found.link, gone=False)]


async def test_a_verifier_back_under_another_address_is_reached() -> None:
    async with setup(2) as made:
        await made.present(0)
        await made.on(0)
        made.peers[1].info = replace(INFO, boot_id="boot-2")
        await made.present(1)
        await made.on(1)


async def test_an_old_address_with_a_new_replica_has_lost_the_sessions() -> None:
    async with setup(1) as made:
        await made.present(0)
        port, found = await made.on(0)
        made.peers[0].info = replace(INFO, boot_id="boot-2")
        replica = replace(found.replica, info=made.peers[0].info)
        made.peers[0].break_off()
        await until(lambda: port.of(LinkBack) == [LinkBack(found.lane, found.link, replica, restarted=True)])


def link_of(found: Found) -> Link:
    assert isinstance(found.link, Link)
    return found.link


def refusal(error: Unavailable | CapacityExceeded) -> Callable[[str], Failed]:
    return lambda session: Failed(session, 1, 0, error.to_failure())


async def test_a_replica_that_says_it_shuts_down_is_asked_last_until_it_is_another_one() -> None:
    async with setup(2) as made:
        await made.present(0, 1)
        _, found = await made.session()
        refusing = made.addresses.index(found.replica.address)
        other = 1 - refusing
        made.peers[refusing].say(refusal(Unavailable("shutting down"))("s1"))
        await until(lambda: link_of(found).turns_away)
        found.link.detach("s1", 1)
        for _ in range(3):
            await made.on(other)
        # Without another one it is asked after all.
        await made.present(refusing)
        await made.on(refusing)
        made.peers[refusing].info = replace(INFO, boot_id="boot-2")
        made.peers[refusing].break_off()
        await until(lambda: not link_of(found).turns_away)


async def test_a_full_replica_is_not_one_that_shuts_down() -> None:
    async with setup(1) as made:
        await made.present(0)
        port, found = await made.on(0)
        made.peers[0].say(refusal(CapacityExceeded("full"))("s1"))
        await until(lambda: bool(port.events))
        assert not link_of(found).turns_away
