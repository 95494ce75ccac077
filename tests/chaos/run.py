"""One run: a fleet, its load, its torment, and the judgement afterwards."""

from __future__ import annotations

import asyncio
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.faults import Tormentor
from tests.chaos.fleet import ChaosFleet, FleetSize
from tests.chaos.member import Kind
from tests.chaos.models import ChaosModels
from tests.chaos.oracle import Oracle
from tests.chaos.quiescence import growth, leftover_keys, sizes, until_idle
from tests.chaos.report import ChaosReport, tally_faults
from tests.chaos.schedule import DECK, FaultKind, draw_faults
from tests.chaos.streams import DEADLINE_S, STREAM_TIMEOUT_S, Load, Reading

BLACKOUT_S = DEADLINE_S + 4.0
_BLACKOUT_AT = 0.55
"""Part of the run after which all verifiers are gone for a while."""
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
        warm_up_s: of undisturbed load before; what processes take is measured after it.
        blackout: kill all verifiers once for longer than clients wait.
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


async def run(options: ChaosOptions, folder: Path) -> ChaosReport:
    """Runs it and judges.

    Args:
        options: what to do.
        folder: for models, data and logs.
    """
    models = ChaosModels.write(folder / "models")
    faults: list[str] = []
    async with ChaosFleet(options.size, models, folder / "fleet") as fleet:
        warm_up = _load(fleet, options, options.seed + 10**6)
        await _serve(warm_up, asyncio.sleep(options.warm_up_s))
        faults += [f"before any fault: {line}" for line in await until_idle(fleet)]
        before = sizes(fleet)

        load, tormentor = _load(fleet, options, options.seed), Tormentor(fleet)
        await _serve(load, _torment(fleet, tormentor, options))
        ended_at = time.monotonic()
        faults += await until_idle(fleet)
        idle_after_s = time.monotonic() - ended_at
        faults += growth(before, sizes(fleet))
        faults += [f"a process is left: {line}" for line in fleet.strangers()]
        faults += leftover_keys(fleet.redis_url)
        faults += await fleet.stop()
        faults += _unasked_ends(fleet)
        kills = {member.name: member.kills for member in fleet.members.values()}
        logs = [log for member in fleet.members.values() for log in member.logs]
    faults += [f"a process is left: {line}" for line in fleet.strangers()]
    faults += _log_faults(logs)
    oracle = Oracle(models)
    readings = [*warm_up.readings, *load.readings]
    oracle.judge(readings, fleet.blackouts)
    gaps = _gaps(load.readings, fleet)
    return ChaosReport(
        seed=options.seed,
        seconds=options.seconds,
        streams=options.streams,
        processes={kind.value: len(fleet.of(kind)) for kind in Kind},
        faults_injected={kind.value: tormentor.done[kind] for kind in FaultKind},
        kills=kills,
        generations=len(readings),
        complete=oracle.num_complete,
        left=oracle.num_left,
        excused=oracle.num_excused,
        tokens=oracle.tally.num_tokens,
        near_ties=len(oracle.tally.near_ties),
        resumes=sum(len(_RESUMED.findall(log.read_text(errors="replace"))) for log in logs),
        moves=0,
        busy_retries=sum(reading.busy_retries for reading in readings),
        longest_gap_s=max(gaps),
        median_gap_s=statistics.median(gaps),
        blackout_s=fleet.blackouts.seconds_in(ended_at - 3600.0, ended_at),
        idle_after_s=idle_after_s,
        faults=(*faults, *warm_up.crashes, *load.crashes, *oracle.faults, *tally_faults(oracle.tally)),
    )


def _load(fleet: ChaosFleet, options: ChaosOptions, seed: int) -> Load:
    return Load(fleet.gateways, seed, options.streams, options.longest_turn)


async def _serve(load: Load, meanwhile: asyncio.Future[None] | object) -> None:
    """Keeps the load running while something else happens, then lets every stream end."""
    serving = asyncio.create_task(load.run(), name="load")
    try:
        await meanwhile  # type: ignore[misc]
        load.stop()
        async with asyncio.timeout(STREAM_TIMEOUT_S):
            await serving
    finally:
        serving.cancel()


async def _torment(fleet: ChaosFleet, tormentor: Tormentor, options: ChaosOptions) -> None:
    faults = draw_faults(
        options.seed,
        options.seconds,
        mean_gap_s=options.mean_gap_s,
        longest_s=options.longest_fault_s,
        deck=options.deck,
    )
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(tormentor.run(faults, options.verbose))
        if options.blackout:
            await asyncio.sleep(_BLACKOUT_AT * options.seconds)
            await tormentor.blackout(BLACKOUT_S)
    await fleet.all_up()


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


def _gaps(readings: Sequence[Reading], fleet: ChaosFleet) -> list[float]:
    """The longest time without an event of each stream, blackouts apart."""
    return [
        reading.longest_gap_s
        for reading in readings
        if not fleet.blackouts.seconds_in(reading.began_at, reading.last_at)
    ] or [0.0]
