"""The governor in fleets: many sessions, full drafters, full verifiers and short requests, against what is fixed.

Time is simulated, everything that decides is real; the same comparison on processes is `paceline bench scale`.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.engine.simulated.pass_time import PassTime
from tests.unit.gateway.simulated_fleet import Devices, Load, Seen, SimulatedFleet


def fixed(load: Load) -> tuple[Load, ...]:
    """The same sessions without a governor: plain, in turn and ahead; plain is the first."""
    return (
        dataclasses.replace(load, governed=False, num_draft_tokens=0),
        dataclasses.replace(load, governed=False, ahead=False),
        dataclasses.replace(load, governed=False),
    )


def run(folder: Path, devices: Devices, load: Load, warm_up_s: float, seconds: float) -> Seen:
    fleet = SimulatedFleet(folder, devices, load)
    fleet.run(warm_up_s)
    return fleet.run(seconds)


def shares(folder: Path, devices: Devices, load: Load, warm_up_s: float, seconds: float) -> tuple[float, float]:
    """Governed goodput, divided by that of plain decoding and by the best of the fixed ways."""
    others = [run(folder, devices, other, warm_up_s, min(seconds, 8.0)).goodput for other in fixed(load)]
    governed = run(folder, devices, load, warm_up_s, seconds)
    assert governed.changes / load.sessions <= seconds  # 60 a minute
    return governed.goodput / others[0], governed.goodput / max(others)


@pytest.mark.parametrize("draft_pass", [PassTime(3.0, 0.05), PassTime(3.4, 0.1)], ids=["as_stated", "with_software"])
def test_full_drafters_are_used_the_best_way(tmp_path: Path, draft_pass: PassTime) -> None:
    """16 sessions of a verifier and a drafter."""
    devices = Devices(verifiers=1, drafters=1, draft_pass=draft_pass)
    over_plain, over_best = shares(tmp_path, devices, Load(sessions=16), warm_up_s=2.0, seconds=6.0)
    assert over_plain >= 1.1
    assert over_best >= 0.97


def test_drafters_that_are_too_slow_for_all_are_not_used_by_all(tmp_path: Path) -> None:
    """A draft for one session is fast. For 16 at once it is slower than the passes that it saves."""
    devices = Devices(draft_pass=PassTime(0.5, 2.0))
    over_plain, _ = shares(tmp_path, devices, Load(sessions=16), warm_up_s=8.0, seconds=16.0)
    assert over_plain >= 0.95  # each return to blocks, after ever longer times, costs half a second of full drafters


@pytest.mark.parametrize("max_tokens", [24, 96])
def test_short_requests_at_saturation_lose_nothing(tmp_path: Path, max_tokens: int) -> None:
    """Passes take their time per token, so blocks cost what they bring. From the first request on."""
    devices = Devices(verify_pass=PassTime(2.0, 6.0), acceptance=0.5)
    over_plain, _ = shares(tmp_path, devices, Load(16, max_tokens), warm_up_s=0.0, seconds=16.0)
    assert over_plain >= 0.97


@pytest.mark.parametrize("acceptance", [0.1, 0.8])
def test_short_requests_begin_with_what_others_have_seen(tmp_path: Path, acceptance: float) -> None:
    devices = Devices(acceptance=acceptance)
    over_plain, over_best = shares(tmp_path, devices, Load(16, 32), warm_up_s=0.0, seconds=8.0)
    assert over_plain >= 0.97
    assert over_best >= 0.90


def test_a_load_that_goes_is_seen_soon(tmp_path: Path) -> None:
    """Saturated passes become cheap ones: within seconds all sessions speculate."""
    saturated = Devices(verify_pass=PassTime(2.0, 6.0), acceptance=0.8)
    fleet = SimulatedFleet(tmp_path, saturated, Load(sessions=8))
    fleet.run(6.0)
    fleet.devices = Devices(acceptance=0.8)
    fleet.run(4.0)
    after = fleet.run(2.0)
    assert after.sizes[0] < 0.1 * after.sizes.total()
