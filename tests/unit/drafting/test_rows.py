from hypothesis import given
from hypothesis import strategies as st

from paceline.drafting.rows import rows_to_keep

_tokens = st.lists(st.integers(0, 2), max_size=8)


@given(_tokens, _tokens.filter(bool))
def test_kept_rows_are_right_and_one_token_is_left_to_feed(fed: list[int], context: list[int]) -> None:
    keep = rows_to_keep(fed, context)
    assert fed[:keep] == context[:keep]
    assert 0 <= keep < len(context)


@given(_tokens, _tokens.filter(bool))
def test_as_many_rows_as_possible_are_kept(fed: list[int], context: list[int]) -> None:
    keep = rows_to_keep(fed, context)
    assert keep == len(context) - 1 or keep == len(fed) or fed[keep] != context[keep]


def test_the_three_outcomes_of_a_block() -> None:
    # Context [0..9] drafted 20, 21, 22; the last draft was never fed.
    fed = [*range(10), 20, 21]
    assert rows_to_keep(fed, [*range(10), 5]) == 10  # none accepted: feed the target's own token
    assert rows_to_keep(fed, [*range(10), 20, 5]) == 11  # one accepted
    assert rows_to_keep(fed, [*range(10), 20, 21, 22, 5]) == 12  # all accepted: feed the last draft and the bonus
    assert rows_to_keep(fed, tuple(range(10))) == 9  # the same context again
    assert rows_to_keep([], [1]) == 0
