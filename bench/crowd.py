"""Drives many generations through one engine, each arriving in the middle of the others.

    outcome = run_crowd(engine, [Arrival(0, request), Arrival(7, other)], eos_token_ids=ends)

Time is counted in passes of the engine, so that a run repeats itself. `paceline.engine.local.generate` is the same with
everybody there from the start.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.local import Generation, LocalRequest, LocalResult
from paceline.engine.target import TargetEngine
from paceline.errors import CapacityExceeded, from_failure
from paceline.messages import Failed


@dataclass(frozen=True, slots=True)
class Arrival:
    """A generation that begins before pass number `step` of the run."""

    step: int
    request: LocalRequest


@dataclass(frozen=True, slots=True)
class CrowdOutcome:
    """What a run gave.

    Attributes:
        results: one per arrival, in the order given.
        num_passes: passes of the engine.
        most_sessions: most sessions in one pass.
        num_mixed_passes: passes that fed a prompt's chunk beside another session's block.
    """

    results: tuple[LocalResult, ...]
    num_passes: int
    most_sessions: int
    num_mixed_passes: int


def random_arrivals(requests: Sequence[LocalRequest], seed: int, most_steps_apart: int) -> list[Arrival]:
    """Gives each request its step: in random order, each up to `most_steps_apart` passes after the one before it."""
    generator = random.Random(seed)
    order = generator.sample(range(len(requests)), len(requests))
    steps: dict[int, int] = {}
    step = 0
    for index in order:
        steps[index] = step
        step += generator.randint(0, most_steps_apart)
    return [Arrival(steps[index], request) for index, request in enumerate(requests)]


def run_crowd(
    engine: TargetEngine, arrivals: Sequence[Arrival], *, eos_token_ids: tuple[int, ...] = ()
) -> CrowdOutcome:
    """Decodes all arrivals, each to its own end.

    Args:
        engine: nobody else may be using it. Whom it has no room for comes again after the next pass.
        arrivals: in any order.
        eos_token_ids: tokens that end a generation, besides the request's stop ids.

    Raises:
        PacelineError: the first failure of any generation.
    """
    waiting = sorted(range(len(arrivals)), key=lambda index: arrivals[index].step)
    running: dict[str, Generation] = {}
    results: dict[int, LocalResult] = {}
    num_passes = most_sessions = num_mixed = 0
    try:
        while waiting or running:
            while waiting and (arrivals[waiting[0]].step <= num_passes or not running):
                index = waiting[0]
                try:
                    generation = Generation(engine, arrivals[index].request, eos_token_ids)
                except CapacityExceeded:
                    if not running:
                        raise
                    break  # it comes again after the next pass
                del waiting[0]
                running[generation.session] = generation
                results[index] = generation.result
                generation.start_round()
            answers = engine.step()
            size = engine.last_pass
            num_passes += 1
            most_sessions = max(most_sessions, size.num_sessions)
            num_mixed += 0 < len(answers) < size.num_sessions
            for answer in answers:
                if isinstance(answer, Failed):
                    raise from_failure(answer.failure)
                generation = running[answer.session]
                generation.take(answer)
                if generation.done:
                    engine.close(answer.session)
                    del running[answer.session]
                else:
                    generation.start_round()
    finally:
        for session in running:
            engine.close(session)
    ordered = tuple(results[index] for index in range(len(arrivals)))
    return CrowdOutcome(ordered, num_passes, most_sessions, num_mixed)
