"""Does to the fleet what the schedule says, each fault in a task of its own, so that they overlap."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable

from tests.chaos.fleet import ChaosFleet
from tests.chaos.member import Kind, Member
from tests.chaos.schedule import Fault, FaultKind

ONE_WAY_DELAY_MS = 25.0
"""A round trip is 50 ms longer."""
_KILLS = {
    FaultKind.KILL_VERIFIER: Kind.VERIFIER,
    FaultKind.KILL_DRAFTER: Kind.DRAFTER,
    FaultKind.KILL_GATEWAY: Kind.GATEWAY,
    FaultKind.KILL_REDIS: Kind.REDIS,
    FaultKind.LOSE_REDIS: Kind.REDIS,
}
_FREEZES = {
    FaultKind.FREEZE_VERIFIER: Kind.VERIFIER,
    FaultKind.FREEZE_DRAFTER: Kind.DRAFTER,
    FaultKind.FREEZE_GATEWAY: Kind.GATEWAY,
    FaultKind.FREEZE_REDIS: Kind.REDIS,
}
_CUTS = {FaultKind.CUT_VERIFIER: Kind.VERIFIER, FaultKind.CUT_DRAFTER: Kind.DRAFTER}


class Tormentor:
    """Applies faults.

    Args:
        fleet: the victim.

    Attributes:
        done: faults that met somebody, by kind.
    """

    def __init__(self, fleet: ChaosFleet) -> None:
        self._fleet = fleet
        self.done: Counter[FaultKind] = Counter()

    async def run(self, faults: Iterable[Fault], verbose: bool) -> None:
        """Applies each at its time, and returns when the last one is over."""
        begin = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for fault in faults:
                await asyncio.sleep(begin + fault.at_s - time.monotonic())
                self._fleet.check_keepers()
                tasks.create_task(self._apply(fault, verbose))

    async def blackout(self, seconds: float) -> None:
        """Keeps all verifiers dead for so long, and waits until they are back."""
        for verifier in self._fleet.of(Kind.VERIFIER):
            self.done[FaultKind.KILL_VERIFIER] += verifier.kill(seconds)
        await asyncio.sleep(seconds)
        await self._fleet.all_up()

    async def _apply(self, fault: Fault, verbose: bool) -> None:
        if verbose:
            print(fault, flush=True)
        kind = fault.kind
        if kind in _KILLS:
            victim = self._victim(_KILLS[kind], fault)
            self.done[kind] += victim.kill(fault.lasts_s, loses_data=kind is FaultKind.LOSE_REDIS)
        elif kind in _FREEZES:
            await self._freeze(self._victim(_FREEZES[kind], fault), fault)
        elif kind in _CUTS:
            await self._cut(self._victim(_CUTS[kind], fault), fault)
        else:
            self.done[kind] += 1
            await self._fleet.delay(ONE_WAY_DELAY_MS)
            await asyncio.sleep(fault.lasts_s)
            await self._fleet.delay(0.0)

    def _victim(self, kind: Kind, fault: Fault) -> Member:
        found = self._fleet.of(kind)
        return found[fault.victim % len(found)]

    async def _freeze(self, victim: Member, fault: Fault) -> None:
        pid = self._fleet.freeze(victim.name)
        if not pid:
            return
        self.done[fault.kind] += 1
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            self._fleet.thaw(victim.name, pid)

    async def _cut(self, replica: Member, fault: Fault) -> None:
        gateways = self._fleet.of(Kind.GATEWAY)
        gateway = gateways[fault.partner % len(gateways)].name
        if (gateway, replica.name) in self._fleet.cuts:
            return
        self.done[fault.kind] += 1
        await self._fleet.cut(gateway, replica.name)
        await asyncio.sleep(fault.lasts_s)
        await self._fleet.mend(gateway, replica.name)
