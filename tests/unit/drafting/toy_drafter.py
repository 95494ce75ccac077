"""The draft model's method on a runner without weights, and checks of the rows that it holds."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.torch_runner import TorchDraftRunner
from tests.fakes.toy_runner import Law, ToyRunner, hash_law
from tests.unit.drafting.rounds import draft

VOCAB = 16
LAW = hash_law(VOCAB, seed=3)
PROMPT = (1, 2, 3, 4, 5)


class Drafter:
    """A draft method on a toy runner, with the checks of its rows."""

    def __init__(
        self,
        law: Law = LAW,
        *,
        max_sessions: int = 0,
        vocab_limit: int | None = None,
        max_batch_tokens: int = 256,
        max_model_len: int = 512,
        num_pages: int = 256,
    ) -> None:
        self.toy = ToyRunner(law, VOCAB, max_model_len=max_model_len, num_pages=num_pages)
        self.runner = TorchDraftRunner(self.toy, max_sessions, max_batch_tokens)
        self.method = DraftModelMethod(self.runner, vocab_limit=vocab_limit)

    def check(self) -> None:
        """Rows hold exactly the tokens that the method believes to be fed."""
        self.method.check_integrity()
        self.toy.pool.check_integrity()
        for session, holder in self.runner._holders.items():
            assert self.toy.prefix(holder.kv) == self.method.fed_tokens(session)

    def passes(self) -> list[tuple[int, ...]]:
        """Tokens per session of the passes since the last call."""
        passes, self.toy.passes = self.toy.passes, []
        return passes


def open_and_draft(drafter: Drafter, prompt: Sequence[int], depth: int) -> list[int]:
    drafter.method.open("s")
    tokens = draft(drafter.method, "s", prompt, depth).tokens
    drafter.passes()
    return tokens
