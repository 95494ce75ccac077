"""The record of a session: who owns it, which tokens are final and how many key/value rows its replicas hold.

The record describes key/value rows; it never stores them. Every write names the writer and its epoch, so that an
owner that was replaced can change nothing, nor one whose record was lost and whose name somebody has taken since.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from paceline.errors import NotFound, SessionBusy
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.text.request import SpeculationOptions


class SessionState(Enum):
    """Where a session is in its life."""

    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Positions:
    """Which replicas serve the session and how many key/value rows they hold; empty names when none does.

    `weights_digest` names the weights that gave its tokens; empty where they are not known.
    """

    verifier: str = ""
    verifier_kv_len: int = 0
    drafter: str = ""
    drafter_kv_len: int = 0
    acceptance_ewma: float = 0.0
    weights_digest: str = ""


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """All that is known of a session.

    Attributes:
        session: its name.
        epoch: fencing number of the owner; grows with every take-over.
        owner: the gateway process that runs it.
        tenant: who may see it; empty without API keys.
        state: where it is in its life.
        model: name of the target.
        sampling: parameters of the generation, seed included.
        rule: acceptance rule.
        generation_start: index of the first generated token.
        tokens: all final tokens, prompt included; committed_len is their number.
        positions: replicas and rows.
        finish_reason: "stop", "length", or what failed; empty while running.
        max_tokens: most tokens to generate, the context's limit included; None in a record that does not say.
        stop: stop strings.
        speculation: what the request said of speculation.
    """

    session: str
    epoch: int
    owner: str
    tenant: str
    state: SessionState
    model: str
    sampling: SamplingParams
    rule: AcceptanceRule
    generation_start: int
    tokens: tuple[int, ...]
    positions: Positions = Positions()
    finish_reason: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    speculation: SpeculationOptions = field(default_factory=SpeculationOptions)

    @property
    def committed_len(self) -> int:
        """Number of final tokens."""
        return len(self.tokens)


class AppendOutcome(Enum):
    """What became of a write."""

    APPLIED = "applied"
    ALREADY_APPLIED = "already_applied"
    """The same epoch has written the same tail before: a retried call."""
    FENCED = "fenced"
    """Somebody else owns the session: under a newer epoch, or under the same one after the writer's record was lost."""
    MISSING = "missing"
    """There is no such record, or it is not what the writer thinks: shorter, different, or of an older epoch. The live
    owner writes the whole record with `put`."""


@dataclass(frozen=True, slots=True)
class Append:
    """Tokens that became final in a session: positions [from_len, from_len + len(tokens)).

    Attributes:
        session: its name.
        epoch: the writer's.
        owner: the writer.
        from_len: committed length before them.
        tokens: the tokens.
        positions: where the session stands now.
    """

    session: str
    epoch: int
    owner: str
    from_len: int
    tokens: tuple[int, ...]
    positions: Positions


def unknown_session(session: str) -> NotFound:
    """The error for a session that does not exist, and for one that is somebody else's: the same words for both."""
    return NotFound(f"there is no session {session!r}, or it has expired", field="session")


def busy_session(session: str) -> SessionBusy:
    """The error for a session on which a generation runs, here or elsewhere."""
    return SessionBusy(
        f"a generation is running on session {session!r}: wait for its end, go on with it by Resume, or use another "
        "name",
        field="session",
    )


class SessionStore(Protocol):
    """Records of sessions. Raises `Unavailable` when the store does not answer in time."""

    async def create(self, record: SessionRecord) -> None:
        """Writes the first record of a generation, atomically.

        A record that has ended is replaced, as a whole, if it is the same tenant's and of an older epoch.

        Raises:
            NotFound: the name belongs to another tenant.
            SessionBusy: a generation runs on the session, or somebody has replaced its record before.
        """

    async def put(self, record: SessionRecord) -> AppendOutcome:
        """Writes the whole record of a live owner, over an older epoch's or its own.

        Returns:
            APPLIED, or FENCED when the name is another tenant's, or somebody else owns it under this epoch or a newer
            one.
        """

    async def append(self, append: Append) -> AppendOutcome:
        """Appends tokens and sets positions, atomically, if writer and length agree; extends the record's expiry.

        Tokens at the front of the call that the record holds already are not appended twice: after a silence of the
        store its owner sends everything since the last acknowledgement.
        """

    async def finish(
        self, session: str, epoch: int, owner: str, state: SessionState, finish_reason: str
    ) -> AppendOutcome:
        """Ends the generation of this epoch and owner; the record stays readable until it expires."""

    async def take_over(self, seen: SessionRecord, owner: str, epoch: int) -> AppendOutcome:
        """Makes `owner` the owner of a record under a newer epoch, whatever its state; from then on it is running.

        The owner before can write nothing any more. What it has written since `seen` was read stays: read it again.

        Args:
            seen: the record as it was read; only its epoch and owner count.
            owner: who takes it over.
            epoch: greater than that of `seen`.

        Returns:
            APPLIED; FENCED when somebody else was faster; MISSING when there is no such record any more.
        """

    async def touch(self, session: str, epoch: int, owner: str) -> AppendOutcome:
        """Extends the expiry of a session that made no progress; tells an owner that was replaced so."""

    async def get(self, session: str) -> SessionRecord | None:
        """The record, or None."""

    async def beat(self, owner: str, life_s: float) -> None:
        """Says that an owner lives, and will say so again within so many seconds."""

    async def is_alive(self, owner: str) -> bool:
        """Whether an owner lives, as far as it has said."""

    async def ping(self) -> None:
        """Returns when the store answers."""

    async def close(self) -> None:
        """Closes connections."""
