"""A model runner without weights that finds every fault in the handling of key/value rows.

Where a model stores keys and values it stores the token and its position, in a real `KVPool`, so that reserving,
compacting and rolling back move the same things. For each row whose logits are wanted it reads back what that row can
see (block table, chain, tree), insists that positions are 0, 1, 2, ... and asks a law for the logits of that prefix. A
stale, missing or moved row is an AssertionError or another prefix, hence another token.

A law is a pure function of the visible tokens:

    runner = ToyRunner(cycle_law([3, 5, 7]))
    runner = ToyRunner(hash_law(vocab_size=16, seed=1), vocab_size=16)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from paceline.engine.features import FeaturePlane, FeatureTaps, SequenceFeatures
from paceline.engine.kv.pool import KVPool, PlaneShape, SequenceKV
from paceline.engine.runner import RunnerInfo, SequencePass

Law = Callable[[tuple[int, ...]], torch.Tensor]
"""Logits # [vocab_size] of the token after a prefix."""

SURE = 20.0
"""Logit of the one token of a table's law; the others have 0."""


def one_hot(token: int, vocab_size: int) -> torch.Tensor:
    """Logits that all but force one token."""
    logits = torch.zeros(vocab_size)
    logits[token] = SURE
    return logits


def cycle_law(cycle: Sequence[int], vocab_size: int = 64) -> Law:
    """The token at absolute position i is cycle[i % len(cycle)], whatever came before."""
    return lambda prefix: one_hot(cycle[len(prefix) % len(cycle)], vocab_size)


def script_law(continuation: Sequence[int], start: int, eos: int, vocab_size: int = 64) -> Law:
    """Position start + i holds continuation[i]; then `eos` for ever. For "eos at j" put it into the continuation."""

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        index = len(prefix) - start
        inside = 0 <= index < len(continuation)
        return one_hot(continuation[index] if inside else eos, vocab_size)

    return law


def table_law(table: Mapping[int, Mapping[int, float]], vocab_size: int = 64) -> Law:
    """A first-order law: table[last token][next token] = probability; tokens not named have none."""

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        logits = torch.full((vocab_size,), -30.0)
        for token, probability in table[prefix[-1]].items():
            logits[token] = torch.log(torch.tensor(probability))
        return logits

    return law


def hash_law(vocab_size: int = 16, seed: int = 0, scale: float = 2.0, order: int | None = None) -> Law:
    """Random logits that depend on every token of the prefix (or its last `order`), the same in every process."""

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        seen = prefix if order is None else prefix[-order:]
        generator = random.Random(f"{seed}:{','.join(map(str, seen))}")
        return torch.tensor([generator.gauss(0.0, scale) for _ in range(vocab_size)])

    return law


def poisoned_law(law: Law, poison: Callable[[tuple[int, ...]], bool]) -> Law:
    """The law, but a row of NaN wherever `poison(prefix)` holds."""

    def poisoned(prefix: tuple[int, ...]) -> torch.Tensor:
        logits = law(prefix)
        return torch.full_like(logits, float("nan")) if poison(prefix) else logits

    return poisoned


class ToyRunner:
    """A `ModelRunner` that follows a law.

    Args:
        law: logits of the next token.
        vocab_size: length of the law's rows.
        max_model_len: most tokens of a sequence.
        num_pages, page_tokens: the pool.

    Attributes:
        passes: number of tokens of every part of every pass so far.
        pool: the real pool that holds (token, position) per slot.
    """

    def __init__(
        self,
        law: Law,
        vocab_size: int = 64,
        *,
        max_model_len: int = 512,
        num_pages: int = 256,
        page_tokens: int = 4,
    ) -> None:
        self.law = law
        self.passes: list[tuple[int, ...]] = []
        # one plane, one head, [token, position] per slot
        self.pool = KVPool([PlaneShape(1, 1, 2)], num_pages, page_tokens, dtype=torch.int64)
        self._info = RunnerInfo(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            weights_bytes=0,
            kv_bytes=self.pool.num_bytes,
            kv_bytes_per_token=self.pool.bytes_per_token,
            device="cpu",
            dtype="int64",
            runner="toy",
        )

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def new_sequence(self) -> SequenceKV:
        return self.pool.new_sequence()

    def features(self, kv: SequenceKV) -> SequenceFeatures:
        """What is stored itself: a row of features is the token and its position."""
        return FeaturePlane(FeatureTaps(), self.pool.groups[0][0, 0]).of(kv)

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        self.passes.append(tuple(part.num_tokens for part in batch))
        batch = [_read_token(part) for part in batch]
        for part in batch:
            self._write(part)
        return [self._logits(part) for part in batch]

    def synchronize(self) -> None:
        """Nothing is left to be done."""

    def prefix(self, kv: SequenceKV) -> tuple[int, ...]:
        """Tokens of the sequence's computed rows, checked."""
        return self._read(kv, list(range(kv.num_rows)))

    def _write(self, part: SequencePass) -> None:
        start, root = part.kv.num_rows, part.kv.num_rows + len(part.tokens) - 1
        positions = [*range(start, root + 1), *(root + depth for depth in part.tree.depths[1:])]
        tokens = [*part.tokens, *part.tree.tokens]
        assert positions, "a part feeds at least one token"
        assert max(positions) < self._info.max_model_len, "a position lies beyond the context"
        assert all(0 <= token < self._info.vocab_size for token in tokens), "a token lies outside the vocabulary"
        slots = part.kv.slot_list(start, start + len(tokens))
        self.pool.groups[0][0, 0, slots] = torch.tensor([tokens, positions]).T

    def _read(self, kv: SequenceKV, rows: list[int]) -> tuple[int, ...]:
        stop = max(rows, default=-1) + 1
        store = self.pool.groups[0][0, 0]
        seen = store[kv.slot_list(0, stop)][rows]
        assert torch.equal(seen[:, 1], torch.arange(len(rows))), f"positions {seen[:, 1].tolist()} are not 0, 1, 2, ..."
        return tuple(seen[:, 0].tolist())

    def _logits(self, part: SequencePass) -> torch.Tensor:
        start, num_chain = part.kv.num_rows, len(part.tokens)
        root = start + num_chain - 1
        rows: list[list[int]] = [list(range(start + index + 1)) for index in range(num_chain)]
        rows += [
            [*range(root), *(root + ancestor for ancestor in part.tree.ancestors(node))]
            for node in range(1, part.tree.num_draft_tokens + 1)
        ]
        wanted = rows[len(rows) - part.num_logits :]
        if not wanted:
            return torch.empty(0, self._info.vocab_size)
        return torch.stack([self.law(self._read(part.kv, visible)) for visible in wanted])


def _read_token(part: SequencePass) -> SequencePass:
    """The part with the token that only the device knew."""
    if part.last_on_device is None:
        return part
    return replace(part, tokens=(*part.tokens[:-1], *part.last_on_device.tolist()), last_on_device=None)
