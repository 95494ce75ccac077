"""Medusa heads without training: random ones, and ones that know what a toy target will write.

`ToyRunner`'s features are (token, position). The k-th of the knowing heads adds k * 1000 to the position, so that the
head which they share, a function here, can tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint, MedusaConfig
from paceline.engine.shared_parts import SharedParts
from tests.fakes.toy_runner import Law

HIDDEN = 12
VOCAB = 40
_STEP = 1000

Ahead = Callable[[int, int, int], torch.Tensor]
"""Token and position of the last computed row and the head, to the logits of the token head + 2 places on."""


def parts_with(head: Callable[[torch.Tensor], torch.Tensor], hidden_size: int, vocab_size: int) -> SharedParts:
    """A target's parts; a Medusa head uses nothing but the head."""

    def absent(_rows: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a Medusa head needs neither embedding nor norm")

    return SharedParts(absent, head, absent, hidden_size, 2, vocab_size, torch.float32, torch.device("cpu"))


def random_parts(seed: int = 1) -> SharedParts:
    """A random head."""
    table = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(seed))
    return parts_with(lambda rows: rows @ table.T, HIDDEN, VOCAB)


def random_heads(
    kind: str = "shared", *, heads: int = 4, layers: int = 1, bias: bool = True, seed: int = 2
) -> MedusaCheckpoint:
    """Random heads.

    Args:
        kind: `shared` has the target's head, `own` one for each, `tied` one for all, `trimmed` one for all with a
            vocabulary of 9 ids.
        heads: how many.
        layers: residual layers of each.
        bias: whether residual layers have one.
        seed: of the weights.
    """
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.5

    token_map = torch.randperm(VOCAB, generator=generator)[:9] if kind == "trimmed" else None
    columns = VOCAB if token_map is None else len(token_map)
    blocks = tuple(
        tuple((matrix(HIDDEN, HIDDEN), matrix(HIDDEN) if bias else None) for _ in range(layers)) for _ in range(heads)
    )
    outputs = {
        "shared": None,
        "own": tuple(matrix(columns, HIDDEN) for _ in range(heads)),
        "tied": (matrix(columns, HIDDEN),) * heads,
        "trimmed": (matrix(columns, HIDDEN),) * heads,
    }[kind]
    config = MedusaConfig(heads, layers, HIDDEN, columns, outputs is None, bias)
    return MedusaCheckpoint(config, blocks, outputs, "random", token_map)


def knowing_heads(heads: int) -> MedusaCheckpoint:
    """Heads that pass (token, position) on and say who they are."""
    nothing = torch.zeros(2, 2)
    blocks = tuple(((nothing, torch.tensor([0.0, float(_STEP * head)])),) for head in range(heads))
    return MedusaCheckpoint(MedusaConfig(heads, 1, 2, VOCAB, True, True), blocks, None, "knowing")


def knowing_parts(ahead: Ahead, vocab_size: int) -> SharedParts:
    """The head that all of them share."""

    def head(rows: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [ahead(int(token), int(place) % _STEP, int(place) // _STEP) for token, place in rows.tolist()]
        )

    return parts_with(head, 2, vocab_size)


def transitions_ahead(law: Law, vocab_size: int, error: float = 0.0) -> Ahead:
    """For a law that looks at the last token only: log-probabilities of the token head + 2 places on.

    Args:
        law: logits of the next token.
        vocab_size: length of its rows.
        error: standard deviation of what is added to them.
    """
    step = torch.stack([law((token,)) for token in range(vocab_size)]).double().softmax(-1)
    powers = [step @ step]
    for _ in range(9):
        powers.append(powers[-1] @ step)
    noise = torch.randn(10, vocab_size, vocab_size, generator=torch.Generator().manual_seed(5)) * error
    return lambda token, _position, head: powers[head][token].log().float() + noise[head, token]
