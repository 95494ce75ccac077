"""What a pass spends in the model's own matrix products and attention, and those products again on their own.

Every runner multiplies by `PackedWeight` and attends through `PagedAttention`, whatever is around them; both are timed
where they are called, so that what is measured is the pass that serves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from paceline.engine.attention import PagedAttention
from paceline.engine.packing import PackedWeight

Clock = Callable[[], float]
Work = Callable[[], object]


@dataclass(slots=True)
class KernelTime:
    """Seconds in the kernels so far."""

    products_s: float = 0.0
    attention_s: float = 0.0


@contextmanager
def _instead(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a method while the block runs."""
    original = getattr(owner, name)
    setattr(owner, name, make(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def kernel_meter(clock: Clock = time.thread_time) -> Iterator[KernelTime]:
    """Adds up the time of matrix products and attention of everything that runs inside."""
    spent = KernelTime()

    def product(original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(weight: PackedWeight, inputs: torch.Tensor) -> object:
            started = clock()
            result = original(weight, inputs)
            spent.products_s += clock() - started
            return result

        return timed

    def attention(original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: object) -> object:
            started = clock()
            result = original(*arguments)
            spent.attention_s += clock() - started
            return result

        return timed

    with _instead(PackedWeight, "__call__", product), _instead(PagedAttention, "__call__", attention):
        yield spent


def bare_products(work: Work) -> Work:
    """The matrix products of some work, again, with nothing between them; each on an input of its own."""
    products: list[tuple[PackedWeight, torch.Tensor]] = []

    def note(original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(weight: PackedWeight, inputs: torch.Tensor) -> object:
            products.append((weight, torch.randn_like(inputs)))
            return original(weight, inputs)

        return noted

    with _instead(PackedWeight, "__call__", note):
        work()

    def run() -> None:
        for weight, inputs in products:
            weight(inputs)

    return run
