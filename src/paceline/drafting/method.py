"""What the drafter asks of a drafting method.

A method only ever affects speed: the verifier decides every token. Only what it says of its own chance, under the rule
`ratio`, must be true. To add one, write one file beside this one; the recipe is docs/add_a_method.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams
from paceline.speculation.tree import DraftTree

if TYPE_CHECKING:
    from paceline.engine.features import FeatureRows, FeatureTaps
    from paceline.engine.kv.sequence import SequenceKV


@dataclass(frozen=True, slots=True)
class MethodInfo:
    """Facts about a method; zero or empty where a method has no model.

    Attributes:
        name: `draft_model`, `ngram`, ...; a chain's joins those of its parts.
        vocab_size: ids at or above it are never proposed; 0 when the method repeats given ids only.
        max_model_len: most tokens of context; 0 when unbounded.
        tokenizer_hash: fingerprint of the model's tokenizer; empty when the method has none.
        weights_bytes: memory of the weights.
        kv_bytes: memory reserved for key/value rows.
        max_sessions: sessions that fit at once; 0 when unbounded.
        vocabulary: token of each id of that tokenizer; empty when the method has none.
        parts: names of a chain's methods in order; empty for a single method.
        taps: features of the target that the method builds on; None for none. Such a method drafts after committed
            tokens only, never ahead.
    """

    name: str
    vocab_size: int = 0
    max_model_len: int = 0
    tokenizer_hash: str = ""
    weights_bytes: int = 0
    kv_bytes: int = 0
    max_sessions: int = 0
    vocabulary: Mapping[int, str] = field(default_factory=dict, repr=False, compare=False)
    parts: tuple[str, ...] = ()
    taps: FeatureTaps | None = None

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods that a draft can be restricted to."""
        return self.parts or (self.name,)


@dataclass(slots=True)
class DraftJob:
    """One draft in the making; the method appends to it step by step, so that it can be superseded between steps.

    Attributes:
        session: key of the session, opened before.
        context: committed tokens, then assumed ones.
        max_depth: most tokens to propose, at least 1.
        sampling: the request's parameters; drafts use its keyed noise.
        generation_start: index in `context` of the first generated token, for penalties and min_tokens.
        only: of a chain, only this method may propose; empty for any. A single method need not look at it.
        rule: how the target will judge the draft.
        features: the target's features of the context's tokens but the last; None where the method needs none.
        target_rows: the target's own rows of the context's tokens but the last, for a method inside the verifier that
            runs the target's layers; None elsewhere.
        num_candidates: how many candidates are to be noted at each position of a chain; 0 for none. A method that has
            no candidates need not look at it.
        tokens: the tokens proposed so far; those of a chain follow one another from position len(context) on.
        parents: of a tree, the parent node of each token, as in `DraftTree`; empty for a chain.
        confidences: the drafter's own probability of each token.
        candidates: the best tokens of each position where they were asked for, the proposed one first.
        draft_probs: under the rule `ratio`, the distribution that each token was drawn from; empty where all of them
            were chosen without chance.
        done: no further step will add to it.
        method: name of the method that proposed it.
    """

    session: str
    context: Sequence[int]
    max_depth: int
    sampling: SamplingParams
    generation_start: int = 0
    only: str = ""
    rule: AcceptanceRule = AcceptanceRule.MATCH
    features: FeatureRows | None = None
    target_rows: SequenceKV | None = None
    num_candidates: int = 0
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    candidates: list[tuple[int, ...]] = field(default_factory=list)
    draft_probs: list[DraftProbs] = field(default_factory=list)
    done: bool = False
    method: str = ""

    @property
    def sampling_without_chance(self) -> SamplingParams:
        """Parameters by which a draft is chosen that says nothing of its own chance.

        Under `match` the request's own, with the noise that the target has too. Under `ratio` greedy: drafts must not
        share the target's noise.
        """
        return replace(self.sampling, temperature=0.0) if self.rule is AcceptanceRule.RATIO else self.sampling

    @property
    def block(self) -> DraftTree:
        """What is proposed so far."""
        return DraftTree(tuple(self.tokens), tuple(self.parents)) if self.parents else DraftTree.chain(self.tokens)


class DraftMethod(Protocol):
    """A way of drafting. Used from one thread at a time."""

    @property
    def info(self) -> MethodInfo:
        """Facts about the method."""

    def open(self, session: str) -> None:
        """Makes room for a session.

        Raises:
            CapacityExceeded: no slot is free.
        """

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        """Takes one step for all jobs: at most one pass, which adds at most one token to each; a tree comes whole.

        A method without a model may finish at once. The first step of a job brings the session's rows to its context:
        rows are cut to the longest common prefix of what was fed and the context, less one, and the rest is fed. Jobs
        of different sessions share the pass. A job that cannot be served (context too long, nothing found, no room) is
        marked done with what it has.
        """

    def kv_len(self, session: str) -> int:
        """Key/value rows that the session holds."""

    def close(self, session: str) -> None:
        """Frees what the session holds; unknown sessions are closed already."""


@runtime_checkable
class DraftsAtOnce(Protocol):
    """A method that can take the steps of a draft without coming back between them."""

    def draft_at_once(self, job: DraftJob) -> bool:
        """Takes steps of a job, all or many: for a draft that somebody waits for, and nobody for anything else.

        What it proposes is what `advance` would propose.

        Returns:
            False where this job has to go step by step; nothing has been done then.
        """


@runtime_checkable
class SelfChecking(Protocol):
    """A method that can check its own tables."""

    def check_integrity(self) -> None:
        """Raises when they contradict one another."""
