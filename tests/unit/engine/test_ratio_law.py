"""The law of the rule `ratio`: drafts that are really drawn, judged by what was sent, give the target's distribution.

A test lets 20,000 sessions that differ in their seed draft and verify until three tokens are there, and compares whole
outcomes with the exact law of the toy target. All sessions go through the steps of `draw_drafts` and `judge` together;
`test_many_sessions_are_one_by_one` shows that this is what these two do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from paceline.engine.draft_sampling import draw_drafts
from paceline.engine.judging import JudgeRequest, Verdict, judge
from paceline.engine.processors import Shaping
from paceline.engine.sampling import DraftRow
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams
from paceline.speculation.acceptance import ratio
from paceline.speculation.noise import NoiseStream, keyed_argmax, keyed_argmax_of, uniform
from paceline.speculation.tree import DraftTree
from tests.unit.speculation.law import P_VALUE, Tokens, ToyModel, fit_p_value, many_keys, total_variation

DRAWS = 20_000
PLAIN = SamplingParams()
NEVER = -1e4
"""A logit whose probability is 0."""


@functools.cache
def all_keys(position: int, stream: NoiseStream) -> torch.Tensor:
    return many_keys(DRAWS, position, stream)


class Masked(ToyModel):
    """A model that never says some tokens."""

    def __init__(self, model: ToyModel, excluded: Sequence[int]) -> None:
        super().__init__(model.vocab_size, 0)
        self._model, self._excluded = model, list(excluded)

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._model.logits(prefix).index_fill(0, torch.tensor(self._excluded), NEVER)


@dataclass(frozen=True)
class Speculation:
    """How many sessions decode under `ratio`.

    Attributes:
        target, drafter: the models.
        sampling: the request's parameters without seeds: session i has seed i.
        depth: drafts of a block.
        num_draft_probs: of the distribution that a draft is drawn from; 0 for argmax drafts.
        length: tokens of an outcome.
        draft_stream, accept_stream, last_stream: the noise.
        sends: whether what is sent is what was drawn from, or the drafter's whole row.
    """

    target: ToyModel
    drafter: ToyModel
    sampling: SamplingParams = PLAIN
    depth: int = 2
    num_draft_probs: int = 64
    length: int = 3
    draft_stream: NoiseStream = NoiseStream.RATIO_DRAFT
    accept_stream: NoiseStream = NoiseStream.RATIO_ACCEPT
    last_stream: NoiseStream = NoiseStream.RATIO_RESIDUAL
    sends_whole_row: bool = False

    @property
    def shaping(self) -> Shaping:
        shaping = Shaping.of(self.sampling)
        assert shaping is not None
        return shaping

    def scaled(self, model: ToyModel, prefixes: torch.Tensor) -> torch.Tensor:
        """Logits after each prefix, # [members, n] -> [members, vocab_size]."""
        size, length = model.vocab_size, prefixes.shape[1]
        table = torch.stack([model.logits(prefix) for prefix in itertools.product(range(size), repeat=length)])
        digits = torch.tensor([size ** (length - 1 - i) for i in range(length)], dtype=torch.int64)
        return (table / self.sampling.temperature)[(prefixes * digits).sum(1)]

    def draft(self, prefixes: torch.Tensor, members: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft after each prefix # [members], and what is sent with it # [members, vocab_size]."""
        logits = self.scaled(self.drafter, prefixes)
        if not self.num_draft_probs:
            tokens = logits.argmax(-1)
            sent = torch.nn.functional.one_hot(tokens, logits.shape[1]).float()
        else:
            kept, ids = self.shaping.shortlist(logits, self.num_draft_probs)
            probs = kept.softmax(-1)
            keys = all_keys(prefixes.shape[1], self.draft_stream)[members]
            tokens = keyed_argmax_of(probs.double().log(), ids, keys)
            sent = torch.zeros_like(logits).scatter_(1, ids, probs)
        return tokens, logits.softmax(-1) if self.sends_whole_row else sent

    def round(self, committed: torch.Tensor, members: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Drafts and judges one block; number accepted, drafts and last token of each member."""
        start = committed.shape[1]
        drafts, sent = committed, []
        for _ in range(min(self.depth, self.length - start - 1)):
            tokens, probs = self.draft(drafts, members)
            drafts = torch.cat([drafts, tokens.unsqueeze(1)], dim=1)
            sent.append(probs)
        uniforms = [
            uniform(all_keys(start + i, self.accept_stream)[members], torch.tensor([0])) for i in range(len(sent))
        ]
        verdicts = ratio(
            lambda row: self.shaping.probs(self.scaled(self.target, drafts[:, : start + row])),
            torch.stack(sent, dim=1) if sent else torch.empty(len(members), 0, self.target.vocab_size),
            drafts[:, start:],
            torch.cat(uniforms, dim=1) if uniforms else torch.empty(len(members), 0),
        )
        keys = torch.stack([all_keys(start + i, self.last_stream)[members] for i in range(len(sent) + 1)])
        last_keys = keys.gather(0, verdicts.num_accepted.unsqueeze(0))[0]
        last = keyed_argmax(verdicts.last_weights.float().log(), last_keys)
        return verdicts.num_accepted, drafts[:, start:], last

    def decode(self) -> torch.Tensor:
        """The outcomes of all sessions. # [DRAWS, length]."""
        outcomes = torch.zeros(DRAWS, self.length, dtype=torch.int64)
        lengths = torch.zeros(DRAWS, dtype=torch.int64)
        for length in range(self.length):
            members = (lengths == length).nonzero()[:, 0]
            if not len(members):
                continue
            num_accepted, drafts, last = self.round(outcomes[members, :length], members)
            for position in range(drafts.shape[1]):
                stays = position < num_accepted
                outcomes[members[stays], length + position] = drafts[stays, position]
            outcomes[members, length + num_accepted] = last
            lengths[members] = length + num_accepted + 1
        return outcomes

    def counts(self) -> list[int]:
        size = self.target.vocab_size
        digits = torch.tensor([size ** (self.length - 1 - i) for i in range(self.length)])
        counts: list[int] = torch.bincount((self.decode() * digits).sum(1), minlength=size**self.length).tolist()
        return counts

    def law(self) -> list[float]:
        size = self.target.vocab_size
        exact = self.target.law(self.sampling, self.length)
        return [exact.get(outcome, 0.0) for outcome in itertools.product(range(size), repeat=self.length)]

    @property
    def p_value(self) -> float:
        return fit_p_value(self.counts(), self.law())


FOUR, EIGHT, SIXTEEN = ToyModel(4, seed=3), ToyModel(8, seed=4), ToyModel(16, seed=5)
NEAR, FAR = FOUR.blurred(0.7), FOUR.blurred(3.0)

CASES = {
    "no drafts": Speculation(FOUR, NEAR, depth=0),
    "the drafter is the target": Speculation(FOUR, FOUR),
    "near": Speculation(FOUR, NEAR),
    "far": Speculation(FOUR, FAR),
    "flat": Speculation(FOUR, ToyModel(4, seed=3, spread=0.0)),
    "cold": Speculation(FOUR, NEAR, SamplingParams(temperature=0.5)),
    "hot": Speculation(FOUR, FAR, SamplingParams(temperature=1.5)),
    "disjoint": Speculation(Masked(FOUR, [0, 1]), Masked(FOUR, [2, 3])),
    "the target excludes what the drafter likes": Speculation(Masked(FOUR, [0]), NEAR),
    "the drafter excludes what the target likes": Speculation(FOUR, Masked(NEAR, [1, 2])),
    "argmax drafts": Speculation(FOUR, NEAR, num_draft_probs=0),
    "one draft": Speculation(FOUR, FAR, depth=1),
    "short list of two": Speculation(EIGHT, EIGHT.blurred(0.7), num_draft_probs=2, length=2, depth=1),
    "short list of three, hot": Speculation(FOUR, NEAR, SamplingParams(temperature=1.5), num_draft_probs=3),
    "sixteen tokens": Speculation(SIXTEEN, SIXTEEN.blurred(1.0), length=2),
    "top_k": Speculation(EIGHT, EIGHT.blurred(1.0), SamplingParams(top_k=3)),
    "top_p": Speculation(EIGHT, EIGHT.blurred(1.0), SamplingParams(top_p=0.8, temperature=1.5), length=2),
    "min_p, short list": Speculation(EIGHT, EIGHT.blurred(1.0), SamplingParams(min_p=0.2), num_draft_probs=2),
}


@pytest.mark.parametrize("name", CASES)
def test_law_is_the_targets(name: str) -> None:
    assert CASES[name].p_value > P_VALUE


def test_a_drafter_that_is_the_target_is_always_accepted() -> None:
    for sampling in (SamplingParams(), SamplingParams(temperature=0.7, top_p=0.9)):
        num_accepted, _, _ = Speculation(EIGHT, EIGHT, sampling).round(
            torch.empty(DRAWS, 0, dtype=torch.int64), torch.arange(DRAWS)
        )
        assert (num_accepted == 2).all()


class TestBiasedVariants:
    """Steps that look right and are not: the same test must refuse them."""

    def test_drafts_and_last_token_share_the_noise_of_match(self) -> None:
        shared = replace(CASES["far"], draft_stream=NoiseStream.SAMPLE, last_stream=NoiseStream.SAMPLE)
        assert shared.p_value < 1e-9

    def test_drafts_share_the_noise_of_the_last_token(self) -> None:
        assert replace(CASES["far"], draft_stream=NoiseStream.RATIO_RESIDUAL).p_value < 1e-9

    def test_drafts_share_the_noise_of_acceptance(self) -> None:
        assert replace(CASES["flat"], draft_stream=NoiseStream.RATIO_ACCEPT).p_value < 1e-9

    def test_last_token_shares_the_noise_of_acceptance(self) -> None:
        assert replace(CASES["far"], last_stream=NoiseStream.RATIO_ACCEPT).p_value < 1e-9

    def test_what_is_sent_is_not_what_was_drawn_from(self) -> None:
        whole_row = replace(CASES["short list of two"], sends_whole_row=True)
        assert whole_row.p_value < 1e-9
        assert total_variation(whole_row.counts(), whole_row.law()) > 0.02

    def test_argmax_drafts_are_sent_as_if_they_were_drawn(self) -> None:
        assert replace(CASES["argmax drafts"], sends_whole_row=True).p_value < 1e-9


def one_by_one(case: Speculation, seed: int) -> Tokens:
    """One session of a case by `draw_drafts` and `judge`."""
    sampling, vocab_size = replace(case.sampling, seed=seed), case.target.vocab_size
    tokens: list[int] = []
    while len(tokens) < case.length:
        drafts: list[int] = []
        sent: list[DraftProbs] = []
        for _ in range(min(case.depth, case.length - len(tokens) - 1)):
            logits = case.drafter.logits([*tokens, *drafts])
            if case.num_draft_probs:
                rows = [DraftRow(sampling, tokens, drafts)]
                (choice,) = draw_drafts(logits[None], rows, num_draft_probs=case.num_draft_probs, vocab_size=vocab_size)
                assert choice is not None
                assert choice.draft_probs is not None
                sent.append(choice.draft_probs)
                drafts.append(choice.token)
            else:
                drafts.append(int(logits.argmax()))
        logits = torch.stack([case.target.logits([*tokens, *drafts[:i]]) for i in range(len(drafts) + 1)])
        (verdict,) = judge(
            [
                JudgeRequest(
                    logits,
                    DraftTree.chain(drafts),
                    tokens,
                    0,
                    sampling,
                    vocab_size,
                    rule=AcceptanceRule.RATIO,
                    draft_probs=tuple(sent),
                )
            ]
        )
        assert isinstance(verdict, Verdict)
        tokens.extend(verdict.tokens)
    return tuple(tokens)


@pytest.mark.parametrize("name", ["near", "argmax drafts", "min_p, short list", "disjoint", "no drafts"])
def test_many_sessions_are_one_by_one(name: str) -> None:
    outcomes = CASES[name].decode()
    for seed in range(60):
        assert one_by_one(CASES[name], seed) == tuple(outcomes[seed].tolist())
