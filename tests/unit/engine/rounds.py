"""Drives a `TargetEngine` round by round, with the checks that hold after every one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.engine.target import TargetEngine
from paceline.messages import Evicted, Failed, NeedTokens, Open, SamplingParams, Verified, Verify
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.token_log import TokenLog
from tests.fakes.toy_runner import Law

GREEDY = SamplingParams(temperature=0.0)


def greedy_continuation(law: Law, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What plain greedy decoding says, computed from the law alone."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(torch.argmax(law(tuple(tokens)))))
    return tokens[len(prompt) :]


def run(engine: TargetEngine) -> list[Verified | Failed]:
    """All answers until the engine has nothing more to do."""
    answers: list[Verified | Failed] = []
    while engine.has_work:
        answers += engine.step()
        engine.check_integrity()
    return answers


class Owner:
    """The gateway's side of one session: its committed tokens, and commands built from them."""

    def __init__(
        self,
        engine: TargetEngine,
        prompt: Sequence[int],
        sampling: SamplingParams = GREEDY,
        name: str = "session",
    ) -> None:
        self.engine = engine
        self.name = name
        self.log = TokenLog(prompt)
        self.round = 0
        engine.open(Open(name, 1, tuple(prompt), len(prompt), sampling))

    @property
    def tokens(self) -> list[int]:
        return list(self.log.tokens)

    def command(self, block: DraftTree = EMPTY_BLOCK, catch_up: int = 0) -> Verify:
        """The next round's command; the last `catch_up` committed tokens come with it."""
        self.round += 1
        length = len(self.log)
        return Verify(
            self.name,
            1,
            self.round,
            length,
            self.log.hash_at(length),
            self.log.slice(length - catch_up, length),
            block,
        )

    def submit(self, block: DraftTree = EMPTY_BLOCK, catch_up: int = 0) -> NeedTokens | Evicted | Failed | None:
        return self.engine.submit(self.command(block, catch_up))

    def verify(self, block: DraftTree = EMPTY_BLOCK, catch_up: int = 0) -> Verified:
        """One whole round, committed; checks the invariants of rows."""
        refused = self.submit(block, catch_up)
        assert refused is None, refused
        (answer,) = run(self.engine)
        assert isinstance(answer, Verified), answer
        self.take(answer)
        return answer

    def take(self, answer: Verified) -> None:
        assert answer.base_len == len(self.log)
        assert len(answer.tokens) == len(answer.accepted_path) + 1
        self.log.extend(answer.tokens)
        # At rest, with committed length L, the verifier has L - 1 rows.
        assert answer.kv_len == len(self.log) - 1 == self.engine.kv_len(self.name)
        assert 0 <= answer.timing.queue_us <= answer.timing.total_us
