"""A block of draft tokens as a tree. Pure Python: the gateway uses it without torch.

Node 0 is the pending token; node i + 1 holds `tokens[i]` and hangs under node `parents[i]`, which is always smaller
than i + 1 (topological order). Siblings never share a token. A chain is a tree in which each node hangs under the one
before it.

Follows the tree attention of SpecInfer and Medusa: a node sees all committed rows, its ancestors and itself, and its
position is the pending token's plus its depth, whatever its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from paceline.errors import InvalidArgument


@lru_cache(maxsize=256)
def _first_numbers(count: int) -> tuple[int, ...]:
    """0, 1, 2, ...: the parents of a chain of so many drafts, and the depths of its nodes."""
    return tuple(range(count))


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Draft tokens under the pending token.

    Attributes:
        tokens: token of node i + 1.
        parents: parent node of node i + 1.
        depths: depth of every node, root included (depth 0).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise InvalidArgument(f"block has {len(self.tokens)} tokens but {len(self.parents)} parents", field="block")
        if self.is_chain:
            object.__setattr__(self, "depths", _first_numbers(len(self.parents) + 1))
            return
        depths = [0]
        seen: set[tuple[int, int]] = set()
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not 0 <= parent <= index:
                raise InvalidArgument(
                    f"block node {index + 1} names parent {parent}; it must be in [0, {index}]", field="block.parents"
                )
            if (parent, token) in seen:
                raise InvalidArgument(
                    f"block node {index + 1} repeats token {token} under parent {parent}", field="block.tokens"
                )
            seen.add((parent, token))
            depths.append(depths[parent] + 1)
        object.__setattr__(self, "depths", tuple(depths))

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> DraftTree:
        """The tree in which each token follows the one before it."""
        return cls(tuple(tokens), _first_numbers(len(tokens)))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> DraftTree:
        """The smallest tree that holds every path; common prefixes are shared."""
        tokens: list[int] = []
        parents: list[int] = []
        nodes: dict[tuple[int, int], int] = {}
        for path in paths:
            parent = 0
            for token in path:
                node = nodes.get((parent, token))
                if node is None:
                    tokens.append(token)
                    parents.append(parent)
                    node = nodes[(parent, token)] = len(tokens)
                parent = node
        return cls(tuple(tokens), tuple(parents))

    @property
    def num_draft_tokens(self) -> int:
        """Number of nodes without the root."""
        return len(self.tokens)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; 0 for an empty block."""
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        """Whether each node hangs under the one before it."""
        return self.parents == _first_numbers(len(self.parents))

    def token_of(self, node: int) -> int:
        """Draft token of a node other than the root."""
        return self.tokens[node - 1]

    def children(self) -> list[dict[int, int]]:
        """For every node the map from a child's token to the child's node."""
        maps: list[dict[int, int]] = [{} for _ in range(len(self.tokens) + 1)]
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            maps[parent][token] = index + 1
        return maps

    def ancestors(self, node: int) -> list[int]:
        """Nodes from the root down to `node`, both included."""
        path = [node]
        while node:
            node = self.parents[node - 1]
            path.append(node)
        return path[::-1]

    def crop_depth(self, limit: int) -> DraftTree:
        """The tree without nodes deeper than `limit`."""
        if self.max_depth <= limit:
            return self
        renumbered = {0: 0}
        tokens: list[int] = []
        parents: list[int] = []
        for index, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if self.depths[index + 1] <= limit:
                tokens.append(token)
                parents.append(renumbered[parent])
                renumbered[index + 1] = len(tokens)
        return DraftTree(tuple(tokens), tuple(parents))


EMPTY_BLOCK = DraftTree()
"""No drafts: a plain decoding step."""
