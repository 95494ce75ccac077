"""How a draft grows: level by level from the nodes that are most likely accepted, then the best of all nodes are kept.

This is the dynamic tree of EAGLE-2 (arXiv 2406.16858). A node's score is the sum of log-chances from the root down, so
no node is better than its parent, and the best nodes always form a tree. A chain is the tree of one candidate per node.

| level | its nodes |
|---|---|
| 1 | the `width` best candidates after the context |
| d + 1 | the `width` best candidates of each of the `width` best nodes of level d |

Pure Python; what gives the candidates is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_LEAST_CHANCE = 1e-30


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that may follow a node.

    Attributes:
        token: its id.
        confidence: the head's own probability of it.
        chance: how likely the target chooses it, for ranking: in (0, 1].
    """

    token: int
    confidence: float
    chance: float


@dataclass(frozen=True, slots=True)
class Grown:
    """The nodes of a draft that are kept, best first; a node comes after its parent.

    Attributes:
        tokens: token of node i + 1.
        parents: parent node of node i + 1; 0 is the root.
        confidences: the head's own probability of each.
    """

    tokens: list[int]
    parents: list[int]
    confidences: list[float]


@dataclass(slots=True)
class Growth:
    """A draft in the making.

    Attributes:
        width: candidates per node, and nodes of a level that are expanded.
        num_nodes: how many are kept in the end.
        max_depth: levels.
        frontier: nodes whose candidates come next; empty when it is done. It begins with the root, node 0.
        depth: of the frontier.
    """

    width: int
    num_nodes: int
    max_depth: int
    frontier: list[int] = field(default_factory=lambda: [0])
    depth: int = 0
    _tokens: list[int] = field(default_factory=lambda: [-1])
    _parents: list[int] = field(default_factory=lambda: [-1])
    _scores: list[float] = field(default_factory=lambda: [0.0])
    _confidences: list[float] = field(default_factory=lambda: [1.0])

    @property
    def done(self) -> bool:
        """Whether it is fully grown."""
        return not self.frontier

    def token(self, node: int) -> int:
        """Token of a node other than the root."""
        return self._tokens[node]

    def parent(self, node: int) -> int:
        """Parent of a node other than the root."""
        return self._parents[node]

    def path(self, node: int) -> list[int]:
        """Nodes from below the root down to a node, itself included; empty for the root."""
        path = []
        while node:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def grow(self, candidates: Sequence[Sequence[Candidate]]) -> None:
        """Adds a level: per node of the frontier, in order, its candidates, best first."""
        first_new = len(self._tokens)
        for node, found in zip(self.frontier, candidates, strict=True):
            for candidate in found[: self.width]:
                self._tokens.append(candidate.token)
                self._parents.append(node)
                self._scores.append(self._scores[node] + math.log(min(max(candidate.chance, _LEAST_CHANCE), 1.0)))
                self._confidences.append(candidate.confidence)
        self.depth += 1
        if self.depth >= self.max_depth:
            self.frontier = []
            return
        # A node that is not among the best now never will be, and nothing under it: the others only become better.
        kept = set(self._best())
        level = sorted(range(first_new, len(self._tokens)), key=self._rank)[: self.width]
        self.frontier = [node for node in level if node in kept]

    def grown(self) -> Grown:
        """What is kept of it."""
        nodes = self._best()
        number = {0: 0} | {node: index + 1 for index, node in enumerate(nodes)}
        return Grown(
            [self._tokens[node] for node in nodes],
            [number[self._parents[node]] for node in nodes],
            [self._confidences[node] for node in nodes],
        )

    def _best(self) -> list[int]:
        """The nodes that would be kept now, best first; among equals the older ones, so parents before children."""
        return sorted(range(1, len(self._tokens)), key=self._rank)[: self.num_nodes]

    def _rank(self, node: int) -> tuple[float, int]:
        return (-self._scores[node], node)
