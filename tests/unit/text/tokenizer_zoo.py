"""One small tokenizer per family of decoders, built without files."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_tokenizer import write_byte_level

FAMILIES = ("byte_level", "sentencepiece", "gemma", "metaspace", "word_level")


@cache
def backend(family: str) -> tokenizers.Tokenizer:
    """The `tokenizers` object of a family."""
    if family == "byte_level":
        with tempfile.TemporaryDirectory() as folder:
            return tokenizers.Tokenizer.from_file(str(write_byte_level(Path(folder)) / "tokenizer.json"))
    if family in ("sentencepiece", "gemma"):
        return _byte_fallback(strip=family == "sentencepiece")
    if family == "metaspace":
        return _metaspace()
    words = ["<eos>", "the", "cat", "sat", "on", "mat", "[UNK]"]
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


@cache
def tokenizer(family: str) -> Tokenizer:
    """Ours over it."""
    return Tokenizer(backend(family))


def _byte_fallback(*, strip: bool) -> tokenizers.Tokenizer:
    """As in Llama 2 (with the leading Strip) and Gemma (without)."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "h", "e", "c", "▁▁", "é", "你", "▁你", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "▁"), ("▁", "你")]
    for extra in ("th",):
        vocab[extra] = len(vocab)
    vocab["the"] = len(vocab)
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in ("<s>", "</s>")])
    return tokenizer


def _metaspace() -> tokenizers.Tokenizer:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -1.0), ("▁cat", -1.0), ("s", -3.0), ("a", -3.0), ("t", -3.0)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer
