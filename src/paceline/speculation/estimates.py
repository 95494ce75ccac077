"""What the governor knows, learned from what it is told: times, and how many drafts the target accepts. Pure Python.

| estimate | of | learns from |
|---|---|---|
| `Level` | one number that drifts | samples, the newest count most |
| `LinearTime` | seconds of a pass or a draft over its tokens | pairs (tokens, seconds) |
| `ChainAcceptance` | expected tokens of a chain of any length | places that were judged |
| `TreeGain` | expected tokens of the first nodes of a tree | nodes that were judged |

No clock and no chance: the same samples in the same order give the same estimates.
"""

from __future__ import annotations

from collections.abc import Sequence

_CLIP = 3.0
"""A sample further than this factor from what was expected counts as if it were no further: a pause is not a trend."""
_NO_PAUSE = 1.5
"""So many samples in a row beyond that are no pause: two, or half of the second where several tell of each."""
NEWEST_SHARE = 1.0 / 32.0
"""Of what a session knows of its acceptance, what its newest verdict replaces."""
_OTHERS_WEIGHT = 32.0
"""What others have seen counts for so many judgements."""


class Level:
    """A running mean of non-negative numbers.

    Args:
        window: number of samples that the mean looks back on.

    Attributes:
        value: the mean; None before the first sample.
    """

    __slots__ = ("_count", "_window", "value")

    def __init__(self, window: float) -> None:
        self._window = window
        self._count = 0.0
        self.value: float | None = None

    def observe(self, sample: float, weight: float = 1.0) -> None:
        """Adds a sample; one that is told by several counts with less than 1."""
        self._count = min(self._count + weight, self._window)
        old = self.value
        self.value = sample if old is None else old + min(weight / self._count, 1.0) * (sample - old)

    def get(self, default: float) -> float:
        """The mean, or `default` before the first sample."""
        return default if self.value is None else self.value


class LinearTime:
    """Seconds as a line over tokens: a fixed part and a part per token, neither of them negative.

    The line goes through the running mean of the samples. Its slope comes from how far samples lie from that mean, and
    is forgotten only as fast as new samples tell about it: a thousand samples of one size leave it as it was. Before
    any spread was seen it is `prior_share` of the line from the origin through the mean.

    Args:
        window: samples that the mean looks back on.
        prior_share: 0 for a time that is thought fixed, 1 for one that is thought proportional to the tokens.
    """

    __slots__ = (
        "_count",
        "_covariance",
        "_far",
        "_mean_seconds",
        "_mean_tokens",
        "_prior_share",
        "_slope",
        "_spread",
        "_window",
    )

    _SLOPE_WINDOW = 24.0
    """Number of samples at a distance of the mean itself that the slope looks back on."""
    _PRIOR_WEIGHT = 0.02
    """Weight of the prior slope against these; half a token's distance at four tokens outweighs it."""

    def __init__(self, window: float, prior_share: float) -> None:
        self._window = window
        self._prior_share = prior_share
        self._count = 0.0
        self._far = 0.0
        self._mean_tokens = 0.0
        self._mean_seconds = 0.0
        self._spread = 0.0
        self._covariance = 0.0
        self._slope: float | None = None  # computed when it is asked for: a comparison asks hundreds of times

    @property
    def known(self) -> bool:
        """Whether there was a sample."""
        return self._count > 0

    @property
    def per_token_s(self) -> float:
        """Seconds per further token, at least 0 and at most what leaves a fixed part of 0."""
        if self._slope is None:
            self._slope = self._find_slope()
        return self._slope

    def _find_slope(self) -> float:
        if not self.known or self._mean_tokens <= 0:
            return 0.0
        steepest = self._mean_seconds / self._mean_tokens
        prior_weight = self._PRIOR_WEIGHT * self._mean_tokens**2
        slope = (self._covariance + prior_weight * self._prior_share * steepest) / (self._spread + prior_weight)
        return min(max(slope, 0.0), steepest)

    def at(self, tokens: float) -> float:
        """Seconds that so many tokens take; 0 before the first sample."""
        return self._mean_seconds + self.per_token_s * (tokens - self._mean_tokens)

    def observe(self, tokens: float, seconds: float, weight: float = 1.0) -> None:
        """Adds a sample of positive tokens; one that is told by several counts with less than 1."""
        if tokens <= 0 or seconds <= 0:
            return
        seconds = self._clipped(tokens, seconds, weight)
        self._slope = None
        self._count = min(self._count + weight, self._window)
        share = min(weight / self._count, 1.0)
        tokens_off, seconds_off = tokens - self._mean_tokens, seconds - self._mean_seconds
        self._mean_tokens += share * tokens_off
        self._mean_seconds += share * seconds_off
        if share == 1.0:
            return
        # What a sample tells of the slope grows with the square of its distance; so does what it makes forgotten.
        told = weight * (1.0 - share) * tokens_off**2
        kept = 1.0 - min(told / (self._SLOPE_WINDOW * self._mean_tokens**2), 0.5)
        self._spread = kept * self._spread + told
        self._covariance = kept * self._covariance + weight * (1.0 - share) * tokens_off * seconds_off

    def _clipped(self, tokens: float, seconds: float, weight: float) -> float:
        if not self.known:
            return seconds
        expected = max(self.at(tokens), self._mean_seconds / _CLIP)
        clipped = min(max(seconds, expected / _CLIP), expected * _CLIP)
        self._far = self._far + weight if clipped != seconds else 0.0
        if self._far >= _NO_PAUSE:
            # Twice is no pause: the machine or its load has changed, and the whole line with it.
            change = seconds / expected
            self._mean_seconds *= change
            self._covariance *= change
            self._far = 0.0
            return seconds
        return clipped


class _Judgements:
    """How often each place of a block was on the accepted path, of the times that it was judged."""

    __slots__ = ("_hits", "_weights")

    def __init__(self) -> None:
        self._weights: list[float] = []
        self._hits: list[float] = []

    def wear(self, kept: float) -> None:
        """Lets what is known count for a share of what it did."""
        self._weights = [kept * weight for weight in self._weights]
        self._hits = [kept * hits for hits in self._hits]

    def _grow(self, num_places: int) -> None:
        grow = num_places - len(self._weights)
        self._weights.extend([0.0] * grow)
        self._hits.extend([0.0] * grow)

    def unlike(self, others: Sequence[float]) -> float:
        """How far what was seen is from what others have, squared, in standard deviations of chance."""
        off, variance = 0.0, 0.0
        for hits, weight, probability in zip(self._hits, self._weights, others, strict=False):
            off += hits - weight * probability
            variance += weight * probability * (1.0 - probability)
        return off * off / variance if variance > 0.0 else 0.0

    def _others_weight(self, others: Sequence[float]) -> float:
        """Judgements for which those of others count: less the more unlike they are."""
        return _OTHERS_WEIGHT / (1.0 + self.unlike(others))


class ChainAcceptance(_Judgements):
    """How likely each draft of a chain is accepted, given that those before it are.

    Only places that were judged count: of a chain of `depth` with `accepted` drafts the first `accepted`, and the one
    after them if the chain is that long. A short chain that was accepted as a whole says nothing of later places. They
    are thought to be like the place before them, the more so the longer ago they were judged last.
    """

    __slots__ = ()

    _PRIOR = 0.7
    _PRIOR_WEIGHT = 1.0

    def observe(self, depth: int, accepted: int, share: float = NEWEST_SHARE) -> None:
        """Adds a verdict on a chain of `depth` drafts, the first `accepted` of which were right.

        Args:
            depth: drafts of the chain.
            accepted: how many were right.
            share: of what was known, that it replaces.
        """
        judged = min(accepted + 1, depth)
        self._grow(judged)
        self.wear(1.0 - share)
        for place in range(judged):
            self._weights[place] += 1.0
            self._hits[place] += 1.0 if place < accepted else 0.0

    def conditional(self, num_places: int, others: Sequence[float] = ()) -> tuple[float, ...]:
        """For each place, from the first: the probability that its draft is accepted if those before it are.

        Args:
            num_places: how many.
            others: the same of others: it counts for much as long as what was seen here may be the same with luck. Who
                does worse than others at one place is thought to do so at the next.
        """
        probabilities: list[float] = []
        probability, worse = self._PRIOR, 1.0
        others_weight = self._others_weight(others)
        for place in range(num_places):
            prior, prior_weight = probability, self._PRIOR_WEIGHT
            if place < len(others):
                prior, prior_weight = min(worse * others[place], 1.0), others_weight
            probability = prior
            if place < len(self._weights):
                weight = self._weights[place]
                probability = (self._hits[place] + prior_weight * prior) / (weight + prior_weight)
            if place < len(others) and others[place] > 0.0:
                worse = probability / others[place]
            probabilities.append(probability)
        return tuple(probabilities)

    def survival(self, num_places: int, others: Sequence[float] = ()) -> tuple[float, ...]:
        """For each place, from the first: the probability that its draft and all before it are accepted."""
        survivals: list[float] = []
        survives = 1.0
        for probability in self.conditional(num_places, others):
            survives *= probability
            survivals.append(survives)
        return tuple(survivals)


class TreeGain(_Judgements):
    """How likely each node of a tree is on the accepted path, by its number in the block.

    Parents come before children, so the first n nodes of a block are a block, and the nodes of the accepted path among
    them are exactly those that it would have had accepted: one verdict tells what every smaller tree had brought.
    """

    __slots__ = ()

    _PRIOR = 0.5
    _PRIOR_WEIGHT = 1.0
    _PRIOR_FALL = 0.7
    """A node of which nothing is known is thought to bring so much of what the one before it brings."""

    def observe(self, num_nodes: int, accepted_path: Sequence[int], share: float = NEWEST_SHARE) -> None:
        """Adds a verdict on a block of `num_nodes`; nodes of the accepted path are counted from 1, the root is none."""
        self._grow(num_nodes)
        kept = 1.0 - share
        for node in range(num_nodes):
            self._weights[node] = kept * self._weights[node] + 1.0
            self._hits[node] *= kept
        for node in accepted_path:
            if 0 < node <= num_nodes:
                self._hits[node - 1] += 1.0

    def gains(self, num_nodes: int, others: Sequence[float] = ()) -> tuple[float, ...]:
        """For each node, from the first: accepted drafts that it adds to those of the nodes before it.

        Args:
            num_nodes: how many.
            others: the same of others; see `ChainAcceptance.conditional`.
        """
        gains: list[float] = []
        gain = self._PRIOR / self._PRIOR_FALL
        others_weight = self._others_weight(others)
        for node in range(num_nodes):
            prior, prior_weight = self._PRIOR_FALL * gain, self._PRIOR_WEIGHT
            if node < len(others):
                prior, prior_weight = others[node], others_weight
            gain = prior
            if node < len(self._weights):
                gain = (self._hits[node] + prior_weight * prior) / (self._weights[node] + prior_weight)
            gains.append(gain)
        return tuple(gains)
