"""Verifiers that stop answering without a word, links and all: streams move on, new ones go elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
from paceline_gateway.breaker import BreakerState

from paceline.engine.runner import SequencePass
from paceline.runtime.replica_actor import ActorLimits
from tests.integration.fleet import VOCAB, Fleet, Run, generate, perfect_method, until
from tests.integration.paced import EXPECTED, LAW, request_of
from tests.integration.replicas import GatedRunner

SOON: dict[str, Any] = {"verifier_silence_ms": 200, "verifier_prompt_silence_ms": 200}
QUEUED_AFTER_A_REOPENING = 3
"""Close, Open, Verify."""


class FreezingRunner(GatedRunner):
    """A toy that freezes in the pass after so many; the gate thaws it."""

    def __init__(self, freeze_after: int | None) -> None:
        super().__init__(LAW, VOCAB, max_model_len=256)
        self.freeze_after = freeze_after

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        if len(self.passes) == self.freeze_after:
            self.gate.clear()
            self.freeze_after = None
        return super().forward(batch)


@contextlib.asynccontextmanager
async def freezing_fleet(folder: Path, *freeze_after: int | None) -> AsyncIterator[Fleet]:
    """A fleet with one verifier for each number, the first of which is used first."""
    runners = [FreezingRunner(passes) for passes in freeze_after]
    boots = iter(runners)
    options: dict[str, Any] = {
        "num_verifiers": len(runners),
        "runner": lambda law: next(boots),
        "method": perfect_method(LAW),
        "settings": SOON,
        "limits": ActorLimits(stall_timeout_s=60.0),
    }
    async with Fleet.start(folder, LAW, **options) as fleet:
        try:
            yield fleet
        finally:
            for runner in runners:
                runner.gate.set()


async def finished_elsewhere(fleet: Fleet) -> Run:
    async with fleet.client() as client:
        run = await generate(client, request_of(fleet))
    assert run.tokens == EXPECTED
    assert run.evidence.verifier == fleet.verifiers[1].address
    return run


async def test_a_stream_leaves_a_verifier_that_freezes(tmp_path: Path) -> None:
    async with freezing_fleet(tmp_path, 4, None) as fleet:
        run = await finished_elsewhere(fleet)
        assert len(fleet.verifiers[0].model.passes) == 4
        assert run.evidence.target_passes == 4 + len(fleet.verifiers[1].model.passes)


async def test_a_stream_leaves_a_verifier_that_freezes_in_its_prompt(tmp_path: Path) -> None:
    async with freezing_fleet(tmp_path, 0, None) as fleet:
        await finished_elsewhere(fleet)
        assert not fleet.verifiers[0].model.passes


async def test_new_streams_avoid_a_frozen_verifier_until_it_answers(tmp_path: Path) -> None:
    async with freezing_fleet(tmp_path, 0, None) as fleet, fleet.client() as client:
        frozen, other = fleet.verifiers
        await finished_elsewhere(fleet)
        passes = len(other.model.passes)
        # One failure opens no breaker: it is the answer that it owes.
        assert fleet.verifier_pool.breakers[BreakerState.OPEN] == 1
        run = await finished_elsewhere(fleet)
        assert run.evidence.target_passes == len(other.model.passes) - passes  # it did everything
        assert not frozen.model.passes
        assert isinstance(frozen.model, FreezingRunner)
        frozen.model.gate.set()
        await until(lambda: frozen.num_sessions == 0)
        await until(lambda: fleet.verifier_pool.breakers[BreakerState.OPEN] == 0)
        run = await generate(client, request_of(fleet))
        assert (run.tokens, run.evidence.verifier) == (EXPECTED, frozen.address)


async def test_the_only_verifier_freezes_and_thaws(tmp_path: Path) -> None:
    async with freezing_fleet(tmp_path, 4) as fleet, fleet.client() as client:
        node = fleet.verifiers[0]
        running = asyncio.create_task(generate(client, request_of(fleet)))
        await until(lambda: len(node.alive.actor._mailbox) >= 2 * QUEUED_AFTER_A_REOPENING)
        assert isinstance(node.model, FreezingRunner)
        node.model.gate.set()
        assert (await running).tokens == EXPECTED
