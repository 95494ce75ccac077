"""The cases of `make verify-lossless` for drafting methods: every method, placement, shape of drafts and batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from bench.lossless import MODES
from bench.reference import Mode
from paceline.method_names import HEAD_METHODS, SELF_DRAFT_METHODS


class Where(StrEnum):
    """Where drafts are made."""

    VERIFIER = "verifier"
    POOL = "pool"


@dataclass(frozen=True, slots=True)
class Shape:
    """A shape of drafts: settings that verifier and drafter share.

    Attributes:
        name: for messages.
        depth: asked of each block.
        max_draft_tokens: most tokens of a block.
        eagle_topk: candidates per node of an EAGLE tree.
        medusa_tree: shape of a Medusa tree.
        exit_layer: layers that layerskip drafts with; None for what the target names.
    """

    name: str
    depth: int = 4
    max_draft_tokens: int = 16
    eagle_topk: int = 1
    medusa_tree: str = "chain:4"
    exit_layer: int | None = None

    @property
    def num_nodes(self) -> int:
        """Most tokens of a block, roughly: what a pass costs."""
        is_tree = self.eagle_topk > 1 or not self.medusa_tree.startswith("chain")
        return self.max_draft_tokens if is_tree else self.depth


@dataclass(frozen=True, slots=True)
class Batch:
    """How many sessions a pass has.

    Attributes:
        together: sessions at once.
        num_sessions: sessions in all.
        max_tokens: new tokens of each.
    """

    together: int
    num_sessions: int
    max_tokens: int


BATCHES = (Batch(1, 2, 48), Batch(8, 8, 24))
"""Few and long, many and short."""
LARGE_TREE = 32
"""Blocks of more tokens get half as many new tokens: each pass costs several times as much."""

CHAIN = (Shape("chain of 4"),)
EAGLE = (Shape("chain of 4"), Shape("tree, topk 4", eagle_topk=4))
MEDUSA = (
    Shape("chain of 4"),
    Shape("tree derived:16", medusa_tree="derived:16"),
    Shape("tree classic_63", max_draft_tokens=63, medusa_tree="classic_63"),
)


def shapes(method: str, num_layers: int, *, trained: bool = True) -> tuple[Shape, ...]:
    """The shapes in which a method drafts.

    Args:
        method: drafting method.
        num_layers: of the target.
        trained: for layerskip: the target was trained for early exits. One that was not agrees with itself only late.
    """
    if method == "layerskip":
        # Short chains: a draft token costs most of a pass.
        late = Shape(f"exit after {num_layers - 2}", depth=2, exit_layer=num_layers - 2)
        if trained:
            return (Shape("exit as trained"), late)
        earlier = num_layers - max(num_layers // 8, 1)
        return (Shape(f"exit after {earlier}", depth=2, exit_layer=earlier), late)
    return {"medusa": MEDUSA, "eagle": EAGLE, "eagle3": EAGLE}.get(method, CHAIN)


@dataclass(frozen=True, slots=True)
class MethodCase:
    """One way to draft, judged on a group of sessions.

    Attributes:
        method: drafting method.
        where: its placement.
        shape: of its drafts.
        mode: how tokens are chosen.
        batch: sessions.
    """

    method: str
    where: Where
    shape: Shape
    mode: Mode
    batch: Batch

    @property
    def name(self) -> str:
        """For messages."""
        where, batch = self.where.value, self.batch.together
        return f"{self.method} in the {where}, {self.shape.name}, {self.mode.name}, {batch} at once"


@dataclass(frozen=True, slots=True)
class MethodReport:
    """What came of a case.

    Attributes:
        method, placement, shape, mode: of the case.
        batch: sessions at once.
        num_sessions: sessions in all.
        num_tokens: tokens compared.
        ids_equal: all tokens are those of plain decoding, near-ties excepted.
        drafted, accepted: draft tokens.
        tokens_per_pass: tokens per round of a session.
        near_ties: what was excused.
    """

    method: str
    placement: str
    shape: str
    mode: str
    batch: int
    num_sessions: int
    num_tokens: int
    ids_equal: bool
    drafted: int
    accepted: int
    tokens_per_pass: float
    near_ties: tuple[str, ...]

    @property
    def complaints(self) -> list[str]:
        """What did not happen and has to."""
        if self.accepted:
            return []
        what = f"{self.method} in the {self.placement}, {self.shape}, {self.mode}, {self.batch} at once"
        return [f"{what}: none of {self.drafted} drafts was accepted"]


def placements(method: str) -> tuple[Where, ...]:
    """Where a method can be."""
    return (Where.POOL, Where.VERIFIER) if method in SELF_DRAFT_METHODS else (Where.POOL,)


def cases(
    methods: Sequence[str], num_layers: int, *, heads: Mapping[str, Path], batches: Sequence[Batch] = BATCHES
) -> list[MethodCase]:
    """All cases of these methods, those of one method and placement one after the other.

    Args:
        methods: drafting methods; one that needs a head has no case without it.
        num_layers: of the target.
        heads: folder of the head of each method that needs one; layerskip has one where its target was trained for it.
        batches: sessions.
    """
    return [
        MethodCase(method, where, shape, mode, _cut(batch, shape))
        for method in methods
        if method in heads or method not in HEAD_METHODS
        for where in placements(method)
        for shape in shapes(method, num_layers, trained=method in heads)
        for mode in MODES
        for batch in batches
    ]


def _cut(batch: Batch, shape: Shape) -> Batch:
    if shape.num_nodes <= LARGE_TREE:
        return batch
    return Batch(batch.together, batch.num_sessions, batch.max_tokens // 2)
