"""Counters and histograms for what happens a thousand times a second, shown as Prometheus' own are.

Prometheus' client takes a lock for each number, since any thread may count; here one thread counts, the event loop's,
and a scrape reads from its own. A scrape may so see a sum without the last observation, never a broken number.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class CounterTally:
    """One series of a counter."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        """Adds to it."""
        self.value += amount


class HistogramTally:
    """One series of a histogram.

    Args:
        bounds: inclusive upper bounds of its buckets, in rising order; one more has no bound.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Adds a value, as often as it was seen."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


class CounterTallies(Collector):
    """A counter with labels.

    Args:
        registry: where it is shown.
        name: without `_total`.
        meaning: for who reads the metrics.
        labels: their names.
    """

    def __init__(self, registry: CollectorRegistry, name: str, meaning: str, labels: Sequence[str] = ()) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._series: dict[tuple[str, ...], CounterTally] = {}
        registry.register(self)

    def labels(self, *values: str) -> CounterTally:
        """The series of these labels, one for each name; it is shown from now on."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = CounterTally()
        return series

    def collect(self) -> Iterator[Metric]:
        """What a scrape finds."""
        family = CounterMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, series in list(self._series.items()):
            family.add_metric(values, series.value)
        yield family


class HistogramTallies(Collector):
    """A histogram with labels.

    Args:
        registry: where it is shown.
        name: with its unit.
        meaning: for who reads the metrics.
        bounds: of the buckets, see `HistogramTally`.
        labels: their names.
    """

    def __init__(
        self, registry: CollectorRegistry, name: str, meaning: str, bounds: Sequence[float], labels: Sequence[str] = ()
    ) -> None:
        self._name, self._meaning, self._labels = name, meaning, labels
        self._bounds = tuple(bounds)
        self._shown = [*map(floatToGoString, self._bounds), "+Inf"]
        self._series: dict[tuple[str, ...], HistogramTally] = {}
        registry.register(self)

    def labels(self, *values: str) -> HistogramTally:
        """The series of these labels, one for each name; it is shown from now on."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = HistogramTally(self._bounds)
        return series

    def collect(self) -> Iterator[Metric]:
        """What a scrape finds."""
        family = HistogramMetricFamily(self._name, self._meaning, labels=self._labels)
        for values, series in list(self._series.items()):
            buckets = list(zip(self._shown, accumulate(series.counts), strict=True))
            family.add_metric(values, buckets, series.total)
        yield family
