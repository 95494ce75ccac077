from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.text.vocabulary import first_difference, split_vocabulary
from paceline.wire import vocabulary_chunk_to_pb

VOCABULARIES = st.dictionaries(st.integers(0, 60), st.text(max_size=6), max_size=40)


@given(VOCABULARIES, st.integers(1, 40))
def test_chunks_are_the_vocabulary_in_order(vocabulary: dict[int, str], chunk_bytes: int) -> None:
    chunks = list(split_vocabulary(vocabulary, chunk_bytes))
    told = [(token_id, piece) for chunk in chunks for token_id, piece in enumerate(chunk.pieces, chunk.first_id)]
    assert told == sorted(vocabulary.items())
    assert all(chunk.pieces for chunk in chunks)


def test_chunks_are_bounded_and_few() -> None:
    vocabulary = {token_id: f"piece {token_id}" for token_id in range(50_000)}
    chunks = list(split_vocabulary(vocabulary))
    assert len(chunks) < 30
    assert max(vocabulary_chunk_to_pb(chunk).ByteSize() for chunk in chunks) < 33 * 2**10


@given(VOCABULARIES, VOCABULARIES)
def test_the_first_difference_is_the_lowest(here: dict[int, str], there: dict[int, str]) -> None:
    found = first_difference(here, there)
    if found is None:
        assert here == there
        return
    assert (found.here, found.there) == (here.get(found.token_id), there.get(found.token_id))
    assert found.here != found.there
    assert all(here.get(token_id) == there.get(token_id) for token_id in range(found.token_id))


def test_a_long_piece_is_shown_in_part() -> None:
    message = str(first_difference({0: "a"}, {0: "x" * 10_000}))
    assert len(message) < 80
    assert "xxx..." in message
