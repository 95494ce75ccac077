"""How often the outcome of a round is among those that the drafter holds likely, on a real pair.

An outcome is how many drafts of a block are accepted, and the token that the target emits after them. Drafter and
target take turns in one process; at each position of a block the drafter notes its best candidates with the noise that
it shares with the target, the position after the block included. So each round tells at which place the outcome stands
in a ranking of all (position, candidate) pairs, and how often it is among the first n of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from bench.lossless import chat_prompts
from paceline.benchmark.prompts import Prompt
from paceline.drafting.draft_runner import DraftRunner, Feed
from paceline.drafting.onnx_runner import OnnxDraftRunner
from paceline.drafting.outcomes import Outcome, likeliest_outcomes
from paceline.drafting.rows import rows_to_keep
from paceline.engine.draft_candidates import draft_candidates
from paceline.engine.load_runner import load_runner
from paceline.engine.local import LocalRequest, generate
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.sampling import DraftRow
from paceline.engine.target import TargetEngine
from paceline.messages import SamplingParams
from paceline.model_source import resolve
from paceline.quantize import Bits, quantize
from paceline.speculation.noise import gumbel, noise_keys
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

NUM_CANDIDATES = 12
"""Noted at each position, the draft itself included."""
NUM_OUTCOMES = (0, 1, 2, 4, 8, 12, 16)
MODES = {
    "greedy": SamplingParams(temperature=0.0, ignore_eos=True),
    "temperature 1": SamplingParams(temperature=1.0, ignore_eos=True),
}
_SHARPNESS = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""By how much scores are multiplied before they count as logits of what the target takes, which is close by."""
_MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that the drafter holds possible.

    Attributes:
        token: its id.
        prob: the drafter's own probability of it.
        score: the logarithm of that plus the noise of its position.
    """

    token: int
    prob: float
    score: float


@dataclass(frozen=True, slots=True)
class Round:
    """One round.

    Attributes:
        prompt: index of its prompt.
        places: candidates of each position of the block and of the one after it, best first.
        accepted: drafts that the target agreed with.
        token: what it emitted after them.
    """

    prompt: int
    places: tuple[tuple[Candidate, ...], ...]
    accepted: int
    token: int

    @property
    def rank(self) -> int | None:
        """Place of that token among the candidates of its position; None where it is not one of them."""
        tokens = [candidate.token for candidate in self.places[self.accepted]]
        return tokens.index(self.token) if self.token in tokens else None


class Ranking(Enum):
    """How outcomes are ordered behind the likeliest one: that all is accepted and the guess is right."""

    PLACE = "position and rank"
    """`likeliest_outcomes`: knows no text and learns nothing."""
    SHARE = "acceptance x drafter's share"
    """Measured acceptance, and the drafter's probability of the candidate among those that the draft is not."""
    SCORE = "the drafter's scores"
    """The drafter's noisy scores, sharpened, for both."""


@dataclass(frozen=True, slots=True)
class Position:
    """What happens at one position of a block.

    Attributes:
        stops: share of rounds that end here.
        second: of those, how often the token is the drafter's best one but the draft; after the block, its best.
        among_2: how often it is among the best two such.
        among_4: among four.
        among_8: among eight.
    """

    stops: float
    second: float
    among_2: float
    among_4: float
    among_8: float


@dataclass(frozen=True, slots=True)
class Hits:
    """One drafter in one mode.

    Attributes:
        acceptance: how often a draft that was reached is the target's own token.
        tokens_per_round: accepted and one more.
        num_rounds: that were counted.
        positions: what happens at each, the one after the block last.
        by_rank: how often a candidate of each rank is the target's token where the draft is not, from rank 1 on.
        hit_rate: share of rounds whose outcome is prepared, by ranking, and by the number of outcomes that are besides
            the guess behind the whole block.
        chances: of `likeliest_outcomes`, by that number: how often the outcome is among them, by accepted drafts;
            where all were accepted, of the cases in which the guess was wrong.
    """

    drafter: str
    mode: str
    num_draft_tokens: int
    acceptance: float
    tokens_per_round: float
    num_rounds: int
    positions: tuple[Position, ...]
    by_rank: tuple[float, ...]
    hit_rate: dict[str, dict[int, float]]
    chances: dict[int, tuple[float, ...]]


class Pair:
    """A target and a drafter in one process.

    Args:
        target: reference of the model; the drafter is a quantised copy of it.
        bits: width of the copy's weights.
        prompts: what is continued.
        max_tokens: new tokens of each.
    """

    def __init__(self, target: str, bits: Bits, prompts: Sequence[Prompt], max_tokens: int) -> None:
        folder = resolve(target, progress=print)
        self._ids = chat_prompts(folder, [prompt.text for prompt in prompts])
        self._max_tokens = max_tokens
        runner = load_runner(folder, options=RunnerOptions(kv_bytes=128 << 20, max_model_len=_MAX_MODEL_LEN))
        self._engine = TargetEngine(runner, eos_token_ids=runner.eos_token_ids)
        copy = quantize(target, bits=bits, progress=print)
        self._drafter: DraftRunner = OnnxDraftRunner(copy, kv_bytes=64 << 20, max_model_len=_MAX_MODEL_LEN)

    def rounds(self, sampling: SamplingParams, num_draft_tokens: int) -> list[Round]:
        """All rounds with a whole block."""
        found: list[Round] = []
        for index, ids in enumerate(self._ids):
            watch = _Watch(self._drafter, index, len(ids), sampling, num_draft_tokens)
            generate(self._engine, [LocalRequest(ids, sampling, self._max_tokens, num_draft_tokens, watch)])
            found += watch.rounds
        return found


class _Watch:
    """Proposes the blocks of one generation and notes what becomes of them."""

    def __init__(self, drafter: DraftRunner, prompt: int, start: int, sampling: SamplingParams, depth: int) -> None:
        self._drafter, self._prompt, self._start, self._sampling, self._depth = drafter, prompt, start, sampling, depth
        self._fed: list[int] = []
        self._before: tuple[int, tuple[tuple[Candidate, ...], ...]] | None = None
        self.rounds: list[Round] = []
        drafter.open("session")

    def __call__(self, context: Sequence[int], max_depth: int) -> DraftTree:
        if self._before is not None:
            length, before = self._before
            self.rounds.append(Round(self._prompt, before, len(context) - length - 1, context[-1]))
            self._before = None
        if max_depth < self._depth:
            return EMPTY_BLOCK
        drafted: list[int] = []
        places: tuple[tuple[Candidate, ...], ...] = ()
        while len(places) <= self._depth:
            places += (self._candidates(context, drafted),)
            drafted.append(places[-1][0].token)
        self._before = len(context), places
        return DraftTree.chain(drafted[: self._depth])

    def _candidates(self, context: Sequence[int], drafted: Sequence[int]) -> tuple[Candidate, ...]:
        tokens = [*context, *drafted]
        (result,) = self._drafter.forward([Feed("session", tokens, rows_to_keep(self._fed, tokens))])
        while self._drafter.rows("session") < len(tokens):
            (result,) = self._drafter.forward([Feed("session", tokens, self._drafter.rows("session"))])
        self._fed = tokens
        if result.logits is None:
            raise RuntimeError(f"the drafter failed: {result.error}")
        logits = result.logits
        row = DraftRow(self._sampling, context, drafted, self._start)
        (best,) = draft_candidates(logits, [row], num=NUM_CANDIDATES, vocab_size=logits.shape[1])
        noise = torch.zeros(len(best), dtype=torch.float64)
        if not self._sampling.greedy:
            keys = noise_keys([self._sampling.seed], [len(tokens)])
            noise = gumbel(keys, torch.tensor([choice.token for choice in best]))[0]
        return tuple(
            Candidate(choice.token, choice.confidence, math.log(max(choice.confidence, 1e-30)) + more)
            for choice, more in zip(best, noise.tolist(), strict=True)
        )


def hits(drafter: str, mode: str, rounds: Sequence[Round]) -> Hits:
    """Counts."""
    depth = len(rounds[0].places) - 1
    others = [one.rank for one in rounds if one.rank != 0]
    places = {ranking: _outcome_places(rounds, ranking) for ranking in Ranking}
    return Hits(
        drafter=drafter,
        mode=mode,
        num_draft_tokens=depth,
        acceptance=_acceptance(rounds),
        tokens_per_round=sum(one.accepted + 1 for one in rounds) / len(rounds),
        num_rounds=len(rounds),
        positions=tuple(_position(rounds, index) for index in range(depth + 1)),
        by_rank=tuple(others.count(rank) / len(others) for rank in range(1, NUM_CANDIDATES)),
        hit_rate={
            ranking.value: {num: _within(found, num) for num in NUM_OUTCOMES} for ranking, found in places.items()
        },
        chances={num: tuple(_chance(rounds, index, num) for index in range(depth + 1)) for num in NUM_OUTCOMES},
    )


def _position(rounds: Sequence[Round], index: int) -> Position:
    ranks = [one.rank for one in rounds if one.accepted == index]
    first = 0 if index == len(rounds[0].places) - 1 else 1

    def among(num: int) -> float:
        return sum(rank is not None and rank < first + num for rank in ranks) / max(len(ranks), 1)

    return Position(len(ranks) / len(rounds), among(1), among(2), among(4), among(8))


def _chance(rounds: Sequence[Round], position: int, num: int) -> float:
    prepared = [outcome.rank for outcome in _likeliest(rounds, num) if outcome.position == position]
    ranks = [one.rank for one in rounds if one.accepted == position and one.rank != 0]
    return sum(rank in prepared for rank in ranks) / max(len(ranks), 1)


def _likeliest(rounds: Sequence[Round], num: int) -> tuple[Outcome, ...]:
    return likeliest_outcomes(len(rounds[0].places) - 1, num)


def _acceptance(rounds: Sequence[Round]) -> float:
    judged = sum(min(one.accepted + 1, len(one.places) - 1) for one in rounds)
    return sum(one.accepted for one in rounds) / judged


def _within(places: Sequence[int | None], num: int) -> float:
    """Share of outcomes that are the guess or one of the first `num` besides."""
    return sum(place is not None and place <= num for place in places) / len(places)


def _outcome_places(rounds: Sequence[Round], ranking: Ranking) -> list[int | None]:
    """Where the outcome of each round stands; what the ranking has to know comes from the other half of the prompts."""
    found: list[int | None] = []
    for half in (0, 1):
        learned = [one for one in rounds if one.prompt % 2 != half] or rounds
        acceptance = _acceptance(learned)
        sharpness = 1.0
        if ranking is Ranking.SCORE:
            sharpness = max(
                _SHARPNESS,
                key=lambda value: _within([_outcome_place(one, ranking, 0.0, value) for one in learned], 8),
            )
        found += [_outcome_place(one, ranking, acceptance, sharpness) for one in rounds if one.prompt % 2 == half]
    return found


def _outcome_place(one: Round, ranking: Ranking, acceptance: float, sharpness: float) -> int | None:
    """0 for the guess, else how many outcomes stand before the one that came, the guess included; None for none."""
    depth = len(one.places) - 1
    if (one.accepted, one.rank) == (depth, 0):
        return 0
    if one.rank is None:
        return None
    if ranking is Ranking.PLACE:
        ordered = list(likeliest_outcomes(depth, len(one.places) * NUM_CANDIDATES))
    else:
        weighed = _weighed(one, None if ranking is Ranking.SCORE else acceptance, sharpness)
        ordered = sorted(weighed, key=lambda outcome: -weighed[outcome])
    outcome = Outcome(one.accepted, one.rank)
    return ordered.index(outcome) + 1 if outcome in ordered else None


def _weighed(one: Round, acceptance: float | None, sharpness: float) -> dict[Outcome, float]:
    """Chances of all outcomes but the guess; without an acceptance the drafter's scores tell that too."""
    weights: dict[Outcome, float] = {}
    reached = 1.0
    for position, candidates in enumerate(one.places):
        if acceptance is None:
            powers = [math.exp(sharpness * (candidate.score - candidates[0].score)) for candidate in candidates]
            agrees, others = powers[0] / sum(powers), powers[1:]
        else:
            agrees, others = acceptance, [candidate.prob for candidate in candidates[1:]]
        whole = sum(others) or 1.0
        for rank, other in enumerate(others, start=1):
            weights[Outcome(position, rank)] = reached * (1.0 - agrees) * other / whole
        reached *= agrees
    return weights
