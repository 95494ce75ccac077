from __future__ import annotations

import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.text.detokenizer import Detokenizer
from tests.unit.text import tokenizer_zoo as zoo

TEXTS = (
    "hello world",
    "naïve café",
    "你好，世界。こんにちは",
    "👩‍🚀🏳️‍🌈 flags 🇩🇪🇯🇵 and 🤦🏽‍♂️",
    "é combining, zero\u200bwidth, \u202e rtl",
    "\ttabs\n\n  spaces   end ",
)
REPLACEMENT = "\ufffd"


def cuts(family: str, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    detokenizer = Detokenizer(zoo.tokenizer(family), prompt or [])
    return [detokenizer.push(token_id) for token_id in ids]


def random_ids(family: str, count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(zoo.backend(family).get_vocab_size() + 3), k=count)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_comes_back_whole_without_a_broken_character(text: str) -> None:
    ids = list(zoo.tokenizer("byte_level").encode(text))
    deltas = cuts("byte_level", ids)
    assert "".join(deltas) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


@given(st.text())
def test_every_unicode_text_comes_back_whole(text: str) -> None:
    ids = list(zoo.tokenizer("byte_level").encode(text))
    assert "".join(cuts("byte_level", ids)) == zoo.backend("byte_level").decode(ids) == text


@given(st.lists(st.integers(0, 302)))
def test_byte_level_equals_the_library_on_any_ids(ids: list[int]) -> None:
    tokenizer = zoo.tokenizer("byte_level")
    deltas = cuts("byte_level", ids)
    whole = zoo.backend("byte_level").decode(ids, skip_special_tokens=True)
    assert whole.startswith("".join(deltas))
    assert tokenizer.decode(ids) == whole


@pytest.mark.parametrize("family", zoo.FAMILIES)
@pytest.mark.parametrize("seed", range(40))
def test_each_family_equals_the_library_on_random_ids(family: str, seed: int) -> None:
    """Valid text only: with invalid bytes a run of byte-fallback tokens is cut more finely here, see the module."""
    ids = random_ids(family, 12, seed)
    if family in ("sentencepiece", "gemma"):
        ids = [token_id for token_id in ids if not 3 <= token_id < 259]
        character = "🚲".encode()
        ids[seed % 5 : seed % 5] = [3 + byte for byte in character]
    whole = zoo.backend(family).decode(ids, skip_special_tokens=True)
    assert whole.startswith("".join(cuts(family, ids)))
    assert zoo.tokenizer(family).decode(ids) == whole


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_cuts_are_a_function_of_the_ids(family: str) -> None:
    ids = random_ids(family, 300, seed=7)
    assert cuts(family, ids) == cuts(family, ids)
    for split in (1, 17, 299):
        assert cuts(family, ids[:split]) == cuts(family, ids)[:split]


@given(st.text(min_size=1), st.data())
def test_a_prompt_may_end_inside_a_character(text: str, data: st.DataObject) -> None:
    ids = list(zoo.tokenizer("byte_level").encode(text))
    split = data.draw(st.integers(0, len(ids)))
    before = "".join(cuts("byte_level", ids[:split]))
    assert before + "".join(cuts("byte_level", ids[split:], ids[:split])) == text


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"\xff", ["\ufffd"]),
        (b"\x80", ["\ufffd"]),
        (b"\xe4\xbd", ["", ""]),
        (b"\xe4\xbda", ["", "", "\ufffda"]),
        (b"\xe4\xbd\xa0", ["", "", "你"]),
        (b"\xf0\x9f\x9a\xb2", ["", "", "", "🚲"]),
        (b"\xf0\x9f\xf0\x9f\x9a\xb2", ["", "", "\ufffd", "", "", "🚲"]),
        (b"\xed\xa0\x80", ["", "", "\ufffd\ufffd\ufffd"]),
        (b"\xc0a", ["\ufffd", "a"]),
    ],
)
def test_invalid_bytes_are_replaced_as_soon_as_certain_and_block_nothing(raw: bytes, expected: list[str]) -> None:
    assert cuts("sentencepiece", [3 + byte for byte in raw]) == expected


def test_an_unfinished_character_is_reported_but_not_sent() -> None:
    detokenizer = Detokenizer(zoo.tokenizer("sentencepiece"))
    assert [detokenizer.push(3 + byte) for byte in "🚲".encode()[:3]] == ["", "", ""]
    assert detokenizer.incomplete == REPLACEMENT


def test_leading_space_is_dropped_at_the_start_of_a_text_only() -> None:
    tokenizer = zoo.tokenizer("sentencepiece")
    vocab = zoo.backend("sentencepiece").get_vocab()
    the, cat, begin = vocab["▁the"], vocab["▁cat"], vocab["<s>"]
    assert "".join(cuts("sentencepiece", [the, cat])) == "the cat"
    assert "".join(cuts("sentencepiece", [cat], [the])) == " cat"
    assert "".join(cuts("sentencepiece", [the, cat], [begin])) == "the cat"
    assert "".join(cuts("gemma", [the, cat])) == " the cat"
    assert tokenizer.decode([the, cat]) == "the cat"


def test_words_are_joined_by_a_space_across_the_prompt() -> None:
    assert "".join(cuts("word_level", [1, 2, 0, 3])) == "the cat sat"
    assert "".join(cuts("word_level", [2], [1])) == " cat"


def test_special_tokens_and_unknown_ids_have_no_text() -> None:
    tokenizer = zoo.tokenizer("byte_level")
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    assert cuts("byte_level", [end, 10_000, -1, end]) == ["", "", "", ""]


def test_work_per_token_does_not_grow_with_the_text() -> None:
    """The second half of 40,000 tokens takes no more than three times as long as the first."""
    ids = random_ids("byte_level", 40_000, seed=1)
    detokenizer = Detokenizer(zoo.tokenizer("byte_level"))
    halves = []
    for half in (ids[:20_000], ids[20_000:]):
        start = time.process_time()
        for token_id in half:
            detokenizer.push(token_id)
        halves.append(time.process_time() - start)
    assert halves[1] < 3 * halves[0]
