from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.tree_shape import DEFAULT_ACCURACIES, MAX_NODES, Accuracies, TreeShape
from paceline.errors import ConfigurationError

ACCURACIES: Accuracies = ((0.6, 0.2, 0.1), (0.5, 0.3), (0.4,))


def gain(shape: TreeShape, accuracies: Accuracies) -> float:
    """Expected accepted drafts of a tree."""
    total = 0.0
    for node in shape.nodes:
        reached = 1.0
        for head, rank in enumerate(node):
            reached *= accuracies[head][rank]
        total += reached
    return total


class TestBuilders:
    def test_chain(self) -> None:
        assert TreeShape.chain(3).nodes == ((0,), (0, 0), (0, 0, 0))

    def test_classic_tree(self) -> None:
        shape = TreeShape.classic_63()
        assert len(shape.nodes) == 63
        assert shape.max_depth == 4
        assert shape.num_ranks == 10
        by_depth = [sum(len(node) == depth for node in shape.nodes) for depth in range(1, 5)]
        assert by_depth == [10, 28, 23, 2]
        assert {(9,), (9, 0), (0, 9), (0, 0, 9), (0, 7, 0), (0, 0, 0, 1), (1, 6)} <= set(shape.nodes)

    def test_greedy_gain_by_hand(self) -> None:
        # products: 0 .6, 0.0 .3, 1 .2, 0.1 .18, 0.0.0 .12, 1.0 .1, 2 .1
        shape = TreeShape.from_accuracies(ACCURACIES, 7)
        assert str(shape) == "0,0.0,1,0.1,0.0.0,2,1.0"

    @pytest.mark.parametrize("num_nodes", [1, 2, 3, 4, 5])
    def test_no_tree_of_that_size_gains_more(self, num_nodes: int) -> None:
        """Against every set of nodes that is closed under parents."""
        all_nodes = [
            ranks
            for depth in range(1, 4)
            for ranks in itertools.product(*(range(len(ACCURACIES[head])) for head in range(depth)))
        ]
        best = 0.0
        for chosen in itertools.combinations(all_nodes, num_nodes):
            if all(len(node) == 1 or node[:-1] in chosen for node in chosen):
                best = max(best, gain(TreeShape(tuple(sorted(chosen))), ACCURACIES))
        assert gain(TreeShape.from_accuracies(ACCURACIES, num_nodes), ACCURACIES) == pytest.approx(best)

    def test_first_nodes_are_the_smaller_tree(self) -> None:
        large = TreeShape.from_accuracies(DEFAULT_ACCURACIES, 40)
        for num_nodes in (1, 5, 16):
            assert large.crop(9, num_nodes) == TreeShape.from_accuracies(DEFAULT_ACCURACIES, num_nodes)

    def test_more_nodes_than_there_are(self) -> None:
        assert len(TreeShape.from_accuracies(((0.5, 0.2), (0.5,)), 100).nodes) == 4

    @settings(max_examples=50)
    @given(st.lists(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=5), min_size=1, max_size=4), st.integers(1, 40))
    def test_measured_accuracies_may_be_anything(self, accuracies: list[list[float]], num_nodes: int) -> None:
        """Even a second candidate that is right more often than the first."""
        shape = TreeShape.from_accuracies(accuracies, num_nodes)
        for node in shape.nodes:
            assert node[-1] == 0 or (*node[:-1], node[-1] - 1) in shape.nodes


class TestText:
    @pytest.mark.parametrize(
        ("text", "shape"),
        [
            ("chain:2", TreeShape.chain(2)),
            ("classic_63", TreeShape.classic_63()),
            ("derived:5", TreeShape.from_accuracies(ACCURACIES, 5)),
            (" 0,1,0.0 ", TreeShape(((0,), (1,), (0, 0)))),
        ],
    )
    def test_forms(self, text: str, shape: TreeShape) -> None:
        assert TreeShape.parse(text, ACCURACIES) == shape
        assert TreeShape.parse(str(shape)) == shape

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "chain",
            "chain:0",
            "chain:x",
            f"derived:{MAX_NODES + 1}",
            "classic",
            "0,a",
            "0,,1",
            "-1",
            "0,0",
            "0.0",
            "1,0",
            f"0,{MAX_NODES}",
        ],
    )
    def test_anything_else_is_refused(self, text: str) -> None:
        with pytest.raises(ConfigurationError) as raised:
            TreeShape.parse(text)
        assert raised.value.field == "tree"


class TestCrop:
    def test_by_depth_and_by_nodes(self) -> None:
        shape = TreeShape.parse("0,0.0,0.0.0,1,1.0")
        assert str(shape.crop(2)) == "0,0.0,1,1.0"
        assert str(shape.crop(2, 3)) == "0,0.0,1"
        assert shape.crop(9) == shape

    def test_no_nodes_is_no_shape(self) -> None:
        with pytest.raises(ConfigurationError):
            TreeShape(())
