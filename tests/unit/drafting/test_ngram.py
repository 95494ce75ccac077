from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.drafting.method import DraftJob
from paceline.drafting.ngram import NgramIndex, NgramMethod
from paceline.errors import ConfigurationError
from tests.unit.drafting.rounds import GREEDY, draft


def propose(context: list[int], depth: int = 4, shortest: int = 2, longest: int = 3) -> list[int]:
    method = NgramMethod(shortest, longest)
    method.open("s")
    return draft(method, "s", context, depth).tokens


def by_definition(context: list[int], depth: int, shortest: int, longest: int) -> list[int]:
    """Longest suffix first, most recent earlier occurrence, continued over its own end."""
    for length in range(longest, shortest - 1, -1):
        if length > len(context):
            continue
        for end in range(len(context) - 2, length - 2, -1):
            if context[end + 1 - length : end + 1] == context[-length:]:
                text = list(context)
                for _ in range(depth):
                    text.append(text[end + 1 + len(text) - len(context)])
                return text[len(context) :]
    return []


def test_no_repeat_proposes_nothing() -> None:
    assert propose([1, 2, 3, 4, 5]) == []
    assert propose([1]) == []
    assert propose([1, 1]) == []  # one token repeats, but two are asked for


def test_repeat_proposes_what_followed() -> None:
    assert propose([1, 2, 3, 4, 5, 6, 9, 1, 2, 3]) == [4, 5, 6, 9]


def test_the_longest_suffix_wins_over_a_more_recent_shorter_one() -> None:
    assert propose([7, 1, 2, 50, 51, 8, 1, 2, 60, 61, 7, 1, 2], depth=2) == [50, 51]


def test_the_most_recent_occurrence_wins() -> None:
    assert propose([1, 2, 50, 1, 2, 60, 1, 2], depth=1) == [60]


def test_an_overlapping_occurrence_goes_on_repeating() -> None:
    assert propose([5, 1, 1, 1], depth=6) == [1] * 6
    assert propose([1, 2, 1, 2, 1], depth=5) == [2, 1, 2, 1, 2]


def test_min_and_max_bound_the_suffix() -> None:
    context = [1, 2, 50, 51, 9, 2]
    assert propose(context, shortest=1, longest=3, depth=2) == [50, 51]
    assert propose(context, shortest=2, longest=3) == []
    context = [1, 2, 3, 50, 0, 9, 2, 3, 60, 1, 2, 3]
    assert propose(context, shortest=2, longest=3, depth=1) == [50]
    assert propose(context, shortest=2, longest=2, depth=1) == [60]


def test_depth_bounds_the_draft() -> None:
    for depth in (1, 2, 7):
        assert propose([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2], depth=depth) == [3, 4, 5, 6, 7, 8, 9][:depth]


@pytest.mark.parametrize(("shortest", "longest"), [(0, 3), (3, 2), (-1, -1)])
def test_impossible_limits_are_refused(shortest: int, longest: int) -> None:
    with pytest.raises(ConfigurationError, match="prompt_lookup_min"):
        NgramMethod(shortest, longest)


_edits = st.lists(
    st.tuples(st.integers(0, 6), st.lists(st.integers(0, 2), max_size=6)).map(tuple), min_size=1, max_size=12
)


@given(_edits, st.integers(1, 3), st.integers(0, 2))
def test_any_history_of_contexts_equals_the_definition(
    edits: list[tuple[int, list[int]]], shortest: int, more: int
) -> None:
    """Each edit drops some tokens from the end, as a rejected draft-ahead does, and appends others."""
    method = NgramMethod(shortest, shortest + more)
    method.open("s")
    context = [0]
    for dropped, appended in edits:
        context = [*context[: max(1, len(context) - dropped)], *appended]
        assert draft(method, "s", context, 3).tokens == by_definition(context, 3, shortest, shortest + more)


@given(_edits)
def test_a_shrunk_index_is_as_if_it_had_never_grown(edits: list[tuple[int, list[int]]]) -> None:
    index, context = NgramIndex(1, 3), [0]
    for dropped, appended in edits:
        context = [*context[: max(1, len(context) - dropped)], *appended]
        index.follow(context)
    fresh = NgramIndex(1, 3)
    fresh.follow(context)
    assert (index._tokens, index._last_end, index._hidden) == (fresh._tokens, fresh._last_end, fresh._hidden)


def test_cost_per_draft_does_not_grow_with_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []
    original = NgramIndex._enter

    def counting(self: NgramIndex, end: int) -> None:
        entered.append(end)
        original(self, end)

    monkeypatch.setattr(NgramIndex, "_enter", counting)
    method = NgramMethod(2, 3)
    method.open("s")
    context = [token % 97 for token in range(5000)]
    draft(method, "s", context, 4)
    assert len(entered) == len(context) - 1
    entered.clear()
    draft(method, "s", [*context, 3, 4, 5], 4)
    assert len(entered) == 3


def test_sessions_do_not_mix_and_closed_ones_propose_nothing() -> None:
    method = NgramMethod(2, 3)
    method.open("a")
    method.open("b")
    jobs = [DraftJob("a", (1, 2, 3, 1, 2), 2, GREEDY), DraftJob("b", (1, 2), 2, GREEDY)]
    method.advance(jobs)
    assert [job.tokens for job in jobs] == [[3, 1], []]
    assert all(job.done and job.method == "ngram" for job in jobs)
    method.close("a")
    method.close("a")
    assert draft(method, "a", (1, 2, 3, 1, 2), 2).tokens == []
    assert method.kv_len("b") == 0


def test_longer_matches_are_more_confident() -> None:
    method = NgramMethod(1, 4)
    method.open("s")
    short = draft(method, "s", [9, 5, 1, 5], 2)
    long = draft(method, "s", [1, 2, 3, 4, 1, 2, 3], 2)
    assert len(set(short.confidences)) == 1
    assert 0 < short.confidences[0] < long.confidences[0] < 1
