"""Targets and drafters as plain functions, for the simulation."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from paceline.speculation.tree import DraftTree

VOCAB_SIZE = 16
EOS = VOCAB_SIZE - 1

Law = Callable[[Sequence[int]], int]
Script = Callable[[Sequence[int], int], DraftTree]


def hash_law(seed: int, eos: int | None = None) -> Law:
    """A next token that depends on every token before it; never `eos` unless one is named."""

    def law(tokens: Sequence[int]) -> int:
        digest = hashlib.blake2b(bytes([seed % 256, *tokens]), digest_size=2).digest()
        token = int.from_bytes(digest, "big") % (VOCAB_SIZE - 1)
        return EOS if eos is not None and token == eos else token

    return law


def plain_text_of(law: Law, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """What plain decoding gives; the end-of-sequence token included."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(law(tokens))
        if tokens[-1] == EOS:
            break
    return tuple(tokens[len(prompt) :])


def perfect(law: Law) -> Script:
    def script(context: Sequence[int], depth: int) -> DraftTree:
        tokens = list(context)
        for _ in range(depth):
            tokens.append(law(tokens))
        return DraftTree.chain(tokens[len(context) :])

    return script


def wrong_at(law: Law, index: int) -> Script:
    def script(context: Sequence[int], depth: int) -> DraftTree:
        tokens = list(perfect(law)(context, depth).tokens)
        if index < len(tokens):
            tokens[index] = (tokens[index] + 1) % VOCAB_SIZE
        return DraftTree.chain(tokens)

    return script


def wrong_at_position(law: Law, period: int) -> Script:
    """Wrong wherever the absolute position is a multiple of `period`: some blocks are accepted whole, some are not."""

    def script(context: Sequence[int], depth: int) -> DraftTree:
        tokens = list(context)
        for _ in range(depth):
            token = law(tokens)
            tokens.append((token + 1) % VOCAB_SIZE if len(tokens) % period == 0 else token)
        return DraftTree.chain(tokens[len(context) :])

    return script


def bushy(law: Law) -> Script:
    """A tree: the true chain as the second child everywhere, a wrong one as the first."""

    def script(context: Sequence[int], depth: int) -> DraftTree:
        true = perfect(law)(context, depth).tokens
        wrong = [(token + 1) % VOCAB_SIZE for token in true[:2]]
        return DraftTree.from_paths([wrong, true, [*true[:-1], (true[-1] + 2) % VOCAB_SIZE]])

    return script


def garbage(seed: int) -> Script:
    """Trees of any shape with any ids, unknown ones among them; another one after every context."""

    def script(context: Sequence[int], depth: int) -> DraftTree:
        # Not for secrets: the same garbage in every run.
        source = random.Random(hash((seed, *context)))
        parents = [source.randrange(node + 1) for node in range(source.randint(0, 6))]
        return DraftTree(tuple(source.sample(range(VOCAB_SIZE + 4), len(parents))), tuple(parents))

    return script


def too_deep(law: Law) -> Script:
    """As `perfect`, but five tokens more than were asked for."""
    return lambda context, depth: perfect(law)(context, depth + 5)


def nothing(context: Sequence[int], depth: int) -> DraftTree:
    return DraftTree()
