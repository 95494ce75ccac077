"""A tail's tokens and what they were drawn from stay together, whatever is done to it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from paceline_gateway.tail import EMPTY_TAIL, Tail

from paceline.messages import AcceptanceRule, DraftProbs
from paceline.speculation.tree import DraftTree
from tests.unit.gateway.test_continuation import trees

RATIO, MATCH = AcceptanceRule.RATIO, AcceptanceRule.MATCH
TREE = DraftTree.from_paths([[1, 2, 3], [1, 4], [5, 6]])

Step = tuple[str, int, int, bool]
STEPS = st.tuples(st.sampled_from(["graft", "below", "top"]), st.integers(0, 5), st.integers(0, 5), st.booleans())


def probs_of(token: int, mark: float) -> DraftProbs:
    return DraftProbs((token, token + 1), (mark, 1 - mark))


def certain(token: int) -> DraftProbs:
    return DraftProbs((token,), (1.0,))


def entry_of(tail: Tail, index: int) -> DraftProbs:
    """What a draft was drawn from; certain where nothing is said."""
    return tail.draft_probs[index] if tail.draft_probs else certain(tail.tokens[index])


@given(st.lists(STEPS, max_size=12))
def test_tokens_and_probabilities_stay_side_by_side(steps: list[Step]) -> None:
    """Against a plain list of pairs. Tokens are all different, so nothing can be mistaken for its neighbour."""
    tail, pairs, next_token = EMPTY_TAIL, list[tuple[int, DraftProbs]](), 0
    for action, first, second, sampled in steps:
        if action == "graft":
            tokens = range(next_token, next_token + first)
            next_token += first
            entries = [probs_of(token, 0.25 + token / 1000) if sampled else certain(token) for token in tokens]
            told = tuple(entries) if sampled else ()
            tail = tail.grafted(Tail.drafted(DraftTree.chain(tokens), told, RATIO))
            pairs += zip(tokens, entries, strict=True)
        elif action == "below":
            below = tail.below([token for token, _ in pairs[:first]])
            assert below is not None
            assert tail.below([*[token for token, _ in pairs[:first]], next_token]) is None
            tail, pairs = below, pairs[first:]
        else:
            tail, pairs = tail.top(first, second), pairs[: min(first, second)]
        assert tail.tree == DraftTree.chain([token for token, _ in pairs])
        assert len(tail.draft_probs) in (0, tail.num_draft_tokens)
        assert [entry_of(tail, index) for index in range(len(pairs))] == [entry for _, entry in pairs]


@given(trees(), trees(), st.integers(0, 4), st.integers(0, 6))
def test_under_match_a_tail_is_a_tree_and_says_nothing_of_probabilities(
    first: DraftTree, second: DraftTree, depth: int, nodes: int
) -> None:
    told = tuple([certain(token) for token in first.tokens])
    tail = Tail.drafted(first, told, MATCH).grafted(Tail.drafted(second, (), MATCH))
    block = tail.top(depth, nodes)
    assert (tail.draft_probs, block.draft_probs) == ((), ())
    assert block.tree.max_depth <= depth
    assert block.num_draft_tokens <= nodes
    if first.tokens:
        assert tail.tree.tokens[: len(first.tokens)] == first.tokens


def test_ratio_takes_the_main_path_of_a_tree() -> None:
    assert Tail.drafted(TREE, (), MATCH).tree == TREE
    assert Tail.drafted(TREE, (), RATIO) == Tail(DraftTree.chain([1, 2, 3]))


def test_certain_drafts_beside_drawn_ones_are_spelled_out() -> None:
    plain = Tail(DraftTree.chain([1, 2]))
    drawn = Tail(DraftTree.chain([3]), (probs_of(3, 0.5),))
    assert plain.grafted(plain).draft_probs == ()
    assert plain.grafted(drawn).draft_probs == (certain(1), certain(2), probs_of(3, 0.5))
    assert drawn.grafted(plain).draft_probs == (probs_of(3, 0.5), certain(1), certain(2))
