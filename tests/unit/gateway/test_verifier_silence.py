"""A verifier that owes an answer and says nothing: it is left for another one, and the tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from paceline_gateway.effects import Lane
from paceline_gateway.plan import Patience

from paceline.errors import Unavailable
from paceline.messages import Open, Opened, Verified
from tests.unit.gateway.laws import hash_law, perfect, plain_text_of
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drain, verifies

LAW = hash_law(7)
EXPECTED = plain_text_of(LAW, [1, 2, 3], 24)
BOTH = ["v0", "v1"]


def freeze(simulation: Simulation) -> None:
    """What the verifier was about to say is never said."""
    simulation.waiting[Lane.VERIFIER].clear()


def in_the_second_round(folder: Path, available: list[str], patience: Patience | None = None) -> Simulation:
    simulation = Simulation(folder, LAW, perfect(LAW), max_tokens=24, patience=patience)
    simulation.available[Lane.VERIFIER] = list(available)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    deliver_verdict(simulation)
    drain(simulation, Lane.DRAFTER)
    assert not simulation.terminal
    freeze(simulation)
    return simulation


def opens(simulation: Simulation) -> int:
    """Times that a verifier was told the session: the drafter was told once."""
    return sum(isinstance(command, Open) for command in simulation.sent) - 1


def test_a_silent_verifier_is_left_for_another_which_gets_the_same_block(tmp_path: Path) -> None:
    simulation = in_the_second_round(tmp_path, BOTH)
    asked, follow_up = verifies(simulation)[-2:]
    assert follow_up.follows == asked.round
    simulation.wait(9.9)
    assert simulation.attached[Lane.VERIFIER] == "v0"
    simulation.wait(0.1)
    assert simulation.attached[Lane.VERIFIER] == "v1"
    assert verifies(simulation)[-1] == replace(asked, round=follow_up.round + 1)
    simulation.run()
    assert simulation.committed == EXPECTED
    assert simulation.loop.report(simulation.now).verifier == "v1"


def test_a_slow_verifier_has_a_multiple_of_its_usual_time(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = list(BOTH)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    simulation.wait(2.0)
    deliver_verdict(simulation)
    assert simulation.loop.verifier.typical_s == pytest.approx(2.0)
    drain(simulation, Lane.DRAFTER)
    freeze(simulation)
    simulation.wait(39.9)
    assert simulation.attached[Lane.VERIFIER] == "v0"
    simulation.wait(0.2)
    assert simulation.attached[Lane.VERIFIER] == "v1"


def test_the_time_that_the_prompt_took_is_no_measure_for_later_rounds(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = list(BOTH)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    simulation.deliver(Lane.VERIFIER)
    simulation.wait(5.0)
    deliver_verdict(simulation)
    drain(simulation, Lane.DRAFTER)
    freeze(simulation)
    simulation.wait(10.0)
    assert simulation.attached[Lane.VERIFIER] == "v1"


def test_a_prompt_may_take_longer_once_the_session_is_open(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = list(BOTH)
    simulation.start()
    assert isinstance(simulation.waiting[Lane.VERIFIER][0], Opened)
    simulation.deliver(Lane.VERIFIER)
    freeze(simulation)
    simulation.wait(59.9)
    assert simulation.attached[Lane.VERIFIER] == "v0"
    simulation.wait(0.1)
    assert simulation.attached[Lane.VERIFIER] == "v1"
    simulation.run()
    assert simulation.committed == EXPECTED


def test_a_verifier_that_does_not_even_open_a_session_is_left_sooner(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = list(BOTH)
    simulation.start()
    freeze(simulation)
    simulation.wait(10.0)
    assert simulation.attached[Lane.VERIFIER] == "v1"


def test_the_first_round_after_a_move_has_the_time_of_a_prompt(tmp_path: Path) -> None:
    simulation = in_the_second_round(tmp_path, BOTH)
    simulation.wait(10.0)
    simulation.deliver(Lane.VERIFIER)
    freeze(simulation)
    simulation.wait(59.9)
    assert simulation.attached[Lane.VERIFIER] == "v1"
    simulation.wait(0.1)
    assert simulation.attached[Lane.VERIFIER] == "v0"
    simulation.run()
    assert simulation.committed == EXPECTED


def test_the_only_verifier_is_opened_again_ever_more_seldom(tmp_path: Path) -> None:
    simulation = in_the_second_round(tmp_path, ["v0"])
    frozen_at, opened_at = simulation.now, []
    for _ in range(1500):
        before = opens(simulation)
        simulation.wait(0.1)
        freeze(simulation)
        if opens(simulation) > before:
            opened_at.append(round(simulation.now - frozen_at))
    assert opened_at == [10, 20, 40, 80]
    assert not simulation.terminal


def test_the_only_verifier_goes_on_when_it_wakes_up(tmp_path: Path) -> None:
    simulation = in_the_second_round(tmp_path, ["v0"])
    simulation.wait(10.0)
    simulation.run()
    assert simulation.committed == EXPECTED
    assert simulation.verifiers["v0"].sessions == {}


def test_a_late_answer_is_none_to_the_round_that_runs_since_the_session_was_opened_again(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=24)
    simulation.available[Lane.VERIFIER] = ["v0"]
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    late = simulation.waiting[Lane.VERIFIER].popleft()
    assert isinstance(late, Verified)
    simulation.wait(10.0)
    asked, committed = verifies(simulation), simulation.committed
    simulation.waiting[Lane.VERIFIER].appendleft(late)
    simulation.deliver(Lane.VERIFIER)
    assert simulation.committed == committed
    assert verifies(simulation) == asked
    simulation.run()
    assert simulation.committed == EXPECTED


def test_no_other_verifier_and_this_one_gone_is_unavailable_after_its_time(tmp_path: Path) -> None:
    simulation = in_the_second_round(tmp_path, ["v0"])
    simulation.available[Lane.VERIFIER] = []
    simulation.wait(10.0)
    simulation.wait(9.9)
    assert simulation.error is None
    simulation.wait(0.1)
    assert isinstance(simulation.error, Unavailable)


def test_a_session_that_waits_for_nothing_finds_no_fault(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.available[Lane.VERIFIER] = list(BOTH)
    simulation.start()
    simulation.loop.hold(True, simulation.now)
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    simulation.wait(1000.0)
    assert simulation.attached[Lane.VERIFIER] == "v0"
    assert simulation.loop.verifier.deadline is None
