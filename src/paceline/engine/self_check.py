"""The check at load time: a runner's passes over its pool give the model's own logits.

It feeds one fixed sequence in one go and in pieces, with wrong drafts, a rollback, a tree and a neighbour between, and
compares every row with the model's own cache-free pass. It needs nothing but the `ModelRunner` interface.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from paceline.engine.runner import ModelRunner, SequencePass
from paceline.engine.runner_options import Quantization
from paceline.errors import ModelError
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

_NUM_TOKENS = 20
_TOLERANCES = {"float32": 2e-3}
_HALF_TOLERANCE = 5e-2
"""Largest difference of two logits, relative to the largest logit; a fault in the cache gives 0.1 and more."""


def check_sequence(vocab_size: int) -> list[int]:
    """The tokens that the check feeds: fixed and arbitrary."""
    generator = random.Random(0)  # noqa: S311 - no secret
    return [generator.randrange(vocab_size) for _ in range(_NUM_TOKENS)]


def check_runner(
    runner: ModelRunner,
    name: str,
    tokens: Sequence[int],
    expected: torch.Tensor,  # [len(tokens), vocab_size] float32
    other_arguments: Sequence[str] = (),
) -> None:
    """Compares passes over the pool with the model's own logits.

    Args:
        runner: to be checked; it holds no sequence more afterwards.
        name: of the model, for the message.
        tokens: as `check_sequence` makes them.
        expected: the model's own logits.
        other_arguments: what else the model's attention asked for, for the message.

    Raises:
        ModelError: they differ by more than rounding, so the model would be served wrongly.
    """
    exact = runner.info.quantization == Quantization.NONE.value
    tolerance = _TOLERANCES.get(runner.info.dtype, _HALF_TOLERANCE) if exact else _HALF_TOLERANCE
    scale = float(expected.abs().max()) or 1.0
    for how, logits in (("one pass", logits_in_one_pass(runner, tokens)), ("pieces", _in_pieces(runner, tokens))):
        difference = float((logits - expected).abs().max()) / scale
        if not difference <= tolerance:
            hint = f"; its attention also uses {', '.join(other_arguments)}" if other_arguments else ""
            raise ModelError(
                f"{name} gives other logits over the paged cache in {how} than on its own (relative difference "
                f"{difference:.1e}, {tolerance:.0e} allowed){hint}: it keeps state that cannot be rolled back, or "
                "attends in a way that is not supported; give another model",
                field="model",
            )


def logits_in_one_pass(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """The logits of every token # [len(tokens), vocab_size], fed at once to a sequence without rows."""
    kv = runner.new_sequence()
    try:
        kv.reserve(len(tokens))
        return runner.forward([SequencePass(kv, tuple(tokens), num_logits=len(tokens))])[0]
    finally:
        kv.free()


def _in_pieces(runner: ModelRunner, tokens: Sequence[int]) -> torch.Tensor:
    """The logits of `tokens`, each from the last pass that feeds it."""
    wrong = [(token + 1) % runner.info.vocab_size for token in tokens]
    kv, neighbour = runner.new_sequence(), runner.new_sequence()

    def feed(chain: Sequence[int], tree: DraftTree, path: Sequence[int] = ()) -> torch.Tensor:
        """Feeds and keeps chain and path; their logits."""
        num_tokens = len(chain) + tree.num_draft_tokens
        kv.reserve(num_tokens)
        neighbour.reserve(2)
        beside = SequencePass(neighbour, (wrong[0], wrong[1]))
        logits = runner.forward([beside, SequencePass(kv, tuple(chain), tree, num_logits=num_tokens)])[1]
        kv.commit(len(chain), path)
        neighbour.commit(2)
        return logits[[*range(len(chain)), *(len(chain) - 1 + node for node in path)]]

    try:
        before = feed(tokens[:5], DraftTree.chain(wrong[5:8]))
        kv.rollback(3)
        branches = DraftTree((wrong[7], tokens[7], wrong[8], tokens[8]), (0, 0, 2, 2))
        return torch.cat(
            [
                before[:3],
                feed(tokens[3:7], branches, (2, 4)),
                feed(tokens[9:10], DraftTree((wrong[10], tokens[10]), (0, 0))),
                feed(tokens[10:], EMPTY_BLOCK),
            ]
        )
    finally:
        kv.free()
        neighbour.free()
