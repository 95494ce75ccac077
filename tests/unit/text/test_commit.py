"""When a generation ends and what of its text is seen; the rows of "Boundaries inside an accepted block"."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import PacelineError
from paceline.messages import FinishReason
from paceline.text.commit import CommittedRound, Committer, EndSettings
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_letters
from tests.unit.text import tokenizer_zoo as zoo

A, B, C, D, E, F, G, H = range(8)
STOP_ID, UNKNOWN, EOS = 13, 14, 15


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Ids 0..13 are the letters a to n, 14 is "_", 15 the end."""
    return Tokenizer.load(write_letters(tmp_path_factory.mktemp("letters")))


def settings(**changes: object) -> EndSettings:
    values = {"max_new_tokens": 100, "eos_token_ids": frozenset({EOS})} | changes
    return EndSettings(**values)  # type: ignore[arg-type]


def run(tokenizer: Tokenizer, tokens: list[int], **changes: object) -> CommittedRound:
    return Committer(tokenizer, settings(**changes)).commit_round(tokens)


def test_the_textbook_end_a_stop_inside_an_accepted_block(letters: Tokenizer) -> None:
    """[a, b, STOP, c, d, e] with max_tokens 5: the text is a, b and nothing after the stop counts."""
    for changes in (
        {"stop_token_ids": frozenset({STOP_ID})},
        {"eos_token_ids": frozenset({STOP_ID})},
        {"stop": ("n",)},
    ):
        result = run(letters, [A, B, STOP_ID, C, D, E], max_new_tokens=5, **changes)
        assert result.text == "ab"
        assert result.finish is FinishReason.STOP
        assert result.token_ids == (A, B, STOP_ID)
        assert result.num_tokens == 3
        assert result.stop_string == ("n" if "stop" in changes else None)


def test_length_comes_before_a_stop_that_lies_beyond_it(letters: Tokenizer) -> None:
    """[a, b, c, STOP] with max_tokens 2: two tokens, length."""
    result = run(letters, [A, B, C, EOS], max_new_tokens=2)
    assert (result.token_ids, result.text, result.finish) == ((A, B), "ab", FinishReason.LENGTH)


@pytest.mark.parametrize("kind", ["eos", "stop_id", "stop_string"])
def test_a_stop_on_the_last_allowed_token_is_a_stop(letters: Tokenizer, kind: str) -> None:
    kinds: dict[str, dict[str, object]] = {
        "eos": {},
        "stop_id": {"stop_token_ids": frozenset({STOP_ID})},
        "stop_string": {"stop": ("n",)},
    }
    changes = kinds[kind]
    last = EOS if kind == "eos" else STOP_ID
    assert run(letters, [A, B, last], max_new_tokens=3, **changes).finish is FinishReason.STOP


@pytest.mark.parametrize("stop", ["x", "xyz", "wxyzabcd"])
@pytest.mark.parametrize("position", range(8))
def test_stop_string_that_completes_at_each_position_of_a_block(tmp_path: Path, stop: str, position: int) -> None:
    """The result does not depend on where in the block of 8 the stop string ends, nor on how rounds are cut."""
    tokenizer = Tokenizer.load(write_letters(tmp_path, 64))
    ids = list(tokenizer.encode("ABCDEFGH" * 2 + stop + "IJKLMNOPQRSTUVW"))
    end = 16 + len(stop)  # tokens up to the end of the stop string
    first = (end - 1 - position) % 8
    committer = Committer(tokenizer, settings(stop=(stop,), eos_token_ids=frozenset()))
    rounds = [committer.commit_round(ids[:first])]
    for start in range(first, len(ids), 8):
        if committer.finish is not None:
            break
        rounds.append(committer.commit_round(ids[start : start + 8]))
    assert rounds[-1].num_tokens == position + 1
    assert committer.num_tokens == sum(part.num_tokens for part in rounds) == end
    assert "".join(part.text for part in rounds) == "ABCDEFGH" * 2
    assert (committer.finish, committer.stop_string) == (FinishReason.STOP, stop)


def test_eos_that_the_target_agrees_with_ends_and_what_follows_never_leaves(letters: Tokenizer) -> None:
    result = run(letters, [C, EOS, D])
    assert (result.token_ids, result.text, result.finish) == ((C, EOS), "c", FinishReason.STOP)


def test_a_second_round_continues_where_the_first_ended_mid_block(letters: Tokenizer) -> None:
    committer = Committer(letters, settings(max_new_tokens=5))
    first = committer.commit_round([A, B, C])
    assert first.finish is None
    assert committer.remaining_tokens == 2
    last = committer.commit_round([D, E, F, G])
    assert (last.token_ids, last.finish) == ((D, E), FinishReason.LENGTH)
    assert (committer.num_tokens, committer.remaining_tokens) == (5, 0)
    assert first.text + last.text == "abcde"


@pytest.mark.parametrize("minimum", range(6))
def test_min_tokens_guards_end_and_stop_ids(letters: Tokenizer, minimum: int) -> None:
    """The verifier masks them; one that comes all the same before min_tokens exist does not end."""
    for end_id, changes in ((EOS, {}), (STOP_ID, {"stop_token_ids": frozenset({STOP_ID})})):
        result = run(letters, [A, B, end_id, C, end_id, D, end_id], min_tokens=minimum, **changes)
        assert result.finish is FinishReason.STOP
        assert result.num_tokens == {0: 3, 1: 3, 2: 3, 3: 5, 4: 5, 5: 7}[minimum]


def test_stop_strings_within_min_tokens_are_text_and_later_ones_end(letters: Tokenizer) -> None:
    result = run(letters, [A, B, A, B, A, B], stop=("ab",), min_tokens=2)
    assert (result.num_tokens, result.text, result.stop_string) == (4, "ab", "ab")


def test_a_stop_string_that_begins_within_min_tokens_counts_and_is_not_sent(letters: Tokenizer) -> None:
    result = run(letters, [A, B, C, D], stop=("bcd",), min_tokens=3)
    assert (result.num_tokens, result.text, result.finish) == (4, "a", FinishReason.STOP)


def test_ignore_eos_goes_on_but_a_stop_id_still_ends(letters: Tokenizer) -> None:
    assert run(letters, [A, EOS, B], ignore_eos=True, max_new_tokens=3).finish is FinishReason.LENGTH
    result = run(letters, [A, EOS, B], ignore_eos=True, stop_token_ids=frozenset({EOS}))
    assert (result.num_tokens, result.finish) == (2, FinishReason.STOP)


@pytest.mark.parametrize("end", ["eos", "stop_id", "length"])
def test_held_text_is_flushed_at_a_natural_end(letters: Tokenizer, end: str) -> None:
    committer = Committer(
        letters,
        settings(stop=("bcd",), stop_token_ids=frozenset({STOP_ID}), max_new_tokens=4 if end == "length" else 9),
    )
    assert committer.commit_round([A, B, C]).text == "a"
    last = committer.commit_token({"eos": EOS, "stop_id": STOP_ID, "length": E}[end])
    assert "a" + last.text == ("abce" if end == "length" else "abc")
    assert last.text == ("bce" if end == "length" else "bc")
    assert committer.stop_string is None


def test_held_text_is_released_as_soon_as_it_cannot_match(letters: Tokenizer) -> None:
    result = run(letters, [A, B, A, B, C, H], stop=("abd", "bcd"))
    assert [token.text for token in result.tokens] == ["", "", "ab", "", "a", "bch"]


def test_the_stop_string_that_ends_first_wins_and_the_longest_of_those(letters: Tokenizer) -> None:
    assert run(letters, [A, B, C, D], stop=("bcd", "bc")).stop_string == "bc"
    result = run(letters, [A, B, C, D], stop=("c", "abc"))
    assert (result.stop_string, result.text) == ("abc", "")


def test_text_before_and_after_a_stop_string_within_one_token() -> None:
    tokenizer = zoo.tokenizer("byte_level")
    hello = tokenizer.token_id("hello")
    assert hello is not None
    result = Committer(tokenizer, EndSettings(9, stop=("ll",))).commit_round([hello, hello])
    assert (result.text, result.num_tokens, result.stop_string) == ("he", 1, "ll")


def test_a_character_that_max_tokens_cuts_is_not_sent() -> None:
    tokenizer = zoo.tokenizer("byte_level")
    ids = tokenizer.encode("x🚲")
    assert len(ids) == 5
    result = Committer(tokenizer, EndSettings(4)).commit_round(ids)
    assert (result.text, result.finish) == ("x", FinishReason.LENGTH)


def test_a_stop_string_of_characters_split_over_tokens() -> None:
    tokenizer = zoo.tokenizer("byte_level")
    ids = tokenizer.encode("go 🚲🚀 now")
    result = Committer(tokenizer, EndSettings(99, stop=("🚲🚀",))).commit_round(ids)
    assert (result.text, result.stop_string) == ("go ", "🚲🚀")
    assert result.num_tokens == len(tokenizer.encode("go 🚲🚀"))


def test_nothing_is_committed_after_the_end(letters: Tokenizer) -> None:
    committer = Committer(letters, settings(max_new_tokens=1))
    committer.commit_token(A)
    with pytest.raises(PacelineError, match="after the generation's end"):
        committer.commit_token(B)
    assert committer.num_tokens == 1


def test_an_empty_round_changes_nothing(letters: Tokenizer) -> None:
    result = run(letters, [])
    assert (result.num_tokens, result.text, result.finish, result.stop_string) == (0, "", None, None)


stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3).map(tuple)


@given(st.lists(st.sampled_from([A, B, C, EOS]), max_size=30), stops, st.integers(1, 30), st.integers(0, 8), st.data())
def test_any_cut_into_rounds_gives_the_same_tokens_text_and_end(
    ids: list[int], stop: tuple[str, ...], max_new_tokens: int, min_tokens: int, data: st.DataObject
) -> None:
    tokenizer = _abc()
    end = settings(stop=stop, max_new_tokens=max_new_tokens, min_tokens=min_tokens)
    whole = Committer(tokenizer, end).commit_round(ids)
    committer = Committer(tokenizer, end)
    left, parts = list(ids), []
    while left and committer.finish is None:
        size = data.draw(st.integers(1, 8))
        parts.append(committer.commit_round(left[:size]))
        left = left[size:]
    assert tuple(token for part in parts for token in part.tokens) == whole.tokens
    assert (committer.finish, committer.stop_string) == (whole.finish, whole.stop_string)
    _check_against_the_text(whole, stop, min_tokens)


def _check_against_the_text(result: CommittedRound, stop: tuple[str, ...], min_tokens: int) -> None:
    """What is visible is the text before the stop string, and no completed stop string is in it past min_tokens."""
    full = "".join("abc"[token] for token in result.token_ids if token != EOS)
    if result.stop_string is not None:
        assert full == result.text + result.stop_string
    elif result.finish is not None:
        assert full == result.text
    else:
        assert full.startswith(result.text)
        held = full[len(result.text) :]
        assert not held or any(text.startswith(held) for text in stop)
    if min_tokens == 0:
        assert not any(text in result.text for text in stop)


@cache
def _abc() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return Tokenizer.load(write_letters(Path(folder)))
