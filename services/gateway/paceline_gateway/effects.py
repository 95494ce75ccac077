"""What the decisions of a session ask of its actor. The deciding code is pure; the actor carries these out in order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from paceline.errors import PacelineError
from paceline.messages import (
    DrafterCommand,
    FeatureFormat,
    FinishReason,
    ModelInfo,
    TokenLogprobs,
    TokenOrigin,
    VerifierCommand,
)
from paceline_gateway.round_record import RoundRecord


class Lane(Enum):
    """The two kinds of replica that a session uses."""

    VERIFIER = "verifier"
    DRAFTER = "drafter"


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that works: its address and what it serves."""

    address: str
    info: ModelInfo

    @property
    def memory_bytes(self) -> int:
        """What it holds: weights and key/value rows."""
        return self.info.weights_bytes + self.info.kv_bytes

    def drafts_by(self, method: str) -> bool:
        """Whether it drafts by the method; empty for any method at all."""
        return method in self.info.methods if method else bool(self.info.methods)

    def finds_features(self, served: FeatureFormat | None) -> bool:
        """Of a drafter: whether it gets the features that it builds on, if any, from a verifier that serves those."""
        return self.info.features is None or self.info.features.fits(served)


@dataclass(frozen=True, slots=True)
class Find:
    """Look for a replica.

    Attributes:
        lane: its kind.
        avoid: address to take only if there is no other; empty for none.
    """

    lane: Lane
    avoid: str = ""


@dataclass(frozen=True, slots=True)
class Leave:
    """The session is done with the replica that it was attached to, or no longer looks for one.

    Attributes:
        silent: it leaves because the replica owed it an answer for too long.
    """

    lane: Lane
    silent: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send a command to the attached replica."""

    lane: Lane
    command: VerifierCommand | DrafterCommand


@dataclass(frozen=True, slots=True)
class Fetch:
    """Bring features of the target from the attached verifier to the attached drafter.

    Attributes:
        rows: which.
    """

    rows: range


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens became final.

    Attributes:
        from_len: committed length before them.
        tokens: the tokens.
        origins: one per token.
        logprobs: one per token, or empty.
        texts: text that each token makes visible.
    """

    from_len: int
    tokens: tuple[int, ...]
    origins: tuple[TokenOrigin, ...]
    logprobs: tuple[TokenLogprobs, ...]
    texts: tuple[str, ...]

    def since(self, start: int) -> Commit | None:
        """What of it is at or after an index of the session; None if nothing is."""
        cut = start - self.from_len
        if cut <= 0:
            return self
        if cut >= len(self.tokens):
            return None
        return Commit(start, self.tokens[cut:], self.origins[cut:], self.logprobs[cut:], self.texts[cut:])


@dataclass(frozen=True, slots=True)
class Measured:
    """A round has ended: what it cost and brought."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class Finish:
    """The generation has ended by itself."""

    reason: FinishReason
    stop_string: str = ""


@dataclass(frozen=True, slots=True)
class Fail:
    """The generation cannot go on."""

    error: PacelineError


Effect = Find | Leave | Send | Fetch | Commit | Measured | Finish | Fail
