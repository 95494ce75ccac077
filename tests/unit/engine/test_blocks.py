"""Cutting blocks: what stays is judged, and named as it was sent."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.engine.blocks import cut_block
from paceline.speculation.tree import DraftTree


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    paths = draw(st.lists(st.lists(st.integers(-2, 9), min_size=1, max_size=5), max_size=5))
    return DraftTree.from_paths(paths)


def test_a_block_that_fits_is_left_alone() -> None:
    block = DraftTree.chain([1, 2, 3])
    cut = cut_block(block, vocab_size=8, max_nodes=3, max_depth=3)
    assert cut.tree is block
    assert cut.path_as_sent((1, 2)) == (1, 2)


def test_a_node_that_is_no_token_goes_with_all_under_it() -> None:
    # 1 -> 9 (no token) -> 2, and 1 -> 3
    block = DraftTree((1, 9, 2, 3), (0, 1, 2, 1))
    cut = cut_block(block, vocab_size=9, max_nodes=10, max_depth=10)
    assert cut.tree == DraftTree((1, 3), (0, 1))
    assert cut.path_as_sent((1, 2)) == (1, 4)


def test_no_depth_left_empties_the_block() -> None:
    for depth in (0, -3):
        assert cut_block(DraftTree.chain([1]), vocab_size=9, max_nodes=9, max_depth=depth).tree == DraftTree()


@given(block=trees(), vocab_size=st.integers(1, 10), max_nodes=st.integers(0, 8), max_depth=st.integers(-1, 5))
def test_what_stays_is_a_legal_part_of_what_was_sent(
    block: DraftTree, vocab_size: int, max_nodes: int, max_depth: int
) -> None:
    cut = cut_block(block, vocab_size=vocab_size, max_nodes=max_nodes, max_depth=max_depth)
    tree = cut.tree
    assert tree.num_draft_tokens <= max_nodes
    assert tree.max_depth <= max(max_depth, 0)
    assert all(0 <= token < vocab_size for token in tree.tokens)
    for node in range(1, tree.num_draft_tokens + 1):
        sent = cut.sent_nodes[node]
        assert block.token_of(sent) == tree.token_of(node)
        assert cut.path_as_sent(tuple(tree.ancestors(node))) == tuple(block.ancestors(sent))
    # Nothing that would fit was dropped.
    legal = [
        node
        for node in range(1, block.num_draft_tokens + 1)
        if block.depths[node] <= max_depth
        and all(0 <= block.token_of(above) < vocab_size for above in block.ancestors(node)[1:])
    ]
    assert list(cut.sent_nodes[1:]) == legal[:max_nodes]
