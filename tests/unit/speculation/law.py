"""Toy laws with exact answers, and the statistics that compare draws with them.

`reference_distribution` is written from the meaning of the parameters, in plain floats and loops, and shares no code
with the sampler.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from scipy import stats  # type: ignore[import-untyped]

from paceline.messages import SamplingParams
from paceline.speculation.noise import _GAMMA, _SALTS, NoiseStream, _mix_, _signed

P_VALUE = 0.001
"""A correct sampler fails a test at this level once in a thousand choices of its fixed seed."""

Tokens = tuple[int, ...]


def fit_p_value(counts: Iterable[float], probs: Iterable[float]) -> float:
    """p-value of the chi-square test that counts follow probs; cells expected fewer than 10 times are joined."""
    counts, probs = list(counts), list(probs)
    total = sum(counts)
    observed: list[float] = []
    expected: list[float] = []
    rare_observed = rare_expected = 0.0
    for count, prob in zip(counts, probs, strict=True):
        if prob <= 0.0:
            if count:
                return 0.0  # what cannot happen has happened
        elif prob * total < 10:
            rare_observed += count
            rare_expected += prob * total
        else:
            observed.append(count)
            expected.append(prob * total)
    if rare_expected > 0:
        observed.append(rare_observed)
        expected.append(rare_expected)
    scale = total / sum(expected)
    return float(stats.chisquare(observed, [value * scale for value in expected]).pvalue)


def fit_outcomes(outcomes: Counter[Tokens], law: dict[Tokens, float]) -> float:
    """p-value of the chi-square test that whole outcomes follow their law."""
    impossible = set(outcomes) - set(law)
    return 0.0 if impossible else fit_p_value([outcomes[o] for o in law], law.values())


def total_variation(counts: Sequence[float], probs: Sequence[float]) -> float:
    """Distance between an observed and an exact law."""
    total = sum(counts)
    return sum(abs(count / total - prob) for count, prob in zip(counts, probs, strict=True)) / 2


def uniform_p_value(values: torch.Tensor, bins: int) -> float:
    """p-value of the chi-square test that values in (0, 1) are uniform."""
    counts = torch.bincount((values.flatten() * bins).long(), minlength=bins).tolist()
    return fit_p_value(counts, [1 / bins] * bins)


def pair_p_value(left: torch.Tensor, right: torch.Tensor, bins: int = 16) -> float:
    """p-value of the chi-square test that pairs of values in (0, 1) are uniform and independent."""
    cells = (left.flatten() * bins).long() * bins + (right.flatten() * bins).long()
    return fit_p_value(torch.bincount(cells, minlength=bins * bins).tolist(), [1 / bins**2] * bins**2)


def ks_p_value(values: torch.Tensor, name: str) -> float:
    """p-value of the Kolmogorov-Smirnov test that values follow the named law of scipy."""
    return float(stats.kstest(values.flatten().numpy(), name).pvalue)


def many_keys(draws: int, position: int, stream: NoiseStream = NoiseStream.SAMPLE, first_seed: int = 0) -> torch.Tensor:
    """`noise_keys` of neighbouring seeds at one position, in a hundredth of its time. # [draws] int64."""
    seeds = torch.arange(first_seed, first_seed + draws)
    return _mix_(_mix_(seeds ^ _signed(_SALTS[stream])) + _signed((position + 1) * _GAMMA))


class ToyModel:
    """A language model of a few tokens whose logits are an arbitrary fixed function of the whole prefix."""

    def __init__(self, vocab_size: int, seed: int, spread: float = 1.5) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self._spread = spread
        self._rows: dict[Tokens, torch.Tensor] = {}

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        """Logits after a prefix. # [vocab_size] float32."""
        key = tuple(prefix)
        if key not in self._rows:
            code = functools.reduce(
                lambda state, token: (state * 1_000_003 + token + 2) % (2**61 - 1), key, self._seed + 1
            )
            generator = torch.Generator().manual_seed(code)
            self._rows[key] = torch.randn(self.vocab_size, generator=generator) * self._spread
        return self._rows[key]

    def blurred(self, amount: float) -> ToyModel:
        """A drafter for this target: its logits plus fixed errors of the given size."""
        return _BlurredModel(self, amount)

    def law(self, sampling: SamplingParams, length: int, committed: Tokens = ()) -> dict[Tokens, float]:
        """Exact probability of every continuation of the given length."""
        if length == 0:
            return {(): 1.0}
        first = reference_distribution(self.logits(committed).tolist(), sampling)
        return {
            (token, *rest): prob * rest_prob
            for token, prob in enumerate(first)
            if prob > 0
            for rest, rest_prob in self.law(sampling, length - 1, (*committed, token)).items()
        }


class _BlurredModel(ToyModel):
    def __init__(self, target: ToyModel, amount: float) -> None:
        super().__init__(target.vocab_size, target._seed + 1_000_000, amount)
        self._target = target

    def logits(self, prefix: Sequence[int]) -> torch.Tensor:
        return self._target.logits(prefix) + super().logits(prefix)


def reference_distribution(
    logits: Sequence[float],
    sampling: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos_token_ids: Sequence[int] = (),
) -> list[float]:
    """The distribution that a request asks for after the given prompt and output."""
    values = [value + sampling.logit_bias.get(token, 0.0) for token, value in enumerate(logits)]
    in_output = Counter(output)
    for token in {*prompt, *output}:
        if token < len(values):
            factor = sampling.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token, count in in_output.items():
        if token < len(values):
            values[token] -= sampling.frequency_penalty * count + sampling.presence_penalty
    if len(output) < sampling.min_tokens:
        for token in {*eos_token_ids, *sampling.stop_token_ids}:
            if token < len(values):
                values[token] = -math.inf
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if sampling.temperature < 1e-5:
        return [float(token == order[0]) for token in range(len(values))]
    best = values[order[0]]
    weights = {token: math.exp((values[token] - best) / sampling.temperature) for token in order}
    if sampling.top_k:
        weights = dict(list(weights.items())[: sampling.top_k])
    if sampling.top_p < 1.0:
        total, reached, kept = sum(weights.values()), 0.0, {}
        for token, weight in weights.items():
            kept[token] = weight
            reached += weight
            if reached >= sampling.top_p * total:
                break
        weights = kept
    weights = {token: weight for token, weight in weights.items() if weight >= sampling.min_p}
    total = sum(weights.values())
    return [weights.get(token, 0.0) / total for token in range(len(values))]
