import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidArgument
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

PATHS = st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6)


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """The path of every node below the root, by the definition of parents."""
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


def prefixes(paths: list[list[int]]) -> set[tuple[int, ...]]:
    return {tuple(path[:length]) for path in paths for length in range(1, len(path) + 1)}


class TestFromPaths:
    def test_siblings_of_the_glossary(self) -> None:
        a, b, c, d, e, f = range(6)
        tree = DraftTree.from_paths([[a, b], [a, c], [a, d], [e, f]])
        assert tree == DraftTree((a, b, c, d, e, f), (0, 1, 1, 1, 0, 5))
        assert tree.depths == (0, 1, 2, 2, 2, 1, 2)

    @given(PATHS)
    def test_holds_every_prefix_once(self, paths: list[list[int]]) -> None:
        nodes = paths_of(DraftTree.from_paths(paths))
        assert len(nodes) == len(set(nodes))
        assert set(nodes) == prefixes(paths)

    @given(st.lists(st.integers(0, 9), max_size=8))
    def test_one_path_is_a_chain(self, path: list[int]) -> None:
        tree = DraftTree.from_paths([path])
        assert tree == DraftTree.chain(path)
        assert tree.is_chain
        assert tree.max_depth == tree.num_draft_tokens == len(path)

    @given(PATHS)
    def test_is_a_chain_exactly_when_each_path_extends_another(self, paths: list[list[int]]) -> None:
        longest = max(paths, key=len, default=[])
        extends = all(longest[: len(path)] == path for path in paths)
        assert DraftTree.from_paths(paths).is_chain == extends


class TestGeometry:
    @given(PATHS)
    def test_depths_and_ancestors(self, paths: list[list[int]]) -> None:
        tree = DraftTree.from_paths(paths)
        for node, path in enumerate([(), *paths_of(tree)]):
            line = tree.ancestors(node)
            assert line[0] == 0
            assert line[-1] == node
            assert len(line) - 1 == tree.depths[node] == len(path)
            assert tuple(tree.token_of(n) for n in line[1:]) == path
            assert all(tree.parents[child - 1] == parent for parent, child in itertools.pairwise(line))
        assert tree.max_depth == max(tree.depths)

    @given(PATHS)
    def test_children_are_the_inverse_of_parents(self, paths: list[list[int]]) -> None:
        tree = DraftTree.from_paths(paths)
        edges = {(parent, token, node) for parent, kids in enumerate(tree.children()) for token, node in kids.items()}
        assert edges == {(p, t, i + 1) for i, (t, p) in enumerate(zip(tree.tokens, tree.parents, strict=True))}
        assert len(tree.children()) == 1 + tree.num_draft_tokens

    def test_empty_block(self) -> None:
        assert EMPTY_BLOCK.num_draft_tokens == EMPTY_BLOCK.max_depth == 0
        assert EMPTY_BLOCK.is_chain
        assert EMPTY_BLOCK.ancestors(0) == [0]
        assert EMPTY_BLOCK.children() == [{}]


class TestCropDepth:
    @given(PATHS, st.integers(0, 6))
    def test_keeps_exactly_what_is_not_deeper(self, paths: list[list[int]], limit: int) -> None:
        tree = DraftTree.from_paths(paths)
        cropped = tree.crop_depth(limit)
        assert paths_of(cropped) == [path for path in paths_of(tree) if len(path) <= limit]
        assert cropped.max_depth <= limit

    @given(PATHS)
    def test_is_the_tree_itself_when_nothing_is_cut(self, paths: list[list[int]]) -> None:
        tree = DraftTree.from_paths(paths)
        assert tree.crop_depth(tree.max_depth) is tree


class TestValidation:
    @pytest.mark.parametrize("parents", [(0, 2), (0, -1), (1, 0), (0, 5)])
    def test_parent_must_come_before_its_child(self, parents: tuple[int, ...]) -> None:
        with pytest.raises(InvalidArgument, match=r"names parent -?\d; it must be in \[0, [01]\]") as caught:
            DraftTree((1, 2), parents)
        assert caught.value.field == "block.parents"

    def test_siblings_must_differ(self) -> None:
        with pytest.raises(InvalidArgument, match="block node 3 repeats token 7 under parent 1") as caught:
            DraftTree((5, 7, 7), (0, 1, 1))
        assert caught.value.field == "block.tokens"

    def test_cousins_may_be_equal(self) -> None:
        assert DraftTree((5, 6, 7, 7), (0, 0, 1, 2)).depths == (0, 1, 1, 2, 2)

    @pytest.mark.parametrize(("tokens", "parents"), [((1, 2), (0,)), ((), (0,)), ((1,), ())])
    def test_one_parent_per_token(self, tokens: tuple[int, ...], parents: tuple[int, ...]) -> None:
        with pytest.raises(InvalidArgument, match=f"{len(tokens)} tokens but {len(parents)} parents"):
            DraftTree(tokens, parents)

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 8)), max_size=8))
    def test_any_lists_are_refused_or_make_a_tree(self, nodes: list[tuple[int, int]]) -> None:
        tokens = tuple(token for token, _ in nodes)
        parents = tuple(parent for _, parent in nodes)
        sound = all(0 <= parent <= index for index, parent in enumerate(parents)) and len(set(nodes)) == len(nodes)
        if sound:
            assert len(set(paths_of(DraftTree(tokens, parents)))) == len(nodes)
        else:
            with pytest.raises(InvalidArgument):
                DraftTree(tokens, parents)
