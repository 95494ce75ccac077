"""Vocabularies of two parties that may not be the same: how one travels in parts, and where two of them part.

A vocabulary is a map from token id to token, as `Tokenizer.vocabulary` has it: added tokens included, padding left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from paceline.messages import VocabularyChunk

CHUNK_BYTES = 32 * 2**10
"""Far below the smallest limit of messages."""

_SHOWN_CHARS = 40
_PADDING_TOKEN = re.compile(r"\[PAD(\d+)\]")


@dataclass(frozen=True, slots=True)
class VocabularyDifference:
    """The first token id at which two vocabularies differ; None where one has no such token."""

    token_id: int
    here: str | None
    there: str | None

    def __str__(self) -> str:
        if self.there is None:
            return f"there it has no token {self.token_id}, which is {_show(self.here)} here"
        if self.here is None:
            return f"here it has no token {self.token_id}, which is {_show(self.there)} there"
        return f"token {self.token_id} is {_show(self.here)} here and {_show(self.there)} there"


def _show(token: str | None) -> str:
    shown = repr(token)
    return shown if len(shown) <= _SHOWN_CHARS else f"{shown[: _SHOWN_CHARS - 3]}..."


def first_difference(here: Mapping[int, str], there: Mapping[int, str]) -> VocabularyDifference | None:
    """The lowest id at which the vocabularies differ; None when they are the same."""
    differing = [token_id for token_id in here.keys() | there.keys() if here.get(token_id) != there.get(token_id)]
    if not differing:
        return None
    token_id = min(differing)
    return VocabularyDifference(token_id, here.get(token_id), there.get(token_id))


def without_padding(vocabulary: Mapping[int, str]) -> dict[int, str]:
    """The vocabulary less the placeholders `[PAD<id>]` with which conversions fill it up to the model's width."""
    kept = dict(vocabulary)
    for token_id in sorted(kept, reverse=True):
        match = _PADDING_TOKEN.fullmatch(kept[token_id])
        if match is None or int(match[1]) != token_id:
            break
        del kept[token_id]
    return kept


def split_vocabulary(vocabulary: Mapping[int, str], chunk_bytes: int = CHUNK_BYTES) -> Iterator[VocabularyChunk]:
    """The vocabulary in order of ids; a chunk ends where it is large enough and where ids are left out."""
    first_id, pieces, size_bytes = 0, list[str](), 0
    for token_id in sorted(vocabulary):
        piece = vocabulary[token_id]
        piece_bytes = len(piece.encode("utf-8", "surrogatepass"))
        if pieces and (token_id != first_id + len(pieces) or size_bytes + piece_bytes > chunk_bytes):
            yield VocabularyChunk(first_id, tuple(pieces))
            pieces, size_bytes = [], 0
        if not pieces:
            first_id = token_id
        pieces.append(piece)
        size_bytes += piece_bytes + 2  # what protobuf adds to a short string
    if pieces:
        yield VocabularyChunk(first_id, tuple(pieces))
