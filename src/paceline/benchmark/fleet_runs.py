"""Several ways to generate take turns on one fleet, so that a busy machine disturbs them alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from paceline.benchmark.compare import (
    PLAIN,
    Configuration,
    Equality,
    PromptFigures,
    equality,
    prompt_figures,
    request_for,
)
from paceline.benchmark.prompts import Prompt
from paceline.cli.display import Display
from paceline.cli.fleet import Fleet, FleetAddresses
from paceline.cli.fleet_options import FleetOptions
from paceline.cli.request import Completion, complete
from paceline.client import AsyncClient

_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is generated.

    Attributes:
        prompts: from each of them, greedily, one session at a time.
        repeats: how often each prompt is generated in each way.
        max_tokens: instead of each prompt's own length.
    """

    prompts: tuple[Prompt, ...]
    repeats: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class FleetRuns:
    """What a fleet generated.

    Attributes:
        runs: completions by prompt name and way, plain decoding's under `PLAIN`; entry i of each is repeat i.
        equalities: of all other ways, how each run compares with plain decoding in the same repeat.
    """

    runs: dict[tuple[str, Configuration], list[Completion]] = field(default_factory=dict)
    equalities: dict[tuple[str, Configuration], list[Equality]] = field(default_factory=dict)

    def figures(self, prompt: str, way: Configuration) -> PromptFigures:
        """Figures of one prompt in one way, against plain decoding."""
        key = (prompt, way)
        return prompt_figures(prompt, self.runs[prompt, PLAIN], self.runs[key], self.equalities[key])


async def run_fleet(
    options: FleetOptions,
    ways: Sequence[Configuration],
    schedule: Schedule,
    *,
    on_ready: Callable[[FleetAddresses], object] = lambda _addresses: None,
    say: Callable[[str], object] = lambda _line: None,
) -> FleetRuns:
    """Starts a fleet, lets plain decoding and all ways take turns on it, and stops it.

    Args:
        options: of the fleet; prompts should be cold, or a later way finds what an earlier one has read.
        ways: besides plain decoding.
        schedule: what is generated.
        on_ready: called before anything is generated.
        say: told what is being done.

    Raises:
        PacelineError: the fleet does not start, or a generation fails.
    """
    found = FleetRuns()
    display = Display()
    fleet = Fleet(options, display)
    try:
        with display:
            await fleet.start()
        on_ready(fleet.addresses)
        async with AsyncClient(fleet.addresses.gateway) as client:
            for way in (PLAIN, *ways):
                # The first passes of a process allocate memory; that is no property of any way.
                await complete(client, request_for(schedule.prompts[0], way, _WARM_UP_TOKENS))
            for repeat in range(schedule.repeats):
                for prompt in schedule.prompts:
                    say(f"repeat {repeat + 1} of {schedule.repeats}, {prompt.name}")
                    await _take_turns(client, [PLAIN, *ways], schedule, prompt, repeat, found)
    finally:
        await fleet.stop()
    return found


async def _take_turns(
    client: AsyncClient,
    ways: Sequence[Configuration],
    schedule: Schedule,
    prompt: Prompt,
    repeat: int,
    found: FleetRuns,
) -> None:
    """Generates from one prompt in all ways; each repeat begins with another one."""
    first = repeat % len(ways)
    for way in [*ways[first:], *ways[:first]]:
        completion = await complete(client, request_for(prompt, way, schedule.max_tokens))
        found.runs.setdefault((prompt.name, way), []).append(completion)
    plain = found.runs[prompt.name, PLAIN][repeat]
    for way in ways:
        if way is not PLAIN:
            other = found.runs[prompt.name, way][repeat]
            verdict = await equality(client, prompt, plain, other, schedule.max_tokens)
            found.equalities.setdefault((prompt.name, way), []).append(verdict)
