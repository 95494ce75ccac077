"""Replicas of the simulation that serve features and build on them. A row says which token it is of, and where."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from paceline_gateway.effects import Lane

from paceline.messages import (
    Draft,
    Drafted,
    DrafterCommand,
    DrafterEvent,
    FeatureDtype,
    FeatureFormat,
    Features,
    Open,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.speculation.tree import DraftTree
from tests.unit.gateway.laws import Law, Script, nothing
from tests.unit.gateway.simulated_replicas import SimDrafter, SimVerifier, matching
from tests.unit.gateway.simulation import Simulation

FORM = FeatureFormat("final_norm", 2)
ROW_BYTES = 8


def rows_of(tokens: Sequence[int], first_row: int, end: int) -> bytes:
    return b"".join([struct.pack("<ff", tokens[row], row) for row in range(first_row, end)])


@dataclass
class ServingVerifier(SimVerifier):
    """Serves features: at most so many rows along with a verdict."""

    max_rows: int = 1000

    def handle(self, command: VerifierCommand | DrafterCommand) -> list[VerifierEvent]:
        events = super().handle(command)
        if isinstance(command, Verify) and command.features_from is not None:
            return [self._with_features(event, command.features_from) for event in events]
        return events

    def _with_features(self, event: VerifierEvent, features_from: int) -> VerifierEvent:
        if not isinstance(event, Verified):
            return event
        end = event.kv_len
        first_row = max(features_from, end - self.max_rows)
        if first_row >= end:
            return event
        data = rows_of(self.sessions[event.session].log.tokens, first_row, end)
        return dataclasses.replace(event, features=Features(first_row, end - first_row, 2, FeatureDtype.FLOAT32, data))


@dataclass
class BuildingDrafter(SimDrafter):
    """Drafts only with the features of all its tokens but the last; checks every row that it has."""

    only_last: bool = False
    rows: bytes = b""
    first_row: int = 0
    built_on: list[range] = field(default_factory=list)
    """The rows that each draft was made with."""

    @property
    def num_rows(self) -> int:
        return self.first_row + len(self.rows) // ROW_BYTES

    def take(self, features: Features, starts_short: bool = False) -> None:
        if self.only_last or (starts_short and features.first_row > self.num_rows):
            self.first_row, self.rows = features.first_row, b""
        if features.first_row <= self.num_rows:
            self.rows += features.data[(self.num_rows - features.first_row) * ROW_BYTES :]

    def handle(self, command: VerifierCommand | DrafterCommand) -> list[DrafterEvent]:
        if isinstance(command, Open):
            self.rows, self.first_row = b"", 0
        if isinstance(command, Draft):
            assert not command.assumed, "nobody has features of tokens that are not judged"
            if command.features is not None:
                self.take(command.features, command.starts_short)
        return [self._told(event, command) for event in super().handle(command)]

    def _told(self, event: DrafterEvent, command: VerifierCommand | DrafterCommand) -> DrafterEvent:
        if not isinstance(event, Drafted) or not isinstance(command, Draft):
            return event
        complete = bool(self.rows) and self.num_rows == command.base_len - 1
        if complete:
            tokens = self.sessions[command.session].tokens
            assert self.rows == rows_of(tokens, self.first_row, self.num_rows)
            self.built_on.append(range(self.first_row, self.num_rows))
        block = event.block if complete else DraftTree()
        return dataclasses.replace(event, block=block, features_len=self.num_rows)


def with_features(
    folder: Path,
    law: Law,
    script: Script = nothing,
    *,
    max_rows: int = 1000,
    only_last: bool = False,
    **options: object,
) -> Simulation:
    """A generation whose drafter builds on features that its verifiers serve."""
    simulation = Simulation(folder, law, script, **options)  # type: ignore[arg-type]
    for name in simulation.verifiers:
        simulation.verifiers[name] = ServingVerifier(matching(law), max_rows=max_rows)
    simulation.drafter = BuildingDrafter(script, only_last=only_last)
    verifier, drafter = simulation.infos[Lane.VERIFIER], simulation.infos[Lane.DRAFTER]
    wanted = dataclasses.replace(FORM, only_last=only_last)
    simulation.infos = {
        Lane.VERIFIER: dataclasses.replace(verifier, features=FORM),
        Lane.DRAFTER: dataclasses.replace(drafter, features=wanted),
    }
    return simulation


def drafter_of(simulation: Simulation) -> BuildingDrafter:
    assert isinstance(simulation.drafter, BuildingDrafter)
    return simulation.drafter


def finish_fetch(simulation: Simulation, succeeded: bool = True) -> None:
    """The rows that are being fetched reach the drafter, or do not."""
    rows = simulation.fetches.pop(0).rows
    address = simulation.attached[Lane.VERIFIER]
    session = None if address is None else simulation.verifiers[address].sessions.get("s")
    if succeeded and session is not None and rows.stop < len(session.log):
        data = rows_of(session.log.tokens, rows.start, rows.stop)
        drafter_of(simulation).take(Features(rows.start, len(rows), 2, FeatureDtype.FLOAT32, data))
        simulation.loop.fetched(True, simulation.now)
    else:
        simulation.loop.fetched(False, simulation.now)
    simulation.settle()
