"""Drafting inside the verifier: the next block is made right after the verdict and rides on it.

The engine knows only this protocol; `paceline.drafting.self_drafting` puts any drafting method behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.engine.features import FeatureRows, FeatureTaps
from paceline.engine.kv.pool import SequenceKV
from paceline.messages import AcceptanceRule, SamplingParams
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree


@dataclass(frozen=True, slots=True)
class SelfDraftJob:
    """A session that has just been judged and wants its next block.

    Attributes:
        session: its name.
        tokens: all committed tokens, pending token included; read during the call only.
        max_depth: most depth of the block, at least 1.
        sampling: the request's parameters; drafts use its keyed noise.
        generation_start: index in `tokens` of the first generated token.
        rule: how the block will be judged; under `ratio` it must be a chain chosen without chance.
        kv: the target's rows of the session; there are len(tokens) - 1.
        features: the target's features of those rows; None where the method needs none.
    """

    session: str
    tokens: Sequence[int]
    max_depth: int
    sampling: SamplingParams
    generation_start: int
    rule: AcceptanceRule
    kv: SequenceKV
    features: FeatureRows | None = None


@dataclass(frozen=True, slots=True)
class SelfDraft:
    """A block for the session's next round.

    Attributes:
        tree: the drafts; empty where nothing could be proposed.
        confidences: the drafter's own probability of each.
        method: that made it; empty for the drafter's only one.
    """

    tree: DraftTree = EMPTY_BLOCK
    confidences: tuple[float, ...] = ()
    method: str = ""


class SelfDrafter(Protocol):
    """Drafts for the sessions of one target engine. Used from the thread that runs the passes, between passes."""

    @property
    def method(self) -> str:
        """Name of the method."""

    @property
    def taps(self) -> FeatureTaps | None:
        """Features that the target's runner must keep; None for none."""

    @property
    def weights_bytes(self) -> int:
        """Memory of its own weights."""

    @property
    def kv_bytes(self) -> int:
        """Memory reserved for key/value rows of its own."""

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        """One block per job. Never raises for one job's sake: what cannot be drafted is empty."""

    def forget(self, session: str) -> None:
        """Frees what it holds for a session; unknown sessions are forgotten already."""
