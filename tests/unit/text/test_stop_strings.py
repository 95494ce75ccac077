from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text.stop_strings import StopMatcher

letters = st.text(alphabet="ab", max_size=30)
stop_sets = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, str] | None:
    """(start, stop) of the match that ends first, the longest of those; the slow and obvious way."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return end - len(stop), stop
    return None


def longest_beginning(text: str, stops: list[str]) -> int:
    sizes = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
    return max(sizes, default=0)


@given(st.lists(letters, max_size=5), stop_sets)
def test_equals_a_plain_search_however_the_text_is_cut(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    expected = first_match("".join(parts), stops)
    seen = 0
    for part in parts:
        match = matcher.push(part)
        if match is not None:
            assert expected == (seen + match.start, match.stop)
            return
        seen += len(part)
        assert matcher.held == longest_beginning("".join(parts)[:seen], stops)
    assert expected is None


@given(letters, letters, stop_sets)
def test_unarmed_matches_are_ordinary_text(before: str, after: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert matcher.push(before, armed=False) is None
    match = matcher.push(after)
    ends = [
        end for end in range(len(before) + 1, len(before + after) + 1) if (before + after)[:end].endswith(tuple(stops))
    ]
    if not stops or not ends:
        assert match is None
        return
    assert match is not None
    assert len(before) + match.start + len(match.stop) == ends[0]


@pytest.mark.parametrize("text", ["", "abc"])
def test_no_stop_strings_hold_nothing(text: str) -> None:
    matcher = StopMatcher(())
    assert matcher.push(text) is None
    assert matcher.held == 0
