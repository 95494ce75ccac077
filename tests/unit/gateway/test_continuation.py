from hypothesis import given
from hypothesis import strategies as st
from paceline_gateway.continuation import crop_nodes, descend, graft, main_path

from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

TREE = DraftTree.from_paths([[1, 2, 3], [1, 4], [5, 6]])


@st.composite
def trees(draw: st.DrawFn) -> DraftTree:
    paths = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), max_size=5))
    return DraftTree.from_paths(paths)


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Every path from the root as tokens; two trees with the same set are the same tree."""
    return {
        tuple(tree.token_of(ancestor) for ancestor in tree.ancestors(node)[1:])
        for node in range(1, tree.num_draft_tokens + 1)
    }


def test_main_path_follows_the_first_child() -> None:
    assert main_path(TREE) == (1, 2, 3)
    assert main_path(DraftTree.chain([7, 8])) == (7, 8)
    assert main_path(EMPTY_BLOCK) == ()


def test_descend_leaves_the_subtree() -> None:
    below = descend(TREE, [1])
    assert below is not None
    assert paths_of(below) == {(2,), (2, 3), (4,)}
    assert descend(TREE, [1, 4]) == EMPTY_BLOCK
    assert descend(TREE, [1, 9]) is None
    assert descend(TREE, [1, 4, 4]) is None
    assert descend(DraftTree.chain([1, 2]), [1, 2, 3]) is None


@given(trees(), st.lists(st.integers(0, 3), max_size=4))
def test_descend_keeps_exactly_the_paths_that_begin_with_the_tokens(tree: DraftTree, tokens: list[int]) -> None:
    start = tuple(tokens)
    expected = {path[len(start) :] for path in paths_of(tree) if path[: len(start)] == start and len(path) > len(start)}
    below = descend(tree, tokens)
    if below is None:
        assert start
        assert start not in paths_of(tree)
    else:
        assert paths_of(below) == expected


@given(trees(), trees())
def test_graft_extends_the_main_path(tree: DraftTree, block: DraftTree) -> None:
    path = main_path(tree)
    grafted = graft(tree, block)
    assert paths_of(grafted) == paths_of(tree) | {path + deeper for deeper in paths_of(block)}
    assert main_path(grafted) == path + main_path(block)


def test_crop_nodes_keeps_the_first() -> None:
    assert crop_nodes(TREE, 2).num_draft_tokens == 2
    assert crop_nodes(TREE, 99) is TREE
    assert crop_nodes(TREE, 0) == EMPTY_BLOCK
