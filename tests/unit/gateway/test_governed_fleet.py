"""The governor in fleets: many sessions, full drafters, full verifiers and short requests, against what is fixed.

Time is simulated, everything that decides is real; the same comparison on processes is `paceline bench scale`. The
fixed ways of a test are plain decoding and those that are best there, found by running them all.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from paceline.engine.simulated.pass_time import PassTime
from tests.unit.gateway.simulated_devices import Devices
from tests.unit.gateway.simulated_fleet import Load, Seen, SimulatedFleet

PLAIN_SHARE, BEST_SHARE = 0.97, 0.93
IN_TURN, AHEAD = False, True


def run(folder: Path, devices: Devices, load: Load, warm_up_s: float, seconds: float) -> Seen:
    fleet = SimulatedFleet(folder, devices, load)
    fleet.run(warm_up_s)
    return fleet.run(seconds)


def fixed(folder: Path, devices: Devices, load: Load, size: int, ahead: bool, warm_up_s: float) -> float:
    """Goodput without a governor; nothing changes then, so it is seen soon."""
    load = dataclasses.replace(load, governed=False, num_draft_tokens=size, ahead=ahead)
    return run(folder, devices, load, min(warm_up_s, 0.5), 2.0 if warm_up_s else 3.0).goodput


def check(
    folder: Path,
    devices: Devices,
    load: Load,
    ways: tuple[tuple[int, bool], ...],
    warm_up_s: float = 1.0,
    seconds: float = 2.0,
) -> Seen:
    """Compares with plain decoding and the fixed ways given."""
    plain = fixed(folder, devices, load, 0, IN_TURN, warm_up_s)
    best = max([plain, *[fixed(folder, devices, load, size, ahead, warm_up_s) for size, ahead in ways]])
    governed = run(folder, devices, load, warm_up_s, seconds)
    assert governed.goodput >= PLAIN_SHARE * plain, (governed, plain)
    assert governed.goodput >= BEST_SHARE * best, (governed, best)
    assert governed.changes / load.sessions <= max(seconds, 4.0)  # 60 a minute
    return governed


@pytest.mark.parametrize(
    ("draft_pass", "way"),
    [(PassTime(3.0, 0.05), (3, IN_TURN)), (PassTime(3.4, 0.1), (3, IN_TURN)), (PassTime(3.0, 0.25), (4, AHEAD))],
    ids=["as_stated", "with_software", "dear_per_draft"],
)
def test_full_drafters_are_used_the_best_way(tmp_path: Path, draft_pass: PassTime, way: tuple[int, bool]) -> None:
    """16 sessions of a verifier and a drafter. With dear drafts one half drafts while the other half is judged."""
    check(tmp_path, Devices(draft_pass=draft_pass), Load(16), (way,))


def test_a_drafter_that_is_too_slow_for_all_at_once_serves_one_half_after_the_other(tmp_path: Path) -> None:
    """A draft for one session is fast; for 16 at once it is slower than the passes that it saves."""
    devices = Devices(draft_pass=PassTime(0.5, 2.0))
    governed = check(tmp_path, devices, Load(16), ((2, IN_TURN),), seconds=3.0)
    assert governed.sizes[2] > 0.9 * governed.sizes.total()


def test_two_verifiers_that_share_a_drafter_are_not_in_step_with_each_other(tmp_path: Path) -> None:
    """A longer draft would wait for those of the other verifier's sessions, longer than a pass waits for company."""
    check(tmp_path, Devices(verifiers=2), Load(32), ((3, IN_TURN),), seconds=1.5)


def test_one_session_drafts_ahead(tmp_path: Path) -> None:
    governed = check(tmp_path, Devices(), Load(1), ((4, AHEAD), (4, IN_TURN)), seconds=8.0)
    assert governed.ahead_hits > 0


def test_sessions_of_slow_replicas_that_draft_in_turn_find_out_that_ahead_is_better(tmp_path: Path) -> None:
    """They come from plain decoding, drafts having become better, and have never drafted ahead since."""
    devices = Devices(verify_pass=PassTime(120.0, 0.2), draft_pass=PassTime(12.0, 0.2), rtt_s=0.003)
    load = Load(16)
    fleet = SimulatedFleet(tmp_path, dataclasses.replace(devices, acceptance=0.1), load)
    fleet.run(4.0)
    fleet.devices = devices
    fleet.run(6.0)
    assert fleet.run(6.0).goodput >= BEST_SHARE * fixed(tmp_path, devices, load, 4, AHEAD, warm_up_s=0.5)


@pytest.mark.parametrize("max_tokens", [24, 96])
def test_short_requests_at_saturation_lose_nothing(tmp_path: Path, max_tokens: int) -> None:
    """Passes take their time per token, so blocks cost what they bring. From the first request on."""
    devices = Devices(verify_pass=PassTime(2.0, 6.0), acceptance=0.5)
    check(tmp_path, devices, Load(16, max_tokens), (), warm_up_s=0.0, seconds=12.0)


@pytest.mark.parametrize(("acceptance", "ways"), [(0.1, ()), (0.8, ((3, IN_TURN),))])
def test_short_requests_begin_with_what_others_have_seen(
    tmp_path: Path, acceptance: float, ways: tuple[tuple[int, bool], ...]
) -> None:
    check(tmp_path, Devices(acceptance=acceptance), Load(16, 32), ways, warm_up_s=0.0, seconds=6.0)


def test_what_it_costs_to_find_out_that_a_drafter_is_slow(tmp_path: Path) -> None:
    """From a cold start all sessions ask it, and wait: half of the first second is lost, and a tenth of the next."""
    load, devices = Load(16, 32), Devices(draft_pass=PassTime(40.0, 0.0))
    governed = SimulatedFleet(tmp_path, devices, load)
    plain = SimulatedFleet(tmp_path, devices, dataclasses.replace(load, governed=False, num_draft_tokens=0))
    assert governed.run(2.0).goodput >= 0.70 * plain.run(2.0).goodput
    assert governed.run(4.0).goodput >= PLAIN_SHARE * plain.run(4.0).goodput


@pytest.mark.parametrize("itself", [False, True], ids=["drafter", "verifier"])
@pytest.mark.parametrize("token_ms", [0.05, 0.6, 4.0], ids=["cheap", "dear", "too_dear"])
def test_trees_are_as_large_as_pays(tmp_path: Path, itself: bool, token_ms: float) -> None:
    """4 sessions whose blocks have two guesses at each of four places, from the pool or from the verifier itself.

    Compared with trees of every depth. Where tokens of a pass are cheap whole trees are sent, where they are dear the
    first nodes only, and none where plain decoding is faster.
    """
    devices = Devices(
        verify_pass=PassTime(10.0, token_ms),
        draft_pass=PassTime(0.5, 0.01),
        acceptance=0.6,
        branches=True,
        self_draft_pass=PassTime(0.5, 0.01) if itself else None,
    )
    load = Load(4, ahead=False)
    governed = check(tmp_path, devices, load, ((1, IN_TURN), (2, IN_TURN), (4, IN_TURN)))
    usual, _ = governed.sizes.most_common(1)[0]
    assert usual in {0.05: {6, 7, 8}, 0.6: {1, 2, 3, 4}, 4.0: {0}}[token_ms]


def test_a_load_that_goes_is_seen_soon(tmp_path: Path) -> None:
    """Saturated passes become cheap ones: within seconds all sessions speculate."""
    saturated = Devices(verify_pass=PassTime(2.0, 6.0), acceptance=0.8)
    fleet = SimulatedFleet(tmp_path, saturated, Load(sessions=8))
    fleet.run(6.0)
    fleet.devices = Devices(acceptance=0.8)
    fleet.run(4.0)
    after = fleet.run(2.0)
    assert after.sizes[0] < 0.1 * after.sizes.total()
