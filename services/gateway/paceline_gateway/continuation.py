"""What is known beyond the committed tokens: a tree of draft tokens that may turn out to be the text's continuation.

The tree hangs under the pending token. A block is its top part, cut to the depth that a round allows; what lies below
was drafted ahead. When tokens are committed the tree is entered along them: either a subtree is left, which is the
next block at once, or nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.speculation.tree import DraftTree


def main_path(tree: DraftTree) -> tuple[int, ...]:
    """Tokens along the first child of every node: what a drafter that lists its best guess first thinks most likely."""
    if tree.is_chain:
        return tree.tokens
    path: list[int] = []
    node = 0
    for index, parent in enumerate(tree.parents):
        if parent == node:
            path.append(tree.tokens[index])
            node = index + 1
    return tuple(path)


def descend(tree: DraftTree, tokens: Sequence[int]) -> DraftTree | None:
    """The subtree that is left after the tokens.

    Returns:
        None when the tokens leave the tree; an empty block when they end at one of its leaves.
    """
    if tree.is_chain:
        if len(tokens) > len(tree.tokens) or tree.tokens[: len(tokens)] != tuple(tokens):
            return None
        return DraftTree.chain(tree.tokens[len(tokens) :])
    children = tree.children()
    root = 0
    for token in tokens:
        child = children[root].get(token)
        if child is None:
            return None
        root = child
    renumbered = {root: 0}
    kept_tokens: list[int] = []
    kept_parents: list[int] = []
    for index, parent in enumerate(tree.parents):
        if parent in renumbered:
            kept_tokens.append(tree.tokens[index])
            kept_parents.append(renumbered[parent])
            renumbered[index + 1] = len(kept_tokens)
    return DraftTree(tuple(kept_tokens), tuple(kept_parents))


def graft(tree: DraftTree, block: DraftTree) -> DraftTree:
    """The tree with the block hung under the end of its main path."""
    if not tree.tokens:
        return block
    if not block.tokens:
        return tree
    end = 0
    for index, parent in enumerate(tree.parents):
        if parent == end:
            end = index + 1
    offset = len(tree.tokens)
    parents = tuple(parent + offset if parent else end for parent in block.parents)
    return DraftTree(tree.tokens + block.tokens, tree.parents + parents)


def crop_nodes(tree: DraftTree, limit: int) -> DraftTree:
    """The tree's first `limit` nodes; parents come before children, so the rest can go."""
    if len(tree.tokens) <= limit:
        return tree
    return DraftTree(tree.tokens[:limit], tree.parents[:limit])
