"""The figures of one drafting method, from the evidence of its runs and of the plain runs beside them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.benchmark.compare import PLAIN, Configuration, Equality
from paceline.benchmark.contestants import Absentee
from paceline.benchmark.fleet_runs import FleetRuns
from paceline.benchmark.memory import ExtraMemory
from paceline.benchmark.prompts import Prompt
from paceline.cli.request import Completion

NUM_POSITIONS = 4
"""Positions of a block whose acceptance is told."""
OVERALL = "overall"


@dataclass(frozen=True, slots=True)
class KindFigures:
    """Figures on the prompts of one kind, or on all.

    Attributes:
        kind: of the prompts; "overall" for all.
        num_prompts: prompts.
        draft_ms: making a block, per round; beside verification where a drafter makes it.
        verify_ms: judging a block, per round, that of the prompt left out.
        wire_ms: on the way to replicas and back, per round.
        acceptance: of the first positions of a block, how often it was accepted up to there.
        tokens_per_pass: tokens per pass of the target.
        tokens_per_second: median over the prompts.
        ratio: tokens per second, divided by those of plain decoding in the same repeat: median over the prompts of the
            median over the repeats.
        equality: the worst of all texts compared with those of plain decoding.
    """

    kind: str
    num_prompts: int
    draft_ms: float
    verify_ms: float
    wire_ms: float
    acceptance: tuple[float, ...]
    tokens_per_pass: float
    tokens_per_second: float
    ratio: float
    equality: Equality


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One way to draft.

    Attributes:
        method: its name.
        placement: where drafts are made; empty for plain decoding.
        num_speculative_tokens: block size; the depth of a tree.
        memory: what it takes beside the target.
        kinds: figures of each kind of prompts, and last of all.
    """

    method: str
    placement: str
    num_speculative_tokens: int
    memory: ExtraMemory
    kinds: tuple[KindFigures, ...]

    @property
    def overall(self) -> KindFigures:
        """Figures of all prompts."""
        return self.kinds[-1]


@dataclass(frozen=True, slots=True)
class MethodsResult:
    """What `paceline bench methods` writes.

    Attributes:
        model: the target.
        kinds: of the prompts.
        repeats: of each prompt in each way.
        max_tokens: most new tokens.
        rows: plain decoding first.
        absent: what could not be measured.
    """

    model: str
    kinds: tuple[str, ...]
    repeats: int
    max_tokens: int
    rows: tuple[MethodRow, ...]
    absent: tuple[Absentee, ...]


def method_row(
    name: str, placement: str, way: Configuration, memory: ExtraMemory, found: FleetRuns, prompts: Sequence[Prompt]
) -> MethodRow:
    """The row of one way.

    Args:
        name: of the method.
        placement: where drafts are made.
        way: its runs.
        memory: what it takes.
        found: all runs of its fleet.
        prompts: that were generated from.
    """
    kinds = dict.fromkeys([prompt.kind for prompt in prompts])
    groups = {kind: [prompt for prompt in prompts if prompt.kind == kind] for kind in kinds} | {OVERALL: list(prompts)}
    return MethodRow(
        name,
        placement,
        way.num_speculative_tokens,
        memory,
        tuple([_figures(kind, group, way, found) for kind, group in groups.items()]),
    )


def _figures(kind: str, prompts: Sequence[Prompt], way: Configuration, found: FleetRuns) -> KindFigures:
    runs = [run for prompt in prompts for run in found.runs[prompt.name, way]]
    firsts = [run.evidence.time_to_first_token_ms for prompt in prompts for run in found.runs[prompt.name, PLAIN]]
    each = [found.figures(prompt.name, way) for prompt in prompts]
    severity = list(Equality)
    return KindFigures(
        kind=kind,
        num_prompts=len(prompts),
        draft_ms=statistics.median([run.evidence.draft_ms / _rounds(run) for run in runs]),
        verify_ms=statistics.median([_verify_ms(run, first_ms) for run, first_ms in zip(runs, firsts, strict=True)]),
        wire_ms=statistics.median([run.evidence.wire_ms / _rounds(run) for run in runs]),
        acceptance=_acceptance(runs),
        tokens_per_pass=sum(len(run.token_ids) for run in runs) / sum(_rounds(run) for run in runs),
        tokens_per_second=statistics.median([figures.tokens_per_second for figures in each]),
        ratio=statistics.median([figures.ratio for figures in each]),
        equality=max([figures.equality for figures in each], key=severity.index),
    )


def _rounds(run: Completion) -> int:
    return max(run.evidence.target_passes, 1)


def _verify_ms(run: Completion, first_ms: float) -> float:
    """Of a round behind the first, which reads the prompt and takes what plain decoding takes to its first token."""
    return max(run.evidence.verify_ms - first_ms, 0.0) / max(_rounds(run) - 1, 1)


def _acceptance(runs: Sequence[Completion]) -> tuple[float, ...]:
    shares = []
    for position in range(NUM_POSITIONS):
        drafted = sum(sum(run.evidence.drafted_per_position[position : position + 1]) for run in runs)
        accepted = sum(sum(run.evidence.accepted_per_position[position : position + 1]) for run in runs)
        if drafted:
            shares.append(accepted / drafted)
    return tuple(shares)
