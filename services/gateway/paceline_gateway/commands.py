"""What the gateway's actors can be told, grouped by receiver. Frozen; the sets are closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from paceline.errors import PacelineError
from paceline.messages import DrafterCommand, DrafterEvent, FeatureFormat, VerifierCommand, VerifierEvent
from paceline.session.store import AppendOutcome
from paceline_gateway.discovery.endpoint import Endpoint
from paceline_gateway.effects import Lane, Replica

ReplicaCommand = VerifierCommand | DrafterCommand
ReplicaEvent = VerifierEvent | DrafterEvent


class SessionPort(Protocol):
    """Where a link delivers what concerns a session. Never waits and never raises."""

    def tell(self, command: SessionCommand) -> bool:
        """Hands a command to the session; says whether it is still there."""


class ReplicaLink(Protocol):
    """A session's way to one replica. Used on the event loop only."""

    @property
    def address(self) -> str:
        """host:port of the replica."""

    @property
    def channel(self) -> grpc.aio.Channel | None:
        """For rpcs beside the stream; None while the link is broken."""

    def send(self, command: ReplicaCommand) -> None:
        """Sends a command; a broken link forgets it.

        Raises:
            CapacityExceeded: too much waits to be sent.
        """

    def detach(self, session: str, epoch: int, silent: bool = False) -> None:
        """Closes the session on the replica and delivers nothing more to it.

        Args:
            session: its name.
            epoch: its fencing number.
            silent: it leaves because the replica owed it an answer for too long.
        """


# --- to a session actor ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """The pool has attached the session to a replica.

    Attributes:
        find_id: which search it answers; the session detaches from what it no longer looks for.
    """

    lane: Lane
    find_id: int
    replica: Replica
    link: ReplicaLink


@dataclass(frozen=True, slots=True)
class Said:
    """A replica says something to the session."""

    lane: Lane
    link: ReplicaLink
    event: ReplicaEvent


@dataclass(frozen=True, slots=True)
class LinkLost:
    """A link is broken, or was broken already and its replica has left the pool meanwhile.

    Attributes:
        gone: the replica is not expected back.
    """

    lane: Lane
    link: ReplicaLink
    gone: bool = False


@dataclass(frozen=True, slots=True)
class LinkBack:
    """A link works again.

    Attributes:
        replica: what it serves now.
        restarted: it is a new process and knows no session; it may serve something else than the one before.
    """

    lane: Lane
    link: ReplicaLink
    replica: Replica
    restarted: bool


@dataclass(frozen=True, slots=True)
class Fetched:
    """Features were brought to the drafter, or could not be.

    Attributes:
        fetch_id: which attempt it is about.
        error: why not; None for success.
    """

    fetch_id: int
    error: PacelineError | None = None


@dataclass(frozen=True, slots=True)
class StoreAnswered:
    """The store has answered a write: an outcome, or the error of one that failed."""

    result: AppendOutcome | PacelineError


@dataclass(frozen=True, slots=True)
class ClientRead:
    """The client's buffer has room again."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """End the generation with this error."""

    error: PacelineError


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline has come."""


SessionCommand = Found | Said | LinkLost | LinkBack | Fetched | StoreAnswered | ClientRead | Cancel | Tick


# --- to a pool actor ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FindReplica:
    """Attach a session to a replica as soon as one is ready.

    Attributes:
        avoid: address to take only if there is no other.
        method: only drafters that offer this method; verifiers that draft by it first; empty for any.
        context_len: tokens that the session may come to hold; 0 where a smaller context is of use too.
        features: those that the session's verifier serves: drafters that build on others are of no use to it.
        prefer: address to take if nothing speaks against it, as one that may hold the session's rows; empty for none.
        weights_digest: only verifiers with these weights, or with weights that are not known; empty for any.
        prefixes: hashes of beginnings of the session's tokens, longest first, to find a verifier that knows one.
    """

    session: str
    find_id: int
    port: SessionPort
    avoid: str = ""
    method: str = ""
    context_len: int = 0
    features: FeatureFormat | None = None
    prefer: str = ""
    weights_digest: str = ""
    prefixes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class WithdrawFind:
    """The session no longer looks for a replica."""

    session: str


@dataclass(frozen=True, slots=True)
class LinkChanged:
    """A link of the pool has come up, has broken, or was refused; or one that leaves has no session any more."""

    address: str


@dataclass(frozen=True, slots=True)
class LookAgain:
    """A replica that did not do its work may be tried again by now."""


@dataclass(frozen=True, slots=True)
class EndpointsPresent:
    """The complete present set of endpoints; links to all others are of the past."""

    endpoints: tuple[Endpoint, ...]


PoolCommand = FindReplica | WithdrawFind | LinkChanged | LookAgain | EndpointsPresent
