"""What the parts say to one another: frozen dataclasses, grouped by receiver.

`paceline.wire` turns them into protobuf and back. Field meanings and units are those of the protos in
`proto/paceline/v1`. Every message names session and epoch; a message with an older epoch has no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from paceline.errors import Failure
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

GREEDY_TEMPERATURE = 1e-5
"""Below this temperature a request is greedy, everywhere."""


class AcceptanceRule(Enum):
    """How the verifier decides which draft tokens to keep."""

    MATCH = "match"
    RATIO = "ratio"


class TokenOrigin(Enum):
    """Where a token came from."""

    ACCEPTED = "accepted"
    RECOVERED = "recovered"
    BONUS = "bonus"
    PLAIN = "plain"
    RECORDED = "recorded"


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the target's logits become a token.

    Order of application: logit_bias, penalties, min_tokens mask, temperature, top_k, top_p, min_p. Plain data: limits
    are checked at the doors by `paceline.text.validation`.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    seed: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the best token is taken without noise."""
        return self.temperature < GREEDY_TEMPERATURE


@dataclass(frozen=True, slots=True)
class DraftProbs:
    """The distribution that one draft token was drawn from; ids that are not listed have probability 0.

    Attributes:
        token_ids: distinct ids, the drafted one among them.
        probs: one per id, float32 values in (0, 1] that sum to 1.
    """

    token_ids: tuple[int, ...]
    probs: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one answer went, in microseconds, as measured by the replica.

    `draft_us` is what making the next block in the verifier took.
    """

    queue_us: int = 0
    forward_us: int = 0
    total_us: int = 0
    batch_sessions: int = 0
    batch_tokens: int = 0
    draft_us: int = 0


NO_TIMING = Timing()


MAX_FEATURE_BYTES = 256 * 1024
"""Of features in one message; more travel in several."""


class FeatureDtype(Enum):
    """How the numbers of features are spelled on the wire."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Of one number."""
        return 4 if self is FeatureDtype.FLOAT32 else 2


@dataclass(frozen=True, slots=True)
class FeatureFormat:
    """Which hidden states of the target a verifier serves, or a drafter builds on: maybe `only_last` token's."""

    kind: str
    width: int
    dtype: FeatureDtype = FeatureDtype.FLOAT32
    only_last: bool = False

    def fits(self, other: FeatureFormat | None) -> bool:
        """Whether the other ones are the same hidden states; how they are spelled does not matter."""
        return other is not None and (self.kind, self.width) == (other.kind, other.width)

    def __str__(self) -> str:
        """For people."""
        return f"{self.kind!r} of {self.width} numbers"


@dataclass(frozen=True, slots=True)
class Features:
    """Hidden states of the target for the tokens at positions [first_row, end)."""

    first_row: int
    num_rows: int
    width: int
    dtype: FeatureDtype
    data: bytes = field(repr=False)

    @property
    def end(self) -> int:
        """The row after the last one."""
        return self.first_row + self.num_rows

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return self.width * self.dtype.num_bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a replica serves. Of its memory a verifier spends `drafting_bytes` on drafting by itself and on features.

    `features` are those that a verifier serves, or that a drafter cannot draft without. `weights_digest` is that of a
    verifier; empty where it is not known. `gather_window_us` is how long a verifier's pass may wait for sessions that
    will soon be back.
    """

    model: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_hash: str
    boot_id: str
    methods: tuple[str, ...] = ()
    max_draft_tokens: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    max_sessions: int = 0
    drafting_bytes: int = 0
    features: FeatureFormat | None = None
    weights_digest: str = ""
    gather_window_us: int = 0


@dataclass(frozen=True, slots=True)
class VocabularyChunk:
    """Part of a vocabulary: the tokens of the ids [first_id, first_id + len(pieces))."""

    first_id: int
    pieces: tuple[str, ...]


# --- commands to a replica ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Open:
    """Registers a session, or takes it over under a newer epoch. Costs no pass."""

    session: str
    epoch: int
    tokens: tuple[int, ...]
    generation_start: int
    sampling: SamplingParams
    rule: AcceptanceRule = AcceptanceRule.MATCH
    method: str = ""


@dataclass(frozen=True, slots=True)
class Close:
    """Forgets a session and frees what it holds."""

    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Verify:
    """To the verifier: judge one block; an empty one is a plain decoding step.

    `draft_probs` belongs to the rule `ratio`: one per draft of a sampled chain, empty for drafts chosen without chance.
    `next_depth` asks a verifier that drafts by itself for the next round's block, `features_from` one that serves
    features for those of its rows from there on.

    A follow-up comes while the round that it `follows` is judged, and counts on a verdict of exactly the tokens
    `expected`, which are its last committed ones: then it is judged next, without a way to the gateway and back. Any
    other outcome answers it with `NeedTokens`.
    """

    session: str
    epoch: int
    round: int
    base_len: int
    prefix_hash: int
    catch_up: tuple[int, ...] = ()
    block: DraftTree = EMPTY_BLOCK
    draft_probs: tuple[DraftProbs, ...] = ()
    next_depth: int = 0
    features_from: int | None = None
    follows: int = 0
    expected: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Draft:
    """To the drafter: propose up to `max_depth` tokens after base + assumed.

    Supersedes a running draft of the session. `features` are those of the target that the drafter may lack; a draft
    that `starts_short` is made without the ones that it lacks even so.
    """

    session: str
    epoch: int
    draft_id: int
    base_len: int
    prefix_hash: int
    max_depth: int
    catch_up: tuple[int, ...] = ()
    assumed: tuple[int, ...] = ()
    features: Features | None = None
    starts_short: bool = False


def command_id_of(command: Open | Close | Verify | Draft) -> int:
    """The command's round or draft_id; 0 for those that have none."""
    if isinstance(command, Verify):
        return command.round
    return command.draft_id if isinstance(command, Draft) else 0


# --- events to the gateway ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First event of every stream: the identity of the replica's life."""

    boot_id: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The session is registered."""

    session: str
    epoch: int
    kv_len: int = 0
    cached_len: int = 0


@dataclass(frozen=True, slots=True)
class Closed:
    """The session is gone."""

    session: str
    epoch: int


@dataclass(frozen=True, slots=True)
class NeedTokens:
    """The replica agrees only up to `have_len`: say it again with catch_up from there."""

    session: str
    epoch: int
    command_id: int
    have_len: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """The replica does not hold the session: open it again."""

    session: str
    epoch: int
    command_id: int


@dataclass(frozen=True, slots=True)
class Failed:
    """One command failed; everything else goes on."""

    session: str
    epoch: int
    command_id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of the target's processed distribution at one position; alternatives best first."""

    logprob: float
    top_tokens: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Verified:
    """The verdict on one block: the accepted nodes and one token more than those; perhaps with the next block."""

    session: str
    epoch: int
    round: int
    base_len: int
    accepted_path: tuple[int, ...]
    tokens: tuple[int, ...]
    kv_len: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    timing: Timing = NO_TIMING
    next_block: DraftTree = EMPTY_BLOCK
    next_confidences: tuple[float, ...] = ()
    next_method: str = ""
    features: Features | None = None


@dataclass(frozen=True, slots=True)
class Drafted:
    """A proposal; of use only if the committed tokens turn out to start with base + assumed.

    A drafter that builds on features has those of rows up to `features_len`.
    """

    session: str
    epoch: int
    draft_id: int
    block: DraftTree
    kv_len: int
    confidences: tuple[float, ...] = ()
    method: str = ""
    timing: Timing = NO_TIMING
    draft_probs: tuple[DraftProbs, ...] = ()
    features_len: int = 0


VerifierCommand = Open | Verify | Close
DrafterCommand = Open | Draft | Close
VerifierEvent = Hello | Opened | Verified | NeedTokens | Evicted | Closed | Failed
DrafterEvent = Hello | Opened | Drafted | NeedTokens | Evicted | Closed | Failed
