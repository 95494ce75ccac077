"""How drafts grow, without a model."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.eagle.growth import Candidate, Grown, Growth
from paceline.speculation.tree import DraftTree

CHANCES = st.floats(0.0, 1.0)


def candidates(*chances: float) -> list[Candidate]:
    return [Candidate(token, chance, chance) for token, chance in enumerate(chances)]


def tree_of(grown: Grown) -> DraftTree:
    return DraftTree(tuple(grown.tokens), tuple(grown.parents))


def test_the_best_nodes_by_cumulative_chance_are_kept_best_first() -> None:
    growth = Growth(width=2, num_nodes=5, max_depth=2)
    growth.grow([candidates(0.6, 0.3)])
    assert growth.frontier == [1, 2]
    growth.grow([candidates(0.9, 0.05), candidates(0.8, 0.2)])
    assert growth.done
    grown = growth.grown()
    # .6, then .6 x .9, .3, .3 x .8, .3 x .2
    assert grown.tokens == [0, 0, 1, 0, 1]
    assert grown.parents == [0, 1, 0, 3, 3]
    assert grown.confidences == [0.6, 0.9, 0.3, 0.8, 0.2]


def test_a_draft_takes_no_more_candidates_than_its_width() -> None:
    growth = Growth(width=1, num_nodes=2, max_depth=2)
    growth.grow([candidates(0.6, 0.3, 0.1)])  # as many as the widest draft beside it wants
    growth.grow([candidates(0.2, 0.1)])
    grown = growth.grown()
    assert (grown.tokens, grown.parents) == ([0, 0], [0, 1])


def test_only_the_best_nodes_of_a_level_are_expanded() -> None:
    growth = Growth(width=2, num_nodes=100, max_depth=3)
    growth.grow([candidates(0.6, 0.3)])
    growth.grow([candidates(0.9, 0.8), candidates(0.5, 0.4)])
    assert [growth.path(node) for node in growth.frontier] == [[1, 3], [1, 4]]


def test_nodes_that_cannot_be_kept_are_not_expanded() -> None:
    growth = Growth(width=2, num_nodes=2, max_depth=4)
    growth.grow([candidates(0.9, 0.01)])
    growth.grow([candidates(0.9, 0.1), candidates(0.9, 0.1)])
    assert [growth.path(node) for node in growth.frontier] == [[1, 3]]
    growth.grow([candidates(0.1, 0.1)])
    assert growth.done  # deeper nodes are no better than these
    assert growth.grown().tokens == [0, 0]


def test_a_node_without_candidates_ends_its_branch() -> None:
    growth = Growth(width=2, num_nodes=8, max_depth=3)
    growth.grow([candidates(0.5, 0.5)])
    growth.grow([[], candidates(0.5)])
    assert [growth.path(node) for node in growth.frontier] == [[2, 3]]
    growth.grow([[]])
    assert growth.done
    assert growth.grown().parents == [0, 0, 2]


@given(st.data(), st.integers(1, 4), st.integers(1, 12), st.integers(1, 4))
@settings(max_examples=60)
def test_what_is_kept_is_the_best_tree_and_every_beginning_of_it(
    data: st.DataObject, width: int, num_nodes: int, max_depth: int
) -> None:
    """Against all nodes that would have been grown without leaving any out."""
    chances: dict[tuple[int, ...], list[float]] = {}

    def after(path: Sequence[int]) -> list[Candidate]:
        found = chances.get(tuple(path))
        if found is None:
            drawn = data.draw(st.lists(CHANCES, min_size=width, max_size=width))
            found = chances[tuple(path)] = sorted(drawn, reverse=True)
        return candidates(*found)

    growth = Growth(width, num_nodes, max_depth)
    while not growth.done:
        growth.grow([after([growth.token(node) for node in growth.path(node)]) for node in growth.frontier])
    grown = growth.grown()
    tree = tree_of(grown)  # raises where a child comes before its parent, or siblings are equal
    assert tree.max_depth <= max_depth
    for node, children in enumerate(tree.children()):
        # The first child is the best one: the main path, whatever is cut off behind it.
        ranked = [grown.confidences[child - 1] for child in sorted(children.values())]
        assert ranked == sorted(ranked, reverse=True), node
    full = Growth(width, 10_000, max_depth)
    while not full.done:
        full.grow([after([full.token(node) for node in full.path(node)]) for node in full.frontier])
    assert _score(grown) >= _score(full.grown(), num_nodes) - 1e-9


def _score(grown: Grown, num_nodes: int = 10_000) -> float:
    """Expected accepted drafts of the first nodes: the sum of their cumulative chances."""
    scores = [1.0]
    for parent, chance in zip(grown.parents[:num_nodes], grown.confidences[:num_nodes], strict=True):
        scores.append(scores[parent] * chance)
    return math.fsum(scores[1:])
