"""Log-probabilities in the two shapes of OpenAI: a list of entries for chat, parallel lists for completions."""

from __future__ import annotations

import math

from paceline.generation import Chunk
from paceline.text.tokenizer import Tokenizer
from paceline_gateway.http.responses import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob

IMPOSSIBLE = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(chunk: Chunk, tokenizer: Tokenizer) -> ChatLogprobs:
    """Entries of the chunk's tokens."""
    return ChatLogprobs(
        content=[
            TokenLogprob(
                token=token_text(token_id, tokenizer),
                logprob=finite(entry.logprob),
                bytes=list(_token_bytes(token_id, tokenizer)),
                top_logprobs=[
                    TopLogprob(
                        token=token_text(other, tokenizer),
                        logprob=finite(logprob),
                        bytes=list(_token_bytes(other, tokenizer)),
                    )
                    for other, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
                ],
            )
            for token_id, entry in zip(chunk.token_ids, chunk.logprobs, strict=True)
        ]
    )


def completion_logprobs(chunk: Chunk, tokenizer: Tokenizer, text_offset: int) -> CompletionLogprobs:
    """Lists of the chunk's tokens; a token's own entry is among its alternatives, however bad it is.

    Args:
        chunk: some tokens of a choice.
        tokenizer: the model's.
        text_offset: characters of the choice's text before this chunk.
    """
    alternatives = []
    for token_id, entry in zip(chunk.token_ids, chunk.logprobs, strict=True):
        best: dict[str, float] = {}
        for other, logprob in zip((*entry.top_tokens, token_id), (*entry.top_logprobs, entry.logprob), strict=True):
            best.setdefault(token_text(other, tokenizer), finite(logprob))
        alternatives.append(best)
    offsets = []
    for length in chunk.text_lengths:
        offsets.append(text_offset)
        text_offset += length
    return CompletionLogprobs(
        tokens=[token_text(token_id, tokenizer) for token_id in chunk.token_ids],
        token_logprobs=[finite(entry.logprob) for entry in chunk.logprobs],
        top_logprobs=alternatives,
        text_offset=offsets,
    )


def finite(logprob: float) -> float:
    """The value, or what stands for minus infinity."""
    return logprob if math.isfinite(logprob) else IMPOSSIBLE


def token_text(token_id: int, tokenizer: Tokenizer) -> str:
    r"""A token as text; one that is part of a character as `bytes:\xe2\x82`, so that no two are alike."""
    piece = _token_bytes(token_id, tokenizer)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join([f"\\x{byte:02x}" for byte in piece])


def _token_bytes(token_id: int, tokenizer: Tokenizer) -> bytes:
    """Bytes that a token adds to a text; of one that adds none, such as an end token, its name."""
    piece = tokenizer.piece(token_id)
    return (tokenizer.token(token_id) or "").encode("utf-8", "surrogatepass") if piece is None else piece
