"""The law of the verify step: whatever is drafted, what comes out follows the target's own distribution.

A test draws 100,000 sessions that differ in their seed, decodes three tokens of each in rounds of draft and verify, and
compares the outcomes with the exact law of the toy target. For speed, sessions with the same committed tokens and the
same block go through the sampler together; `test_many_sessions_are_judged_as_one_is` shows that this is what `judge`
does.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import lru_cache

import pytest
import torch

from paceline.engine.judging import JudgeRequest, Verdict, judge, node_paths
from paceline.engine.processors import Shaping
from paceline.messages import SamplingParams
from paceline.speculation.acceptance import match
from paceline.speculation.noise import NoiseStream, keyed_argmax
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.unit.speculation.law import P_VALUE, Tokens, ToyModel, fit_outcomes, fit_p_value, many_keys, total_variation

DRAWS = 100_000
LENGTH = 3


@lru_cache(maxsize=16)
def keys_of(first_seed: int, draws: int, position: int) -> torch.Tensor:
    return many_keys(draws, position, first_seed=first_seed)


class ManySessions:
    """Sessions of one toy target that differ in their seed: session i has seed first_seed + i."""

    def __init__(self, target: ToyModel, sampling: SamplingParams, *, first_seed: int = 0, draws: int = DRAWS) -> None:
        self.target, self.sampling, self.first_seed, self.draws = target, sampling, first_seed, draws

    def samples(self, model: ToyModel, prefix: Tokens, members: torch.Tensor) -> torch.Tensor:
        """What the model's sampler says after `prefix` in some sessions. # [members] -> [members]."""
        shaping = Shaping.of(self.sampling)
        assert shaping is not None
        keys = keys_of(self.first_seed, self.draws, len(prefix))[members]
        return shaping.choose((model.logits(prefix) / self.sampling.temperature).expand(len(keys), -1), keys)

    def verify(
        self, committed: Tokens, tree: DraftTree, members: torch.Tensor
    ) -> Iterator[tuple[Tokens, torch.Tensor]]:
        """Judges one block in some sessions: (new tokens, the sessions that get them)."""
        samples = torch.stack([self.samples(self.target, (*committed, *path), members) for path in node_paths(tree)])
        for columns, at_nodes in group_by(samples):
            yield match(tree, at_nodes.__getitem__).tokens, members[columns]

    def decode(self, drafter: Drafter) -> dict[Tokens, torch.Tensor]:
        """Decodes all sessions: outcome -> the sessions that have it."""
        waiting: dict[Tokens, list[torch.Tensor]] = {(): [torch.arange(self.draws)]}
        while unfinished := [prefix for prefix in waiting if len(prefix) < LENGTH]:
            for committed in unfinished:
                members = torch.cat(waiting.pop(committed))
                for tree, part in drafter(self, committed, members):
                    block = tree.crop_depth(LENGTH - len(committed) - 1)
                    for tokens, owners in self.verify(committed, block, part):
                        waiting.setdefault(committed + tokens, []).append(owners)
        return {outcome: torch.cat(parts) for outcome, parts in waiting.items()}

    def outcomes(self, drafter: Drafter) -> Counter[Tokens]:
        return Counter({outcome: len(members) for outcome, members in self.decode(drafter).items()})


Drafter = Callable[[ManySessions, Tokens, torch.Tensor], Iterator[tuple[DraftTree, torch.Tensor]]]
"""Drafts after the committed tokens in some sessions: (block, the sessions that get it)."""


def group_by(rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, list[int]]]:
    """Groups equal columns: (their indices, the column). # [n, members]."""
    code = torch.zeros(rows.shape[1], dtype=torch.int64)
    for row in rows:
        code = code * 16 + row
    order = code.argsort()
    _, sizes = torch.unique_consecutive(code[order], return_counts=True)
    for indices in torch.tensor_split(order, sizes.cumsum(0)[:-1]):
        yield indices, rows[:, indices[0]].tolist()


def no_draft(
    sessions: ManySessions, committed: Tokens, members: torch.Tensor
) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    yield EMPTY_BLOCK, members


def good(sessions: ManySessions, committed: Tokens, members: torch.Tensor) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    """A chain of the best tokens of a model that is nearly the target."""
    drafter, tokens = sessions.target.blurred(0.5), committed
    for _ in range(2):
        tokens = (*tokens, int(drafter.logits(tokens).argmax()))
    yield DraftTree.chain(tokens[len(committed) :]), members


def sharing_noise(
    sessions: ManySessions, committed: Tokens, members: torch.Tensor
) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    """Chains of two samples of another model, drawn with the target's own noise."""
    drafter = sessions.target.blurred(1.0)
    first = sessions.samples(drafter, committed, members)
    for indices, (token,) in group_by(first.unsqueeze(0)):
        second = sessions.samples(drafter, (*committed, token), members[indices])
        for rest, (last,) in group_by(second.unsqueeze(0)):
            yield DraftTree.chain((token, last)), members[indices][rest]


def bad(sessions: ManySessions, committed: Tokens, members: torch.Tensor) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    """Random chains that know nothing."""
    rng = random.Random(len(committed))
    size = sessions.target.vocab_size
    for part in members.chunk(12):
        yield DraftTree.chain([rng.randrange(size) for _ in range(rng.randrange(4))]), part


def adversarial(
    sessions: ManySessions, committed: Tokens, members: torch.Tensor
) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    """Looks at the target's sample and proposes it only when that is token 0, else something that it is not."""
    for indices, (token,) in group_by(sessions.samples(sessions.target, committed, members).unsqueeze(0)):
        chain = (0, 0) if token == 0 else ((token + 1) % sessions.target.vocab_size, 0)
        yield DraftTree.chain(chain), members[indices]


def siblings(
    sessions: ManySessions, committed: Tokens, members: torch.Tensor
) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    """Paths ab, ac, ad, ba: three children under one node, and another branch beside it."""
    yield DraftTree.from_paths([(0, 1), (0, 2), (0, 3), (1, 0)]), members


def deep(sessions: ManySessions, committed: Tokens, members: torch.Tensor) -> Iterator[tuple[DraftTree, torch.Tensor]]:
    """Random trees of up to four paths."""
    rng = random.Random(len(committed))
    size = sessions.target.vocab_size
    for part in members.chunk(8):
        yield DraftTree.from_paths([[rng.randrange(size) for _ in range(2)] for _ in range(rng.randrange(1, 5))]), part


CASES: dict[str, tuple[int, SamplingParams, Drafter]] = {
    "plain": (5, SamplingParams(), no_draft),
    "good chain": (4, SamplingParams(), good),
    "good chain, wide vocabulary": (16, SamplingParams(temperature=0.7), good),
    "chain sharing the noise": (4, SamplingParams(temperature=1.0), sharing_noise),
    "chain sharing the noise, truncated": (8, SamplingParams(temperature=0.7, top_p=0.9), sharing_noise),
    "bad chain": (5, SamplingParams(temperature=1.5), bad),
    "adversarial chain": (4, SamplingParams(temperature=1.0), adversarial),
    "adversarial chain, truncated": (6, SamplingParams(temperature=1.3, top_p=0.8, top_k=4), adversarial),
    "siblings": (4, SamplingParams(temperature=0.5), siblings),
    "deep trees": (4, SamplingParams(temperature=1.0), deep),
    "deep trees, truncated": (6, SamplingParams(temperature=0.8, min_p=0.1, top_p=0.95), deep),
}


@pytest.mark.parametrize("name", CASES)
def test_law_is_the_targets(name: str) -> None:
    vocab_size, sampling, drafter = CASES[name]
    number = list(CASES).index(name)
    target = ToyModel(vocab_size, seed=number)
    sessions = ManySessions(target, sampling, first_seed=number * 1_000_000)
    assert fit_outcomes(sessions.outcomes(drafter), target.law(sampling, LENGTH)) > P_VALUE


def test_drafters_do_not_change_a_single_token() -> None:
    sessions = ManySessions(ToyModel(4, seed=3), SamplingParams(), draws=5000)

    def by_session(drafter: Drafter) -> dict[int, Tokens]:
        return {m: outcome for outcome, members in sessions.decode(drafter).items() for m in members.tolist()}

    plain = by_session(no_draft)
    assert len(plain) == 5000
    for drafter in (good, sharing_noise, bad, adversarial, siblings, deep):
        assert by_session(drafter) == plain


def test_many_sessions_are_judged_as_one_is() -> None:
    target = ToyModel(6, seed=5)
    sampling = SamplingParams(temperature=0.9, top_p=0.9)
    sessions = ManySessions(target, sampling, first_seed=70, draws=400)
    tree = DraftTree.from_paths([[0, 1], [0, 2], [3, 4], [5, 5]])
    logits = torch.stack([target.logits(path) for path in node_paths(tree)])
    for tokens, members in sessions.verify((), tree, torch.arange(400)):
        for session in members.tolist():
            params = SamplingParams(temperature=0.9, top_p=0.9, seed=70 + session)
            (verdict,) = judge([JudgeRequest(logits, tree, (), 0, params, 6)])
            assert isinstance(verdict, Verdict)
            assert verdict.tokens == tokens


class TestBiasedVariants:
    """Verify steps that look right and are not: the same test must refuse them."""

    TARGET = ToyModel(4, seed=6)
    LAW = tuple(TARGET.law(SamplingParams(), 1).values())

    def test_fresh_noise_for_every_sibling(self) -> None:
        """Siblings compared one after another, each with a new draw of the target: they come out too often."""
        logits = self.TARGET.logits(()).expand(DRAWS, -1)
        draws = [
            keyed_argmax(logits, many_keys(DRAWS, 0, stream))
            for stream in (NoiseStream.SAMPLE, NoiseStream.RATIO_DRAFT, NoiseStream.RATIO_ACCEPT)
        ]
        tokens = draws[-1]
        for sibling, draw in reversed(list(enumerate(draws))):
            tokens = torch.where(draw == sibling, draw, tokens)
        counts = torch.bincount(tokens, minlength=4).tolist()
        assert fit_p_value(counts, self.LAW) < 1e-9
        assert total_variation(counts, self.LAW) > 0.05

        tree = DraftTree((0, 1, 2), (0, 0, 0))
        right = torch.tensor([match(tree, [draw, 0, 0, 0].__getitem__).tokens[0] for draw in range(4)])[draws[0]]
        assert fit_p_value(torch.bincount(right, minlength=4).tolist(), self.LAW) > P_VALUE

    def test_keeping_drafts_that_the_target_finds_likely(self) -> None:
        """Typical acceptance: a draft stays because it is likely enough, not because the target chose it."""
        draws = keyed_argmax(self.TARGET.logits(()).expand(DRAWS, -1), keys_of(0, DRAWS, 0))
        draft = max(range(4), key=self.LAW.__getitem__)
        tokens = torch.where(torch.arange(DRAWS) % 4 == 0, draft, draws)  # a drafter that proposes it now and then
        assert fit_p_value(torch.bincount(tokens, minlength=4).tolist(), self.LAW) < 1e-9

    def test_noise_that_forgets_the_position(self) -> None:
        """One noise for all positions: every token alone is right, but they are not independent."""
        target, outcomes = ToyModel(4, seed=7), defaultdict[Tokens, int](int)
        first = keyed_argmax(target.logits(()).expand(DRAWS, -1), keys_of(0, DRAWS, 0))
        second = keyed_argmax(torch.stack([target.logits((t,)) for t in range(4)])[first], keys_of(0, DRAWS, 0))
        for _, (one, two) in group_by(torch.stack([first, second])):
            outcomes[one, two] = int(((first == one) & (second == two)).sum())
        assert fit_outcomes(Counter(outcomes), target.law(SamplingParams(), 2)) < 1e-9


def test_half_and_half_over_siblings() -> None:
    """Paths ab, ac, ad, ef and a target that says a and e each half of the time: one draw decides, not three."""
    a, b, c, d, e, f = range(6)
    tree = DraftTree.from_paths([[a, b], [a, c], [a, d], [e, f]])
    logits = torch.zeros(7, 6)
    logits[0] = torch.tensor([0.0, -1e4, -1e4, -1e4, 0.0, -1e4])
    draws = keyed_argmax(logits[:1].expand(DRAWS, -1), keys_of(0, DRAWS, 5)).tolist()
    first = {draw: match(tree, [draw, *[f] * 6].__getitem__).tokens[0] for draw in set(draws)}
    counts = Counter(first[draw] for draw in draws)
    assert set(counts) == {a, e}
    assert fit_p_value([counts[a], counts[e]], [0.5, 0.5]) > P_VALUE
    for seed in range(200):
        (verdict,) = judge([JudgeRequest(logits, tree, [9] * 5, 5, SamplingParams(seed=seed), 6)])
        assert isinstance(verdict, Verdict)
        assert verdict.tokens[0] == draws[seed]
