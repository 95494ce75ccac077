"""Which CPU cores each replica of a fleet on one machine runs on.

Verifier and drafter are busy at the same time: while a block is judged the next one is drafted. Left to the scheduler
they push each other around, and a pass waits for its slowest thread; on cores of their own both run at full speed.
Gateway and Redis are not pinned: together they need a few percent of one core.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CorePlan:
    """Cores per replica, one entry for each; an empty entry means: not pinned.

    Attributes:
        verifiers: cores of each verifier.
        drafters: cores of each drafter.
    """

    verifiers: tuple[tuple[int, ...], ...]
    drafters: tuple[tuple[int, ...], ...]


def available_cores() -> tuple[int, ...]:
    """Cores that this process may use, in ascending order."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def is_cpu(device: str) -> bool:
    """Whether a device setting means the CPU."""
    return device.split(":", 1)[0] == "cpu"


def plan_cores(cores: Sequence[int], *, verifiers: int, drafters: int) -> CorePlan:
    """Splits `cores` among the replicas that compute on the CPU.

    A drafter is a quarter of the target's cost or less, so the drafters get a third of the cores and at least one each,
    and the verifiers the rest. Where there are fewer cores than replicas nobody is pinned: replicas that share a core
    would only wait for each other.

    Args:
        cores: the cores that this process may use.
        verifiers: verifiers on the CPU.
        drafters: drafters on the CPU.
    """
    if not verifiers + drafters or len(cores) < max(2, verifiers + drafters):
        return CorePlan(((),) * verifiers, ((),) * drafters)
    num_drafter_cores = 0 if not drafters else max(drafters, len(cores) // 3)
    if not verifiers:
        num_drafter_cores = len(cores)
    num_drafter_cores = min(num_drafter_cores, len(cores) - verifiers)
    return CorePlan(
        verifiers=_share(cores[num_drafter_cores:], verifiers), drafters=_share(cores[:num_drafter_cores], drafters)
    )


def _share(cores: Sequence[int], replicas: int) -> tuple[tuple[int, ...], ...]:
    """Cuts `cores` into runs of nearly equal length, one per replica."""
    return tuple(
        tuple(cores[index * len(cores) // replicas : (index + 1) * len(cores) // replicas]) for index in range(replicas)
    )
