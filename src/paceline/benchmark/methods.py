"""`paceline bench methods`: every way to draft that is there, each on a fleet of this machine, against plain decoding.

One session at a time, greedy, and in turns with plain decoding on the same fleet. Only ratios of one fleet mean
something: each has plain decoding of its own, and a machine is never equally busy twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from paceline.benchmark.compare import PLAIN, Equality
from paceline.benchmark.contestants import Absentee, Field, Heat
from paceline.benchmark.fleet_runs import FleetRuns, Schedule, run_fleet
from paceline.benchmark.memory import ExtraMemory, FleetMemory, extra_memory, head_row_bytes, read_memory
from paceline.benchmark.method_rows import MethodRow, MethodsResult, method_row
from paceline.benchmark.prompts import PROMPTS, Prompt
from paceline.cli.display import Display
from paceline.cli.fleet import Fleet, FleetAddresses
from paceline.cli.fleet_options import FleetOptions
from paceline.errors import PacelineError
from paceline.head_source import resolve_head

KINDS = ("chat", "code", "code_edit", "summary")
"""Kinds of prompts that are measured."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured.

    Attributes:
        prompts_per_kind: prompts of each kind.
        repeats: of each prompt in each way.
        max_tokens: most new tokens.
    """

    prompts_per_kind: int = 2
    repeats: int = 3
    max_tokens: int = 96

    @property
    def schedule(self) -> Schedule:
        """What is generated."""
        prompts: list[Prompt] = []
        for kind in KINDS:
            prompts += [prompt for prompt in PROMPTS if prompt.kind == kind][: self.prompts_per_kind]
        return Schedule(tuple(prompts), self.repeats, self.max_tokens)


QUICK = Effort(prompts_per_kind=1, repeats=1, max_tokens=32)
"""Whether everything works; no figures to trust."""


async def measure_methods(field: Field, effort: Effort, say: Callable[[str], object]) -> MethodsResult:
    """Runs all fleets, one after the other; one that fails gives a row that says why.

    Args:
        field: what is measured.
        effort: how much.
        say: told what is being done.

    Raises:
        InvalidArgument: a method or head is unknown.
        PacelineError: the target itself does not run.
    """
    field.check()
    schedule = effort.schedule
    rows: list[MethodRow] = []
    absent: list[Absentee] = []
    plain_memory = await _plain_memory(field.bare)
    for heat in field.heats():
        if isinstance(heat, Absentee):
            absent.append(heat)
            continue
        try:
            found, memory = await _run(heat, schedule, say)
        except PacelineError as error:
            absent += [Absentee(each.name, each.placement, str(error)) for each in heat.contestants]
            continue
        if not rows:
            rows.append(_plain_row(found, schedule))
        rows += _rows(heat, found, memory, plain_memory, schedule)
    return MethodsResult(field.options.model, KINDS, effort.repeats, effort.max_tokens, tuple(rows), tuple(absent))


async def _plain_memory(options: FleetOptions) -> FleetMemory:
    """The target's own memory: that of a fleet that does not draft."""
    display = Display()
    fleet = Fleet(replace(options, method="ngram", drafters=0, num_speculative_tokens=0), display)
    try:
        with display:
            await fleet.start()
        return read_memory(fleet.addresses)
    finally:
        await fleet.stop()


async def _run(heat: Heat, schedule: Schedule, say: Callable[[str], object]) -> tuple[FleetRuns, FleetMemory]:
    memories: list[FleetMemory] = []

    def on_ready(addresses: FleetAddresses) -> None:
        memories.append(read_memory(addresses))

    ways = [contestant.way for contestant in heat.contestants]
    names = ", ".join([way.name for way in ways])
    found = await run_fleet(heat.options, ways, schedule, on_ready=on_ready, say=lambda line: say(f"{names}: {line}"))
    return found, memories[0]


def _rows(
    heat: Heat, found: FleetRuns, memory: FleetMemory, plain_memory: FleetMemory, schedule: Schedule
) -> list[MethodRow]:
    head = heat.options.head_reference if heat.options.self_draft_method else ""
    row_bytes = head_row_bytes(resolve_head(head)) if head else 0
    extra = extra_memory(memory, plain_memory, head_row_bytes=row_bytes)
    nothing = ExtraMemory()
    return [
        method_row(
            contestant.name,
            contestant.placement,
            contestant.way,
            # A fleet with a chain holds the model also for those that do without.
            nothing if contestant.way.method == "ngram" else extra,
            found,
            schedule.prompts,
        )
        for contestant in heat.contestants
    ]


def _plain_row(found: FleetRuns, schedule: Schedule) -> MethodRow:
    """Plain decoding against itself."""
    keys = [(prompt.name, PLAIN) for prompt in schedule.prompts]
    equal = {key: [Equality.EQUAL] * len(found.runs[key]) for key in keys}
    return method_row("plain", "", PLAIN, ExtraMemory(), FleetRuns(found.runs, equal), schedule.prompts)
