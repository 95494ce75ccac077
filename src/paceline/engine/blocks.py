"""Cuts from a block what the target cannot judge. A cut block changes speed, never output."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.speculation.tree import DraftTree


@dataclass(frozen=True, slots=True)
class CutBlock:
    """What is left of a block.

    Attributes:
        tree: the part that is judged.
        sent_nodes: node i of `tree` is node sent_nodes[i] of the block as it was sent; sent_nodes[0] is 0.
    """

    tree: DraftTree
    sent_nodes: tuple[int, ...]

    def path_as_sent(self, path: tuple[int, ...]) -> tuple[int, ...]:
        """A path of `tree` in the node numbers of the block as it was sent."""
        return tuple(self.sent_nodes[node] for node in path)


def cut_block(block: DraftTree, *, vocab_size: int, max_nodes: int, max_depth: int) -> CutBlock:
    """Drops nodes whose id is no token, that are too deep or too many, with everything under them.

    Args:
        block: as it was sent.
        vocab_size: ids outside [0, vocab_size) are no tokens.
        max_nodes: most draft tokens; the first ones in the block's order stay.
        max_depth: deepest node that stays; 0 or less empties the block.
    """
    ids, count = block.tokens, block.num_draft_tokens
    if count <= max_nodes and block.max_depth <= max_depth and all(0 <= token < vocab_size for token in ids):
        return CutBlock(block, tuple(range(count + 1)))
    kept = {0: 0}
    tokens: list[int] = []
    parents: list[int] = []
    sent_nodes = [0]
    for index, (token, parent) in enumerate(zip(block.tokens, block.parents, strict=True)):
        node = index + 1
        fits = len(tokens) < max_nodes and block.depths[node] <= max_depth and 0 <= token < vocab_size
        if fits and parent in kept:
            tokens.append(token)
            parents.append(kept[parent])
            sent_nodes.append(node)
            kept[node] = len(tokens)
    return CutBlock(DraftTree(tuple(tokens), tuple(parents)), tuple(sent_nodes))
