"""The pool actor: the replicas of one kind, which of them work, and who gets which.

Discovery tells the complete set of endpoints; the pool compares it with the links that it has:

* present: a link that is up (a handshake was answered, and the replica fits the gateway) takes sessions
* draining: running sessions go on, nobody new comes; should the stream break, they move at once
* gone: as draining, and the link ends with its last session or with its stream, whichever is first

One that comes back before its link has ended is used again. A session gets the ready replica with the fewest sessions,
or the first one that becomes ready. One that has just turned a session away, or that owes answers and says nothing,
comes last. What the doors need to know is published as a frozen snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from paceline.messages import FeatureFormat
from paceline.runtime.grpc_client import DEFAULT_MAX_MESSAGE_BYTES, ClientTls
from paceline.runtime.mailbox import Mailbox
from paceline.runtime.supervisor import OnError, Supervisor
from paceline_gateway.commands import (
    EndpointsPresent,
    FindReplica,
    Found,
    LinkChanged,
    PoolCommand,
    WithdrawFind,
)
from paceline_gateway.discovery.endpoint import Discovery, Endpoint
from paceline_gateway.effects import Lane, Replica
from paceline_gateway.fitness import Check
from paceline_gateway.link_codec import LinkCodec
from paceline_gateway.links import Link, LinkState

logger = logging.getLogger(__name__)

_MAX_COMMANDS = 65_536


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment.

    Attributes:
        ready: replicas that take sessions.
        draining: addresses of those that take none any more, while running sessions may go on there.
        troubles: per address of the others, why they cannot be used.
        settled: discovery has answered, and every replica has been tried at least once.
        seen_methods: methods on offer, now or when a replica that is away was last there.
        nothing_found: why there is no replica to be tried; empty if there is one.
    """

    ready: tuple[Replica, ...] = ()
    troubles: tuple[tuple[str, str], ...] = ()
    settled: bool = False
    draining: tuple[str, ...] = ()
    seen_methods: tuple[str, ...] = ()
    nothing_found: str = ""

    @property
    def max_model_len(self) -> int:
        """Tokens that a session may hold where there is most room; 0 without a replica."""
        return max((replica.info.max_model_len for replica in self.ready), default=0)

    @property
    def vocab_size(self) -> int:
        """Token ids that every replica knows; 0 without a replica."""
        return min((replica.info.vocab_size for replica in self.ready), default=0)

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods on offer, each once; those of a chain one by one."""
        return _methods(self.ready)

    def offers(self, method: str, served: Sequence[FeatureFormat | None] = (None,)) -> bool:
        """Whether a ready drafter can draft by the method, empty for any, where verifiers serve such features."""
        return any(
            (not method or method in replica.info.methods) and any(map(replica.finds_features, served))
            for replica in self.ready
        )

    def build_on_prompts(self, method: str) -> bool:
        """Of drafters: whether one, by the method if one is named, may need the target's features of whole prompts."""
        wanted = [replica.info.features for replica in self.ready if replica.drafts_by(method)]
        return not wanted or any(features is not None and not features.only_last for features in wanted)

    def draft_themselves(self, method: str) -> bool:
        """Of verifiers: whether a ready one drafts by itself, by the method if one is named."""
        return any(replica.drafts_by(method) for replica in self.ready)

    @property
    def features(self) -> tuple[FeatureFormat | None, ...]:
        """Of verifiers: the features that each ready one serves."""
        return tuple([replica.info.features for replica in self.ready])

    def longest_context(self, method: str) -> int:
        """Tokens of context for the method where there is most room; 0 for no bound, or when nobody offers it."""
        limits = [replica.info.max_model_len for replica in self.ready if not method or method in replica.info.methods]
        return 0 if 0 in limits else max(limits, default=0)

    @property
    def why_not(self) -> str:
        """What keeps the others from being used, as one line."""
        return "; ".join([f"{address}: {trouble}" for address, trouble in self.troubles]) or self.nothing_found


class _Standing(Enum):
    """What discovery says of an address."""

    PRESENT = "present"
    DRAINING = "draining"
    GONE = "gone"


@dataclass(slots=True)
class _Member:
    """A replica with a link, and where it stands."""

    link: Link
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
        silence_s: a replica that owes an answer and says nothing for so long is taken only if there is no other.
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
        tls: ClientTls | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.name = f"{codec.lane.value} pool"
        self._codec = codec
        self._discovery = discovery
        self._check = check
        self._silence_s = silence_s
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._members: dict[str, _Member] = {}
        self._supervisor: Supervisor | None = None
        self._discovered = False
        self._finds: dict[str, FindReplica] = {}
        self._mailbox: Mailbox[PoolCommand] = Mailbox(
            f"the {self.name}'s mailbox", max_items=0, max_bytes=0, reserved_items=_MAX_COMMANDS
        )
        self._settled = asyncio.Event()
        self._ready = asyncio.Event()
        self.snapshot = PoolSnapshot()
        self._publish()

    def _new_link(self, address: str) -> Link:
        def changed(changed_address: str) -> None:
            self.tell(LinkChanged(changed_address))

        return Link(
            address,
            self._codec,
            check=self._check,
            changed=changed,
            tls=self._tls,
            max_message_bytes=self._max_message_bytes,
        )

    @property
    def num_sessions(self) -> int:
        """Sessions attached to any replica."""
        return sum(self.loads.values())

    @property
    def loads(self) -> dict[str, int]:
        """Sessions attached, by address."""
        return {address: member.link.num_sessions for address, member in self._members.items()}

    def is_silent(self, address: str) -> bool:
        """Whether the replica has owed an answer, and said nothing to anybody, for too long."""
        member = self._members.get(address)
        return member is not None and member.link.silent_s > self._silence_s

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
                if not self._serve(command):
                    self._finds[command.session] = command
            case WithdrawFind():
                self._finds.pop(command.session, None)
            case EndpointsPresent(endpoints):
                self._compare(endpoints)
                self._changed()
            case LinkChanged():
                self._changed()

    def _changed(self) -> None:
        """Ends what is over, publishes, and serves those who wait."""
        for address, member in list(self._members.items()):
            if member.over:
                del self._members[address]
                member.link.end()
        self._publish()
        for find in list(self._finds.values()):
            if self._serve(find):
                del self._finds[find.session]

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
        member = self._members[address] = _Member(self._new_link(address))
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

    def _serve(self, find: FindReplica) -> bool:
        """Attaches the session to the best replica; says whether there is one."""
        usable = [
            (member.link, replica)
            for member in self._members.values()
            if member.takes_sessions and (replica := self._usable(member.link, find)) is not None
        ]
        if not usable:
            return False
        link, replica = min(usable, key=lambda pair: self._rank(pair[0], pair[1], find))
        link.attach(find.session, find.port)
        if not find.port.tell(Found(self._codec.lane, find.find_id, replica, link)):
            link.forget(find.session)
        return True

    def _usable(self, link: Link, find: FindReplica) -> Replica | None:
        replica = link.replica
        if replica is None:
            return None
        is_verifier = self._codec.lane is Lane.VERIFIER
        fits_method = is_verifier or not find.method or replica.drafts_by(find.method)
        fits_context = replica.info.max_model_len >= find.context_len or not replica.info.max_model_len
        fits_features = is_verifier or replica.finds_features(find.features)
        return replica if fits_method and fits_context and fits_features else None

    def _rank(self, link: Link, replica: Replica, find: FindReplica) -> tuple[bool, bool, bool, bool, bool, int]:
        return (
            link.turns_away,
            link.address == find.avoid,
            self.is_silent(link.address),
            bool(find.method) and not replica.drafts_by(find.method),
            link.address != find.prefer,
            link.num_sessions,
        )

    def _publish(self) -> None:
        members = self._members.values()
        present = [member.link for member in members if member.standing is _Standing.PRESENT]
        self.snapshot = PoolSnapshot(
            ready=tuple([link.replica for link in present if link.up and link.replica is not None]),
            troubles=tuple([(link.address, link.trouble) for link in present if not link.up]),
            settled=self._discovered and all(link.state is not LinkState.CONNECTING for link in present),
            draining=tuple([member.link.address for member in members if member.standing is not _Standing.PRESENT]),
            seen_methods=_methods([member.link.replica for member in members]),
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


def _methods(replicas: Iterable[Replica | None]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(method for replica in replicas if replica for method in replica.info.methods))
