"""The pool actor: the replicas of one kind, which of them work, and who gets which.

A replica is ready while its link is up, which takes a handshake that it answered and that fits the gateway. A session
gets the ready replica with the fewest sessions, or the first one that becomes ready; one that owes answers and says
nothing comes last. What the doors need to know is published as a frozen snapshot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.runtime.grpc_client import DEFAULT_MAX_MESSAGE_BYTES, ClientTls
from paceline.runtime.mailbox import Mailbox
from paceline.runtime.supervisor import OnError, Supervisor
from paceline_gateway.commands import FindReplica, Found, LinkChanged, PoolCommand, WithdrawFind
from paceline_gateway.effects import Replica
from paceline_gateway.fitness import Check
from paceline_gateway.link_codec import LinkCodec
from paceline_gateway.links import Link, LinkState

logger = logging.getLogger(__name__)

_MAX_COMMANDS = 65_536


@dataclass(frozen=True, slots=True)
class PoolSnapshot:
    """A pool at one moment.

    Attributes:
        ready: replicas that can be used.
        troubles: per address of the others, why not.
        settled: every replica has been tried at least once.
    """

    ready: tuple[Replica, ...] = ()
    troubles: tuple[tuple[str, str], ...] = ()
    settled: bool = False

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
        return tuple(dict.fromkeys(method for replica in self.ready for method in replica.info.methods))

    def offers(self, method: str) -> bool:
        """Whether a ready replica can draft by the method; empty for any."""
        return any(not method or method in replica.info.methods for replica in self.ready)

    def longest_context(self, method: str) -> int:
        """Tokens of context for the method where there is most room; 0 for no bound, or when nobody offers it."""
        limits = [replica.info.max_model_len for replica in self.ready if not method or method in replica.info.methods]
        return 0 if 0 in limits else max(limits, default=0)

    @property
    def why_not(self) -> str:
        """What keeps the others from being used, as one line."""
        return "; ".join(f"{address}: {trouble}" for address, trouble in self.troubles)


class Pool:
    """The replicas of one kind.

    Args:
        codec: their kind.
        addresses: host:port of each.
        check: whether a replica fits.
        silence_s: a replica that owes an answer and says nothing for so long is taken only if there is no other.
        tls: how to check replicas; None for plain text.
        max_message_bytes: largest frame either way.
    """

    def __init__(
        self,
        codec: LinkCodec,
        addresses: Sequence[str],
        check: Check,
        *,
        silence_s: float = 10.0,
        tls: ClientTls | None = None,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self.name = f"{codec.lane.value} pool"
        self._codec = codec
        self._check = check
        self._silence_s = silence_s
        self._tls = tls
        self._max_message_bytes = max_message_bytes
        self._links: dict[str, Link] = {address: self._new_link(address) for address in addresses}
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
        return {address: link.num_sessions for address, link in self._links.items()}

    def is_silent(self, address: str) -> bool:
        """Whether the replica has owed an answer, and said nothing to anybody, for too long."""
        return self._links[address].silent_s > self._silence_s

    @property
    def num_searching(self) -> int:
        """Sessions that wait for a replica."""
        return len(self._finds)

    def tell(self, command: PoolCommand) -> None:
        """Hands the pool a command; answers come to the session's port."""
        self._mailbox.put_reserved(command)

    async def wait_settled(self) -> None:
        """Returns when every replica has been tried once."""
        await self._settled.wait()

    async def wait_ready(self) -> None:
        """Returns when some replica can be used."""
        await self._ready.wait()

    def start(self, supervisor: Supervisor) -> None:
        """Starts the pool's task and one for each link."""
        supervisor.spawn(self.name, self.run, on_error=OnError.FAIL)
        for link in self._links.values():
            supervisor.spawn(f"link {link.address}", link.run, on_error=OnError.RESTART)

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
            case LinkChanged():
                self._publish()
                for find in list(self._finds.values()):
                    if self._serve(find):
                        del self._finds[find.session]

    def _serve(self, find: FindReplica) -> bool:
        """Attaches the session to the best replica; says whether there is one."""
        usable = [(link, replica) for link in self._links.values() if (replica := _usable(link, find)) is not None]
        if not usable:
            return False
        link, replica = min(usable, key=lambda pair: self._rank(pair[0], find))
        link.attach(find.session, find.port)
        if not find.port.tell(Found(self._codec.lane, find.find_id, replica, link)):
            link.forget(find.session)
        return True

    def _rank(self, link: Link, find: FindReplica) -> tuple[bool, bool, int]:
        return link.address == find.avoid, self.is_silent(link.address), link.num_sessions

    def _publish(self) -> None:
        links = self._links.values()
        self.snapshot = PoolSnapshot(
            ready=tuple([link.replica for link in links if link.up and link.replica is not None]),
            troubles=tuple([(link.address, link.trouble) for link in links if not link.up]),
            settled=all(link.state is not LinkState.CONNECTING for link in links),
        )
        if self.snapshot.settled:
            self._settled.set()
        if self.snapshot.ready:
            self._ready.set()
        else:
            self._ready.clear()


def _usable(link: Link, find: FindReplica) -> Replica | None:
    replica = link.replica
    if not link.up or replica is None:
        return None
    fits_method = not find.method or find.method in replica.info.methods
    fits_context = replica.info.max_model_len >= find.context_len or not replica.info.max_model_len
    return replica if fits_method and fits_context else None
