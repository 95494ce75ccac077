"""What one token adds to the text, as bytes.

A fast tokenizer's decoder turns a whole list of tokens into text. To stream text without decoding everything again,
this module reads the decoder's description and turns it into a function of a single token plus two rules for the
start of the text. The text is then the UTF-8 decoding of the concatenated pieces.

    description in tokenizer.json                      families
    ByteLevel                                          GPT-2, Llama 3, Qwen, SmolLM, Mistral Tekken
    Sequence[Replace, ByteFallback, Fuse, Strip]       Llama 2, Mistral, Phi-3, Gemma (without Strip)
    Metaspace                                          SentencePiece unigram models
    none                                               WordLevel: tokens joined by a space

Knows nothing of vocabularies, special tokens or stop strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """The printable character that byte-level BPE (GPT-2) writes for each byte, inverted."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_LEVEL = _byte_level_alphabet()

Piece = str | bytes
_Step = Callable[[Piece], Piece]


@dataclass(frozen=True, slots=True)
class PieceDecoder:
    """The pieces of tokens and the rules for the start of the text.

    Attributes:
        strip_char: character removed from the start of the whole text ...
        strip_count: ... at most this many times.
        bare_first: character that the first token loses wherever it stands in it; empty for none.
        separator: text between two tokens.
    """

    _steps: tuple[_Step, ...]
    strip_char: str = ""
    strip_count: int = 0
    bare_first: str = ""
    separator: str = ""

    def piece(self, token: str, *, first: bool = False) -> bytes:
        """Bytes that a token adds to the text, without the separator.

        Args:
            token: the token as the vocabulary spells it.
            first: whether it is the first token of the text.
        """
        if first and self.bare_first:
            token = token.replace(self.bare_first, "")
        piece: Piece = token
        for step in self._steps:
            piece = step(piece)
        return piece if isinstance(piece, bytes) else piece.encode("utf-8", "surrogatepass")

    @classmethod
    def from_description(cls, decoder: Mapping[str, Any] | None) -> PieceDecoder:
        """Reads the `decoder` entry of a tokenizer.json.

        Raises:
            ModelError: the decoder cannot be streamed token by token.
        """
        if decoder is None:
            return cls((), separator=" ")
        builder = _Builder()
        builder.add(decoder)
        return cls(
            tuple(builder.steps),
            strip_char=builder.strip_char,
            strip_count=builder.strip_count,
            bare_first=builder.bare_first,
        )


class _Builder:
    """Translates the parts of a decoder in their order."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.strip_char = ""
        self.strip_count = 0
        self.bare_first = ""
        self._fused = False

    def add(self, decoder: Mapping[str, Any]) -> None:
        kind = decoder.get("type")
        if kind == "Sequence":
            for part in decoder["decoders"]:
                self.add(part)
        elif kind == "ByteLevel":
            self._fused = True
            self.steps.append(_byte_level)
        elif kind == "ByteFallback":
            self.steps.append(_byte_fallback)
        elif kind == "Fuse":
            self._fused = True
        elif kind == "Replace" and "String" in decoder.get("pattern", {}):
            self.steps.append(_replace(decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Metaspace":
            self._metaspace(decoder)
        elif kind == "Strip" and self._fused and not decoder.get("stop"):
            self.strip_char, self.strip_count = decoder["content"], int(decoder["start"])
        else:
            raise ModelError(
                f"the tokenizer's decoder part {kind!r} ({dict(decoder)}) cannot be decoded token by token; "
                "supported are ByteLevel, Metaspace, and sequences of Replace, ByteFallback, Fuse and a leading Strip",
                field="model",
            )

    def _metaspace(self, decoder: Mapping[str, Any]) -> None:
        replacement = decoder["replacement"]
        scheme = decoder.get("prepend_scheme", "always" if decoder.get("add_prefix_space", True) else "never")
        if scheme != "never":
            self.bare_first = replacement
        self.steps.append(_replace(replacement, " "))


def _byte_level(piece: Piece) -> Piece:
    if isinstance(piece, bytes):
        return piece
    try:
        return bytes([_BYTE_LEVEL[character] for character in piece])
    except KeyError:
        return piece  # an added token that is spelt as it reads


def _byte_fallback(piece: Piece) -> Piece:
    if isinstance(piece, str) and (match := _BYTE_TOKEN.fullmatch(piece)):
        return bytes([int(match[1], 16)])
    return piece


def _replace(pattern: str, content: str) -> _Step:
    def step(piece: Piece) -> Piece:
        return piece.replace(pattern, content) if isinstance(piece, str) else piece

    return step
