"""Where a generation ends inside a block, and everything at once in any order, without I/O."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paceline_gateway.effects import Lane
from paceline_gateway.plan import Patience

from paceline.messages import FinishReason, TokenOrigin
from tests.unit.gateway.laws import (
    EOS,
    bushy,
    garbage,
    hash_law,
    nothing,
    perfect,
    plain_text_of,
    too_deep,
    wrong_at,
    wrong_at_position,
)
from tests.unit.gateway.simulation import Simulation

# --- boundaries inside an accepted block --------------------------------------------------------------------------


def text_law(text: str) -> list[int]:
    return [ord(letter) - ord("a") for letter in text]


@pytest.mark.parametrize("num_draft_tokens", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("position", range(1, 9))
def test_a_stop_string_ends_at_the_same_token_wherever_it_falls(
    tmp_path: Path, position: int, num_draft_tokens: int
) -> None:
    script = text_law("abcdefghijk")
    script[position : position + 2] = text_law("lm")

    def law(tokens: object) -> int:
        assert isinstance(tokens, list | tuple) or hasattr(tokens, "__len__")
        return script[(len(tokens) - 3) % len(script)]

    simulation = Simulation(tmp_path, law, perfect(law), num_draft_tokens=num_draft_tokens, stop=("lm",))
    simulation.start()
    simulation.run()
    assert simulation.finish is not None
    assert simulation.finish.stop_string == "lm"
    assert simulation.text == "abcdefghijk"[:position]
    assert simulation.committed == tuple(script[: position + 2])


def test_tokens_after_the_end_never_leave(tmp_path: Path) -> None:
    script = [1, 2, EOS, 4, 5, 6]

    def law(tokens: object) -> int:
        return script[(len(tokens) - 3) % len(script)]  # type: ignore[arg-type]

    simulation = Simulation(tmp_path, law, perfect(law), max_tokens=5)
    simulation.start()
    simulation.run()
    assert simulation.committed == (1, 2, EOS)
    assert simulation.finish is not None
    assert simulation.finish.reason is FinishReason.STOP
    evidence = simulation.loop.report(simulation.now)
    assert evidence.accepted_tokens == sum(
        origin is TokenOrigin.ACCEPTED for commit in simulation.commits for origin in commit.origins
    )


# --- everything at once --------------------------------------------------------------------------------------------


@settings(max_examples=75, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 255), script_index=st.integers(0, 4), ahead=st.booleans())
def test_no_order_of_events_and_no_fault_changes_the_text(
    tmp_path: Path, data: st.DataObject, seed: int, script_index: int, ahead: bool
) -> None:
    """Some verifiers draft by themselves, some do not, and the session moves between them."""
    law = hash_law(seed, eos=3 if seed % 3 == 0 else None)
    scripts = [perfect(law), wrong_at(law, 1), wrong_at_position(law, 4), bushy(law), nothing]
    simulation = Simulation(
        tmp_path,
        law,
        scripts[script_index],
        max_tokens=20,
        draft_ahead=ahead,
        num_draft_tokens=data.draw(st.sampled_from([1, 3, 4])),
        patience=Patience(verifier_s=1e6, first_verifier_s=1e6),
    )
    for verifier in simulation.verifiers.values():
        verifier.self_draft = data.draw(st.sampled_from([None, *scripts, garbage(seed), too_deep(law)]))
    simulation.start()
    for _ in range(data.draw(st.integers(0, 40))):
        if simulation.terminal:
            break
        random_step(simulation, data)
    for lane in Lane:
        simulation.mend_link(lane)
    simulation.available = {Lane.VERIFIER: ["v0", "v1"], Lane.DRAFTER: ["d0"]}
    simulation.settle()
    simulation.run()
    assert simulation.error is None
    assert simulation.committed == plain_text_of(law, [1, 2, 3], 20)
    simulation.check_records()
    assert not simulation.verifiers["v0"].sessions.keys() | simulation.verifiers["v1"].sessions.keys()
    assert not simulation.drafter.sessions


def random_step(simulation: Simulation, data: st.DataObject) -> None:
    lane = data.draw(st.sampled_from(list(Lane)))
    match data.draw(st.sampled_from(["deliver"] * 6 + ["twice", "break", "mend", "restart", "forget", "wait", "move"])):
        case "deliver" if simulation.waiting[lane]:
            simulation.deliver(lane)
        case "twice" if simulation.waiting[lane]:
            simulation.deliver(lane, copies=2)
        case "break":
            simulation.break_link(lane)
        case "mend":
            simulation.mend_link(lane)
        case "restart":
            simulation.break_link(lane, restart=True)
            simulation.mend_link(lane, restarted=True)
        case "forget":
            simulation.forget(lane)
        case "wait":
            simulation.wait(data.draw(st.sampled_from([0.01, 0.06, 1.1])))
        case "move":
            simulation.available[Lane.VERIFIER] = data.draw(st.sampled_from([["v0"], ["v1"], ["v1", "v0"]]))
