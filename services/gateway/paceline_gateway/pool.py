"""The pool actor: the replicas of one kind, which of them work, and who gets which.

Discovery tells the complete set of endpoints; the pool compares it with the links that it has:

* present: a link that is up (a handshake was answered, and the replica fits the gateway) takes sessions
* draining: running sessions go on, nobody new comes; should the stream break, they move at once
* gone: as draining, and the link ends with its last session or with its stream, whichever is first

One that comes back before its link has ended is used again. Whether a replica gets a session is asked of four, each of
whom knows one thing:

    discovery, or the replica itself    whether it is about to leave
    `links.py`                          whether it can be reached; a broken link tries again by itself
    `fitness.py`                        whether it fits the gateway, at each handshake
    `breaker.py`                        whether it does its work; one that owes an answer for too long does not

Of those that remain `routing.py` chooses; without one the session waits for the first. What the doors need to know is
published as a frozen snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from dataclasses import dataclass
from enum import Enum

from paceline.runtime.grpc_client import DEFAULT_MAX_MESSAGE_BYTES, ClientTls
from paceline.runtime.mailbox import Mailbox
from paceline.runtime.supervisor import OnError, Supervisor
from paceline_gateway.breaker import BreakerLimits, BreakerState, CircuitBreaker, FailureCause
from paceline_gateway.commands import (
    EndpointsPresent,
    FindReplica,
    Found,
    LinkChanged,
    LookAgain,
    PoolCommand,
    WithdrawFind,
)
from paceline_gateway.discovery.endpoint import Discovery, Endpoint
from paceline_gateway.effects import Replica
from paceline_gateway.fitness import Check
from paceline_gateway.link_codec import LinkCodec
from paceline_gateway.links import Link, LinkState
from paceline_gateway.pool_snapshot import PoolSnapshot, methods_of
from paceline_gateway.routing import Candidate, PrefixTable, choose

logger = logging.getLogger(__name__)

_MAX_COMMANDS = 65_536
_LOOK_AGAIN_S = 0.25
"""While sessions wait and a replica may soon be tried again."""


class _Standing(Enum):
    """What discovery says of an address."""

    PRESENT = "present"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True)
class _Member:
    """A replica with a link, and where it stands."""

    link: Link
    breaker: CircuitBreaker
    standing: _Standing = _Standing.PRESENT

    @property
    def takes_sessions(self) -> bool:
        return self.standing is _Standing.PRESENT and self.link.up

    @property
    def over(self) -> bool:
        """Whether nobody needs the link any more."""
        return self.standing is _Standing.GONE and not (self.link.up and self.link.num_sessions)


class Pool:
    """The replicas of one kind.

    Args:
        codec: their kind.
        discovery: tells where they are.
        check: whether a replica fits.
        silence_s: a replica that owes an answer and says nothing for so long does not do its work.
        breaker: when one that fails counts as not doing its work.
        tls: how to check replicas; None for plain text.
        max_message_bytes: largest frame either way.
    """

    def __init__(
        self,
        codec: LinkCodec,
        discovery: Discovery,
        check: Check,
        *,
        silence_s: float = 10.0,
        breaker: BreakerLimits | None = None,
        tls: ClientTls | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.name = f"{codec.lane.value} pool"
        self._codec = codec
        self._discovery = discovery
        self._check = check
        self._silence_s = silence_s
        self._breaker_limits = breaker or BreakerLimits()
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._members: dict[str, _Member] = {}
        self._supervisor: Supervisor | None = None
        self._discovered = False
        self._finds: dict[str, FindReplica] = {}
        self._prefixes = PrefixTable()
        self._look_again: asyncio.TimerHandle | None = None
        self.failures: Counter[FailureCause] = Counter()
        """What replicas have failed at so far, those that are gone included."""
        self.num_openings = 0
        """How often breakers have opened so far."""
        self._mailbox: Mailbox[PoolCommand] = Mailbox(
            f"the {self.name}'s mailbox", max_items=0, max_bytes=0, reserved_items=_MAX_COMMANDS
        )
        self._settled = asyncio.Event()
        self._ready = asyncio.Event()
        self.snapshot = PoolSnapshot()
        self._publish()

    def _new_member(self, address: str) -> _Member:
        breaker = CircuitBreaker(self._breaker_limits)

        def changed(changed_address: str) -> None:
            self.tell(LinkChanged(changed_address))

        def judge(cause: FailureCause | None) -> None:
            self._judge(address, breaker, cause)

        link = Link(
            address,
            self._codec,
            check=self._check,
            changed=changed,
            tls=self._tls,
            max_message_bytes=self._max_message_bytes,
            judge=judge,
        )
        return _Member(link, breaker)

    def _judge(self, address: str, breaker: CircuitBreaker, cause: FailureCause | None) -> None:
        """A link tells what its replica has failed at, or None where it has done a piece of work."""
        if cause is None:
            if breaker.worked():
                logger.info("%s: %s does its work again", self.name, address)
                self.tell(LinkChanged(address))
            return
        self.failures[cause] += 1
        if breaker.failed(time.monotonic()):
            self.num_openings += 1
            logger.warning("%s: %s gets no session for a while (%s)", self.name, address, cause.value)

    @property
    def breakers(self) -> Counter[BreakerState]:
        """Replicas that discovery names, by where their breakers stand."""
        now = time.monotonic()
        members = list(self._members.values())  # a scrape may run in a thread of its own
        return Counter(
            BreakerState.OPEN if self._is_silent(member) else member.breaker.state(now)
            for member in members
            if member.standing is _Standing.PRESENT
        )

    @property
    def num_sessions(self) -> int:
        """Sessions attached to any replica."""
        return sum(self.loads.values())

    @property
    def loads(self) -> dict[str, int]:
        """Sessions attached, by address."""
        return {address: member.link.num_sessions for address, member in self._members.items()}

    def _is_silent(self, member: _Member) -> bool:
        """Whether the replica has owed an answer, and said nothing to anybody, for too long."""
        return member.link.silent_s > self._silence_s

    @property
    def num_searching(self) -> int:
        """Sessions that wait for a replica."""
        return len(self._finds)

    def tell(self, command: PoolCommand) -> None:
        """Hands the pool a command; answers come to the session's port."""
        self._mailbox.put_reserved(command)

    async def wait_settled(self) -> None:
        """Returns when discovery has answered and every replica has been tried once."""
        await self._settled.wait()

    async def wait_ready(self) -> None:
        """Returns when some replica can be used."""
        await self._ready.wait()

    def start(self, supervisor: Supervisor) -> None:
        """Starts the pool's task and its discovery; links start and end as replicas come and go."""
        self._supervisor = supervisor

        def tell(endpoints: tuple[Endpoint, ...]) -> None:
            self.tell(EndpointsPresent(endpoints))

        supervisor.spawn(self.name, self.run, on_error=OnError.FAIL)
        supervisor.spawn(f"{self.name}'s discovery", lambda: self._discovery.run(tell), on_error=OnError.FAIL)

    async def run(self) -> None:
        """The owner task; runs until it is cancelled."""
        while True:
            for command in await self._mailbox.get_batch():
                self._handle(command)

    def _handle(self, command: PoolCommand) -> None:
        match command:
            case FindReplica():
                there = self._candidates()
                if not self._serve(command, there):
                    self._finds[command.session] = command
                    self._plan_to_look_again(there)
            case WithdrawFind():
                self._finds.pop(command.session, None)
            case EndpointsPresent(endpoints):
                self._compare(endpoints)
                self._changed()
            case LinkChanged():
                self._changed()
            case LookAgain():
                self._serve_waiting()

    def _changed(self) -> None:
        """Ends what is over, publishes, and serves those who wait."""
        for address, member in list(self._members.items()):
            if member.over:
                del self._members[address]
                member.link.end()
        self._publish()
        self._serve_waiting()

    def _serve_waiting(self) -> None:
        there = self._candidates()
        for find in list(self._finds.values()):
            if self._serve(find, there):
                del self._finds[find.session]
        self._plan_to_look_again(there)

    def _plan_to_look_again(self, there: dict[str, Candidate]) -> None:
        """Nobody tells when a pause is over."""
        if not self._finds or self._look_again is not None:
            return
        if all(candidate.works for candidate in there.values()):
            return

        def look() -> None:
            self._look_again = None
            self.tell(LookAgain())

        self._look_again = asyncio.get_running_loop().call_later(_LOOK_AGAIN_S, look)

    # --- who is there -------------------------------------------------------------------------------------------------

    def _compare(self, endpoints: tuple[Endpoint, ...]) -> None:
        self._discovered = True
        present = {endpoint.address: endpoint for endpoint in endpoints}
        for address, endpoint in present.items():
            if endpoint.draining:
                self._move(address, _Standing.DRAINING)
            elif address in self._members:
                self._move(address, _Standing.PRESENT)
            else:
                self._add(address)
        for address in self._members.keys() - present.keys():
            self._move(address, _Standing.GONE)

    def _add(self, address: str) -> None:
        assert self._supervisor is not None, "the pool's task runs, so it was started"  # noqa: S101
        logger.info("%s: %s has come", self.name, address)
        member = self._members[address] = self._new_member(address)
        self._supervisor.spawn(f"link {address}", member.link.run, on_error=OnError.RESTART)

    def _move(self, address: str, standing: _Standing) -> None:
        """Takes note of where a replica stands; one that nobody here has used need not be known to drain."""
        member = self._members.get(address)
        if member is None or member.standing is standing:
            return
        logger.info("%s: %s is %s", self.name, address, standing.value)
        member.standing = standing
        member.link.set_leaving(standing is not _Standing.PRESENT)

    # --- who gets which -----------------------------------------------------------------------------------------------

    def _serve(self, find: FindReplica, there: dict[str, Candidate]) -> bool:
        """Attaches the session to the best replica; says whether nothing is to be found for it any more.

        Args:
            find: what it needs.
            there: who can have it, by address; the one that gets it is seen anew.
        """
        chosen = choose(self._codec.lane, find, there.values(), self._prefixes)
        if chosen is None:
            return False
        replica = chosen.replica
        member = self._members[replica.address]
        member.link.attach(find.session, find.port)
        if not find.port.tell(Found(self._codec.lane, find.find_id, replica, member.link)):
            member.link.forget(find.session)  # it has ended meanwhile: the replica has got nothing to do
            return True
        now = time.monotonic()
        member.breaker.admitted(now)
        self._prefixes.given(find.prefixes, replica.address)
        there[replica.address] = self._candidate(member, replica, now)
        return True

    def _candidates(self) -> dict[str, Candidate]:
        """Replicas that take sessions and can be reached, by address."""
        now = time.monotonic()
        return {
            address: self._candidate(member, replica, now)
            for address, member in self._members.items()
            if member.takes_sessions and (replica := member.link.replica) is not None
        }

    def _candidate(self, member: _Member, replica: Replica, now: float) -> Candidate:
        return Candidate(
            replica,
            member.link.num_sessions,
            turns_away=member.link.turns_away,
            works=member.breaker.admits(now) and not self._is_silent(member),
            on_trial=member.breaker.state(now) is BreakerState.HALF_OPEN,
        )

    def _publish(self) -> None:
        members = self._members.values()
        present = [member.link for member in members if member.standing is _Standing.PRESENT]
        self.snapshot = PoolSnapshot(
            ready=tuple([link.replica for link in present if link.up and link.replica is not None]),
            troubles=tuple([(link.address, link.trouble) for link in present if not link.up]),
            settled=self._discovered and all(link.state is not LinkState.CONNECTING for link in present),
            draining=tuple([member.link.address for member in members if member.standing is not _Standing.PRESENT]),
            seen_methods=methods_of([member.link.replica for member in members]),
            nothing_found="" if present else self._why_nothing_found(),
        )
        if self.snapshot.settled:
            self._settled.set()
        if self.snapshot.ready:
            self._ready.set()
        elif self._ready.is_set():
            self._ready.clear()
            # One that drains or is taken away is no news for its link, and yet nobody is left.
            logger.warning("%s: the last ready replica is lost; %s", self.name, self.snapshot.why_not)

    def _why_nothing_found(self) -> str:
        name = self._discovery.name
        if not name:
            return ""
        return f"{name} names no replica that takes sessions" if self._discovered else f"{name} has not answered yet"
