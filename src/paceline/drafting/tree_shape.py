"""Shapes of draft trees that are fixed before a token is known. Pure Python.

A node is the tuple of ranks on the way to it: (0, 1, 0) hangs under (0, 1) and holds the best candidate of depth 3,
below the second best of depth 2, below the best of depth 1. Nodes are in topological order and siblings in order of
rank, so the first child of a node is its best. The builders put nodes that gain more first, so that the first N nodes
are a good tree of N nodes.

    chain:4                      each depth's best candidate
    classic_63                   the tree that the first public Medusa heads came with
    derived:16                   16 nodes by the accuracies of the heads
    0,1,0.0,0.1,1.0,0.0.0        spelled out

Source of trees by greedy expected gain: Medusa (Cai et al. 2024, arXiv 2401.10774), section 2.3.3.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import ConfigurationError

DEFAULT_MEDUSA_TREE = "derived:16"

Node = tuple[int, ...]
Accuracies = Sequence[Sequence[float]]
"""`accuracies[head][rank]`: how often the head's candidate of that rank is the token that the target writes."""

MAX_NODES = 512
"""Most nodes of a shape; a verify pass of more would cost more than it can gain."""

DEFAULT_ACCURACIES: Accuracies = (
    (0.55, 0.12, 0.06, 0.04, 0.03, 0.02, 0.015, 0.012, 0.010, 0.008),
    (0.35, 0.10, 0.05, 0.04, 0.03, 0.02, 0.015, 0.012, 0.010, 0.008),
    (0.25, 0.08, 0.05, 0.03, 0.02, 0.02, 0.015, 0.012, 0.010, 0.008),
    (0.18, 0.07, 0.04, 0.03, 0.02, 0.02, 0.015, 0.012, 0.010, 0.008),
)
"""For heads that nobody measured: an assumption about the accuracy of small heads, not a measurement."""

_CLASSIC_63 = (
    "0,0.0,1,0.1,2,0.0.0,1.0,0.2,3,0.3,4,0.4,2.0,0.5,0.0.1,5,0.6,6,0.7,0.1.0,1.1,7,0.8,0.0.2,3.0,0.9,8,9,1.0.0,0.2.0,"
    "1.2,0.0.3,4.0,2.1,0.0.4,0.0.5,0.0.0.0,0.1.1,0.0.6,0.3.0,5.0,1.3,0.0.7,0.0.8,0.0.9,6.0,0.4.0,1.4,7.0,0.1.2,2.0.0,"
    "3.1,2.2,8.0,0.5.0,1.5,1.0.1,0.2.1,9.0,0.6.0,0.0.0.1,1.6,0.7.0"
)
"""The nodes named `mc_sim_7b_63` at github.com/FasterDecoding/Medusa, in their order."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A tree of ranks.

    Attributes:
        nodes: at least one; parents before children, siblings in order of rank.

    Raises:
        ConfigurationError: the nodes are no such tree.
    """

    nodes: tuple[Node, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.nodes) <= MAX_NODES:
            raise ConfigurationError(f"a tree needs 1 to {MAX_NODES} nodes, not {len(self.nodes)}", field="tree")
        last_rank: dict[Node, int] = {}  # of the children of each node that may have children
        known: set[Node] = {()}
        for node in self.nodes:
            if not node or min(node) < 0:
                raise ConfigurationError(f"{node} is no node: give one rank of 0 or more per depth", field="tree")
            if max(node) >= MAX_NODES:
                raise ConfigurationError(f"node {_text_of(node)}: ranks must be below {MAX_NODES}", field="tree")
            above, rank = node[:-1], node[-1]
            if above not in known:
                raise ConfigurationError(f"node {_text_of(node)} must come after {_text_of(above)}", field="tree")
            if rank <= last_rank.get(above, -1):
                raise ConfigurationError(
                    f"node {_text_of(node)} is there twice or comes after a sibling of higher rank", field="tree"
                )
            last_rank[above] = rank
            known.add(node)

    @classmethod
    def chain(cls, depth: int) -> TreeShape:
        """Each depth's best candidate."""
        return cls(tuple((0,) * length for length in range(1, depth + 1)))

    @classmethod
    def classic_63(cls) -> TreeShape:
        """The tree of 63 nodes and depth 4 that the first public Medusa heads came with."""
        return cls(_nodes_of(_CLASSIC_63))

    @classmethod
    def from_accuracies(cls, accuracies: Accuracies, num_nodes: int) -> TreeShape:
        """The tree that is accepted furthest on average, if heads are right independently of each other.

        Node by node, always the one that is reached most often: the product of the accuracies on the way to it. So the
        first N nodes are the tree of N nodes.

        Args:
            accuracies: one row per head, each at least one number.
            num_nodes: nodes; fewer if there are not as many.
        """
        nodes: list[Node] = []
        waiting: list[tuple[float, int, Node]] = []

        def offer(node: Node, gain_above: float) -> None:
            head, rank = len(node) - 1, node[-1]
            if head < len(accuracies) and rank < len(accuracies[head]):
                heapq.heappush(waiting, (-gain_above * accuracies[head][rank], len(node), node))

        gain_above: dict[Node, float] = {(): 1.0}
        offer((0,), 1.0)
        while waiting and len(nodes) < num_nodes:
            negative_gain, _, node = heapq.heappop(waiting)
            nodes.append(node)
            gain_above[node] = -negative_gain
            offer((*node, 0), -negative_gain)
            offer((*node[:-1], node[-1] + 1), gain_above[node[:-1]])
        return cls(tuple(nodes))

    @classmethod
    def parse(cls, text: str, accuracies: Accuracies = DEFAULT_ACCURACIES) -> TreeShape:
        """Reads a setting; the forms are in the docstring of the module.

        Args:
            text: `chain:N`, `classic_63`, `derived:N` or the nodes.
            accuracies: what `derived` goes by.

        Raises:
            ConfigurationError: it is none of these.
        """
        name, _, count = text.strip().partition(":")
        try:
            if name in ("chain", "derived") and 1 <= int(count) <= MAX_NODES:
                return cls.chain(int(count)) if name == "chain" else cls.from_accuracies(accuracies, int(count))
            if text.strip() == "classic_63":
                return cls.classic_63()
            return cls(_nodes_of(text))
        except ValueError:
            raise ConfigurationError(
                f"tree is {text!r}; it must be chain:N, classic_63, derived:N with N from 1 to {MAX_NODES}, "
                "or nodes such as 0,1,0.0",
                field="tree",
            ) from None

    def __str__(self) -> str:
        """The nodes, as `parse` reads them."""
        return ",".join(_text_of(node) for node in self.nodes)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node."""
        return max(len(node) for node in self.nodes)

    @property
    def num_ranks(self) -> int:
        """Candidates that are needed of each depth: one more than the highest rank."""
        return 1 + max(max(node) for node in self.nodes)

    def crop(self, max_depth: int, max_nodes: int = MAX_NODES) -> TreeShape:
        """The first `max_nodes` nodes of those that are not deeper than `max_depth`. Both at least 1."""
        return TreeShape(tuple([node for node in self.nodes if len(node) <= max_depth][:max_nodes]))


def _nodes_of(text: str) -> tuple[Node, ...]:
    """Raises ValueError where a rank is no number."""
    return tuple(tuple(int(rank) for rank in node.split(".")) for node in text.split(","))


def _text_of(node: Node) -> str:
    return ".".join(map(str, node))
