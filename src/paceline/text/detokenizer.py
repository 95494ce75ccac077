"""Token ids to text, one token at a time, in whole characters.

The text after n tokens is the UTF-8 decoding of their pieces, less an incomplete character at the end. It depends
on the ids alone, so every process that is fed the same ids cuts the same text, and it only ever grows. Bytes that
can never become a character turn into U+FFFD as soon as that is certain: they block nothing. Work per token does
not depend on how many came before.

One difference from the `tokenizers` library, which replaces every byte of a run of byte-fallback tokens when any of
them is invalid: here the valid characters of such a run stay, since they may have been sent already.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.text.tokenizer import Tokenizer

_LONGEST_CHARACTER_BYTES = 4


class Detokenizer:
    """The text of one generation. Special tokens and ids without a token add nothing."""

    __slots__ = ("_decoder", "_separator", "_started", "_strip_left", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        """Starts after a prompt.

        Args:
            tokenizer: the model's.
            prompt_ids: tokens before the generation. They decide whether the first generated token starts a text,
                and so loses the leading space of SentencePiece, and which bytes of a character are there already.
        """
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._separator = tokenizer.decoder.separator.encode()
        self._started = False
        self._strip_left = tokenizer.decoder.strip_count
        self._follow(prompt_ids)

    def push(self, token_id: int) -> str:
        """Takes the next token and returns the text that became complete with it; empty for part of a character."""
        piece = self._tokenizer.piece(token_id, first=not self._started)
        if piece is None:
            return ""
        if self._started:
            piece = self._separator + piece
        self._started = True
        text = self._decoder.decode(piece)
        return self._strip_start(text) if self._strip_left and text else text

    @property
    def incomplete(self) -> str:
        """How an unfinished character would read if nothing followed: U+FFFD, or nothing if there is none."""
        pending, _ = self._decoder.getstate()
        return pending.decode("utf-8", "replace")

    def _strip_start(self, text: str) -> str:
        while self._strip_left and text.startswith(self._tokenizer.decoder.strip_char):
            text = text[1:]
            self._strip_left -= 1
            if not text:
                return ""
        self._strip_left = 0
        return text

    def _follow(self, prompt_ids: Sequence[int]) -> None:
        """Brings the state to the end of the prompt by its last bytes: UTF-8 synchronises within one character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            piece = self._tokenizer.piece(token_id)
            if piece is not None:
                self._started = True
                self._strip_left = 0
                tail = piece + tail
                if len(tail) >= _LONGEST_CHARACTER_BYTES:
                    break
        self._decoder.decode(tail)
