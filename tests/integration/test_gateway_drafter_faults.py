"""Drafters that die, hang, fail or cannot follow: they cost speed and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.drafting.method import MethodInfo
from paceline.messages import TokenOrigin
from tests.fakes.scripted_drafter import ScriptedDrafter, StepGate, broken, perfect
from tests.integration.fleet import perfect_method, target_law, until
from tests.integration.paced import EXPECTED, LAW, streaming

SOON = {"return_window_ms": 20}


async def test_a_drafter_killed_in_mid_stream_and_back_is_used_again(tmp_path: Path) -> None:
    async with streaming(tmp_path, settings=SOON) as (fleet, stream):
        await stream.tokens(5)
        node = fleet.drafters[0]
        await node.kill()
        await until(lambda: not fleet.drafter_pool.snapshot.ready)
        await stream.tokens(18)  # what was drafted before is used up: the rest of these are plain
        await node.boot()
        await until(lambda: node.num_sessions == 1)
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert TokenOrigin.ACCEPTED in run.origins[:6]
        # Two blocks may be on their way when the drafter dies, behind the one that gave the first tokens.
        assert run.origins[16:18] == [TokenOrigin.PLAIN] * 2
        assert TokenOrigin.ACCEPTED in run.origins[18:]


async def test_a_drafter_that_never_comes_back_costs_only_speed(tmp_path: Path) -> None:
    async with streaming(tmp_path, settings=SOON) as (fleet, stream):
        await stream.tokens(5)
        await fleet.drafters[0].kill()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.accepted_tokens > 0


async def test_a_drafter_that_comes_late_is_used(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        await fleet.drafters[0].kill()
        await until(lambda: not fleet.drafter_pool.snapshot.ready)
        await stream.tokens(5)
        await fleet.drafters[0].boot()
        await until(lambda: fleet.drafters[0].num_sessions == 1)
        run = await stream.rest()
        assert "no drafter is ready" in run.started.warnings[0]
        assert run.tokens == EXPECTED
        assert run.evidence.accepted_tokens > 0


async def test_a_drafter_link_that_breaks_and_is_back_goes_on(tmp_path: Path) -> None:
    async with streaming(tmp_path) as (fleet, stream):
        for count in (3, 12, 24):
            await stream.tokens(count)
            await fleet.drafters[0].cut()
            await fleet.drafters[0].listen()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.accepted_tokens > 0


async def test_another_drafter_takes_over(tmp_path: Path) -> None:
    async with streaming(tmp_path, num_drafters=2, settings={"return_window_ms": 0}) as (fleet, stream):
        await stream.tokens(3)
        used = next(index for index, load in enumerate(fleet.drafter_pool.loads.values()) if load)
        await fleet.drafters[used].kill()
        await until(lambda: fleet.drafters[1 - used].num_sessions == 1)
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.drafter == fleet.drafters[1 - used].address
        assert TokenOrigin.ACCEPTED in run.origins[-6:]


async def test_a_drafter_that_hangs_is_waited_for_once(tmp_path: Path) -> None:
    gate = StepGate()
    async with streaming(tmp_path, method=perfect_method(LAW, gate=gate)) as (_fleet, stream):
        await stream.tokens(20)  # no step of the drafter was let through
        gate.open()
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.origins[:20] == [TokenOrigin.PLAIN] * 20
        assert TokenOrigin.ACCEPTED in run.origins


async def test_a_drafter_that_fails_every_time_costs_only_speed(tmp_path: Path) -> None:
    async with streaming(tmp_path, method=lambda: ScriptedDrafter(broken())) as (_fleet, stream):
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.draft_tokens == 0


async def test_a_drafter_without_room_means_plain_decoding(tmp_path: Path) -> None:
    def full() -> ScriptedDrafter:
        method = ScriptedDrafter(perfect(target_law(LAW)), info=MethodInfo(name="scripted", max_sessions=1))
        method.open("somebody else")
        return method

    async with streaming(tmp_path, method=full) as (_fleet, stream):
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert run.evidence.draft_tokens == 0


@pytest.mark.parametrize("context", [3, 12, 30])
async def test_a_drafter_with_a_small_context_drafts_as_far_as_it_reaches(tmp_path: Path, context: int) -> None:
    async with streaming(tmp_path, drafter_context=context) as (_fleet, stream):
        run = await stream.rest()
        assert run.tokens == EXPECTED
        assert (run.evidence.draft_tokens > 0) == (context > 3)
        assert run.origins[30:] == [TokenOrigin.PLAIN] * 10
