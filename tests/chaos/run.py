"""One run: a fleet, its load, its torment, and the judgement afterwards."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.counters import MOVES, Counters
from tests.chaos.faults import Tormentor
from tests.chaos.fleet import ChaosFleet, FleetSize
from tests.chaos.growth import Growth
from tests.chaos.member import Kind
from tests.chaos.models import ChaosModels
from tests.chaos.oracle import Oracle
from tests.chaos.quiescence import leftover_keys, until_idle
from tests.chaos.report import ChaosReport, tally_faults
from tests.chaos.schedule import DECK, FaultKind, draw_faults
from tests.chaos.streams import STREAM_TIMEOUT_S, Load, Reading

PATIENT_S = 60.0
"""Longer than any fault and any start of a process: a client that waits so long gets everything."""
IMPATIENT_S = 5.0
BLACKOUT_S = 12.0
"""Longer than impatient clients wait, a gateway's last answer included."""
AFTERMATH_S = 4.0
_RESUMED = re.compile(r"generation started .*\bresumed_at=")
_STORE_AWAY = "the session store cannot be used"


@dataclass(frozen=True, slots=True)
class ChaosOptions:
    """What kind of run.

    Attributes:
        seed: of faults and conversations.
        seconds: during which faults come.
        streams: open at any time.
        size: of the fleet.
        deck: kinds of faults.
        mean_gap_s: between two faults.
        longest_fault_s: most time that a freeze or a cut lasts.
        longest_turn: most tokens of a generation.
        warm_up_s: of undisturbed load before.
        blackout: afterwards kill all verifiers for longer than impatient clients wait, who get typed errors and resume.
        verbose: print each fault as it comes.
    """

    seed: int
    seconds: float = 180.0
    streams: int = 40
    size: FleetSize = field(default_factory=FleetSize)
    deck: tuple[FaultKind, ...] = DECK
    mean_gap_s: float = 3.0
    longest_fault_s: float = 8.0
    longest_turn: int = 150
    warm_up_s: float = 10.0
    blackout: bool = True
    verbose: bool = False


class ChaosRun:
    """One run of a fleet; see `run`.

    Args:
        options: what to do.
        fleet: running.

    Attributes:
        loads: one for each phase.
        faults: what is wrong.
        memory_mib: of each process, warm and after the faults, as far as its life is long enough.
        idle_after_s: after the last stream of the tormented phase, until nothing was left of anybody.
    """

    def __init__(self, options: ChaosOptions, fleet: ChaosFleet) -> None:
        self._options = options
        self._fleet = fleet
        self.tormentor = Tormentor(fleet)
        self.counters = Counters(fleet)
        self.growth = Growth()
        self.memory_mib: dict[str, tuple[int, int]] = {}
        self.loads: list[Load] = []
        self.faults: list[str] = []
        self.idle_after_s = 0.0

    @property
    def readings(self) -> list[Reading]:
        """All generations."""
        return [reading for load in self.loads for reading in load.readings]

    async def do(self) -> None:
        """All phases: warming up, torment, blackout, and the end of the fleet."""
        options, fleet = self._options, self._fleet
        watching = [
            asyncio.create_task(self.growth.watch(fleet), name="growth"),
            asyncio.create_task(self.counters.run(), name="counters"),
        ]
        try:
            await self._phase("before any fault", asyncio.sleep(options.warm_up_s))
            await self._phase("after the faults", self._torment())
            self.memory_mib = self.growth.memory_mib()
            if options.blackout:
                dark = self.tormentor.blackout(BLACKOUT_S)
                await self._phase("after the blackout", dark, deadline_s=IMPATIENT_S)
        finally:
            for task in watching:
                task.cancel()
        self.faults += [f"a process is left: {line}" for line in fleet.strangers()]
        self.faults += leftover_keys(fleet.redis_url)
        self.faults += await fleet.stop()
        self.faults += _unasked_ends(fleet)
        self.faults += [crash for load in self.loads for crash in load.crashes]

    async def _phase(self, name: str, meanwhile: Awaitable[None], deadline_s: float = PATIENT_S) -> None:
        """Keeps the load running while something else happens, lets every stream end, and looks for what is left."""
        options = self._options
        load = Load(
            self._fleet.gateways,
            options.seed + 10**6 * len(self.loads),
            options.streams,
            longest=options.longest_turn,
            deadline_s=deadline_s,
        )
        self.loads.append(load)
        serving = asyncio.create_task(load.run(), name="load")
        try:
            await meanwhile
            load.stop()
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                await serving
        finally:
            serving.cancel()
        ended_at = time.monotonic()
        self.faults += [f"{name}: {line}" for line in await until_idle(self._fleet)]
        self.idle_after_s = time.monotonic() - ended_at
        self.faults += [f"{name}: {line}" for line in self.growth.complaints()]

    async def _torment(self) -> None:
        options = self._options
        faults = draw_faults(
            options.seed,
            options.seconds,
            mean_gap_s=options.mean_gap_s,
            longest_s=options.longest_fault_s,
            deck=options.deck,
        )
        await self.tormentor.run(faults, options.verbose)
        await self._fleet.all_up()
        # Whatever goes on only now would otherwise be cut short by the end of the load.
        await asyncio.sleep(AFTERMATH_S)


async def run(options: ChaosOptions, folder: Path) -> ChaosReport:
    """Runs it and judges.

    Args:
        options: what to do.
        folder: for models, data and logs.
    """
    models = ChaosModels.write(folder / "models")
    async with ChaosFleet(options.size, models, folder / "fleet") as fleet:
        done = ChaosRun(options, fleet)
        await done.do()
        logs = [log for member in fleet.members.values() for log in member.logs]
    faults = [*done.faults, *(f"a process is left: {line}" for line in fleet.strangers()), *_log_faults(logs)]
    oracle = Oracle(models)
    oracle.judge(done.readings, fleet.blackouts)
    undarkened = _undarkened(done.readings, fleet)
    gaps = [reading.longest_gap_s for reading in undarkened] or [0.0]
    slowest = max(undarkened, key=lambda reading: reading.longest_gap_s, default=None)
    return ChaosReport(
        seed=options.seed,
        seconds=options.seconds,
        streams=options.streams,
        processes={kind.value: len(fleet.of(kind)) for kind in Kind},
        faults_injected={kind.value: done.tormentor.done[kind] for kind in FaultKind},
        kills={member.name: member.kills for member in fleet.members.values()},
        generations=len(done.readings),
        complete=oracle.num_complete,
        left=oracle.num_left,
        excused=oracle.num_excused,
        tokens=oracle.tally.num_tokens,
        near_ties=len(oracle.tally.near_ties),
        resumes=sum(len(_RESUMED.findall(log.read_text(errors="replace"))) for log in logs),
        moves=round(done.counters.total(MOVES)),
        busy_retries=sum(reading.busy_retries for reading in done.readings),
        longest_gap_s=max(gaps),
        longest_gap_of="" if slowest is None else f"{slowest.name}, session {slowest.session}",
        median_gap_s=statistics.median(gaps),
        blackout_s=fleet.blackouts.total_s,
        idle_after_s=done.idle_after_s,
        memory_mib=done.memory_mib,
        faults=(*faults, *oracle.faults, *tally_faults(oracle.tally)),
    )


def _unasked_ends(fleet: ChaosFleet) -> list[str]:
    """Processes that ended although nobody killed them. A gateway that finds no store at its start may."""
    return [line for member in fleet.members.values() for line in member.ended_by_itself if _STORE_AWAY not in line]


def _log_faults(logs: Sequence[Path]) -> list[str]:
    """What no log should have in it."""
    found = []
    for log in logs:
        text = log.read_text(errors="replace")
        at = text.find("Traceback")
        if at >= 0:
            found.append(f"{log.parent.name}, {log.name}: {text[max(0, at - 300) : at + 1500]}")
    return found


def _undarkened(readings: Sequence[Reading], fleet: ChaosFleet) -> list[Reading]:
    """Generations during which there was always some verifier."""
    blackouts = fleet.blackouts
    return [reading for reading in readings if not blackouts.seconds_in(reading.began_at, reading.last_at)]
