"""The check at load time lets a right runner through and stops wrong ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from paceline.engine.runner import SequencePass
from paceline.engine.self_check import check_runner, check_sequence
from paceline.errors import ModelError
from tests.fakes.toy_runner import ToyRunner, hash_law

LAW = hash_law(32, seed=1)
TOKENS = check_sequence(32)
EXPECTED = torch.stack([LAW(tuple(TOKENS[: index + 1])) for index in range(len(TOKENS))])


class Recurrent(ToyRunner):
    """Its state has seen every token that was ever fed, rejected ones too."""

    fed = 0

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        logits = super().forward(batch)
        self.fed += sum(part.tree.num_draft_tokens for part in batch)
        return [rows + self.fed for rows in logits]


class TreeBlind(ToyRunner):
    """Lets every row see all rows before it, siblings too."""

    def _logits(self, part: SequencePass) -> torch.Tensor:
        num_rows = part.kv.num_rows + part.num_tokens
        seen = self.pool.groups[0][0, 0, part.kv.slot_list(0, num_rows), 0].tolist()
        rows = [self.law(tuple(seen[:stop])) for stop in range(num_rows - part.num_logits + 1, num_rows + 1)]
        return torch.stack(rows) if rows else torch.empty(0, self.info.vocab_size)


class Leaky(ToyRunner):
    """A row's logits depend on its neighbours in the batch."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        return [rows + len(batch) - 1 for rows in super().forward(batch)]


class Blind(ToyRunner):
    """Does not see rows of earlier passes."""

    def _logits(self, part: SequencePass) -> torch.Tensor:
        rows = super()._logits(part)
        return rows if part.kv.num_rows == 0 else rows.flip(-1)


class Poisoned(ToyRunner):
    """Gives no numbers."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        return [rows * float("nan") for rows in super().forward(batch)]


def test_a_right_runner_passes_and_holds_nothing_afterwards() -> None:
    runner = ToyRunner(LAW, 32)
    check_runner(runner, "Toy", TOKENS, EXPECTED)
    assert runner.pool.pages_in_use == 0
    assert runner.pool.num_sequences == 0


@pytest.mark.parametrize(
    ("runner_class", "how"),
    [(Recurrent, "pieces"), (TreeBlind, "pieces"), (Leaky, "pieces"), (Blind, "pieces"), (Poisoned, "one pass")],
)
def test_a_wrong_runner_is_refused(runner_class: type[ToyRunner], how: str) -> None:
    runner = runner_class(LAW, 32)
    with pytest.raises(ModelError, match=rf"Toy gives other logits over the paged cache in {how}.*give another model"):
        check_runner(runner, "Toy", TOKENS, EXPECTED)
    assert runner.pool.pages_in_use == 0


def test_the_message_names_what_else_the_attention_asked_for() -> None:
    with pytest.raises(ModelError, match="its attention also uses s_aux"):
        check_runner(Poisoned(LAW, 32), "Toy", TOKENS, EXPECTED, ["s_aux"])
