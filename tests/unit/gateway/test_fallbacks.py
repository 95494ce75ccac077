"""Why a round went without a block although the generation speculates."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from paceline_gateway.effects import Lane
from paceline_gateway.plan import Patience
from paceline_gateway.round_record import Fallback

from paceline.errors import Cancelled, Failure, InvalidArgument
from paceline.messages import Verify
from paceline.token_log import TokenLog
from tests.unit.gateway.laws import Script, hash_law, nothing, perfect, plain_text_of, wrong_at
from tests.unit.gateway.simulated_replicas import Judge
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drain

LAW = hash_law(5)
EVER = Patience(drafter_pause_s=1e6)


def causes(simulation: Simulation) -> Counter[Fallback]:
    simulation.check_records()
    assert all(record.draft_tokens == 0 for record in simulation.records if record.fallback)
    return Counter(record.fallback for record in simulation.records if record.fallback is not None)


def ended(simulation: Simulation) -> Counter[Fallback]:
    simulation.run()
    assert simulation.error is None
    return causes(simulation)


def test_none_where_every_block_is_there(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW))
    simulation.start()
    assert not ended(simulation)


def test_plain_decoding_by_wish_is_no_fallback(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), num_draft_tokens=0)
    simulation.start()
    assert not ended(simulation)


@pytest.mark.parametrize(
    ("script", "context", "cause"),
    [(nothing, 256, Fallback.NOTHING_PROPOSED), (perfect(LAW), 4, Fallback.CONTEXT_FULL)],
)
def test_every_round_but_those_that_must_be_plain(
    tmp_path: Path, script: Script, context: int, cause: Fallback
) -> None:
    simulation = Simulation(tmp_path, LAW, script, max_tokens=10, drafter_context=context)
    simulation.start()
    # The first round reads the prompt, and the last token needs no block.
    assert ended(simulation) == {cause: 8}


def test_a_prompt_beyond_the_drafters_context(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=10, drafter_context=2)
    simulation.start()
    assert ended(simulation) == {Fallback.CONTEXT_FULL: 8}


def test_no_drafter(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=10)
    simulation.available[Lane.DRAFTER] = []
    simulation.start()
    assert ended(simulation) == {Fallback.NO_DRAFTER: 8}


def test_a_lost_drafter(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=10, draft_ahead=False)
    simulation.start()
    simulation.available[Lane.DRAFTER] = []
    simulation.break_link(Lane.DRAFTER)
    assert ended(simulation) == {Fallback.DRAFTER_LOST: 8}


def test_a_drafter_that_is_given_up_because_it_fails(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=10, patience=EVER)
    simulation.drafter.refuse = Failure("unavailable", "going down")
    simulation.start()
    assert ended(simulation) == {Fallback.DRAFTER_LOST: 8}


def test_a_late_draft(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, wrong_at(LAW, 0), max_tokens=4)
    simulation.start()
    while not simulation.terminal:
        if simulation.waiting[Lane.VERIFIER]:
            simulation.deliver(Lane.VERIFIER)  # and never a word of the drafter
        else:
            simulation.wait(1.0)
    assert causes(simulation) == {Fallback.LATE_DRAFT: 2}


def test_a_refused_block(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=10)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)  # the block that has been sent now was answered already; the next one is refused
    simulation.verifiers["v0"].refusals.append(Failure("invalid_argument", "no such node", "block"))
    assert ended(simulation) == {Fallback.BLOCK_REFUSED: 1}


def refuse_blocks(simulation: Simulation) -> Judge:
    """From now on the verifier refuses every block; returns what it did before."""
    judge = simulation.verifiers["v0"].judge

    def refuse(log: TokenLog, command: Verify) -> tuple[tuple[int, ...], tuple[int, ...]]:
        if command.block.tokens:
            raise InvalidArgument("the probabilities of draft 0 are not a distribution", field="draft_probs")
        return judge(log, command)

    simulation.verifiers["v0"].judge = refuse
    return judge


def test_a_drafter_whose_blocks_are_refused_again_and_again_is_left_alone(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=20, patience=EVER)
    refuse_blocks(simulation)
    simulation.start()
    # Three refused blocks; then no round asks it for another one.
    assert ended(simulation) == {Fallback.BLOCK_REFUSED: 3, Fallback.DRAFTER_LOST: 15}
    assert simulation.committed == plain_text_of(LAW, (1, 2, 3), 20)


def test_after_a_pause_it_has_one_try_until_a_block_has_been_judged(tmp_path: Path) -> None:
    simulation = Simulation(tmp_path, LAW, perfect(LAW), max_tokens=40)
    judge = refuse_blocks(simulation)
    simulation.start()
    for refusals in (3, 4, 5):
        while simulation.attached[Lane.DRAFTER] is not None:
            simulation.step()
        deliver_verdict(simulation)
        assert causes(simulation)[Fallback.BLOCK_REFUSED] == refusals
        simulation.wait(simulation.patience.drafter_pause_s)
    simulation.verifiers["v0"].judge = judge
    assert ended(simulation)[Fallback.BLOCK_REFUSED] == 5
    assert simulation.loop.report(simulation.now).accepted_tokens > 10


@pytest.mark.parametrize("steps", range(0, 14, 2))
def test_what_was_left_when_the_client_left_is_told(tmp_path: Path, steps: int) -> None:
    simulation = Simulation(tmp_path, LAW, wrong_at(LAW, 2))
    simulation.start()
    for _ in range(steps):
        simulation.now += 0.001
        simulation.step()
    simulation.loop.fail(Cancelled("gone"), simulation.now)
    simulation.settle()
    simulation.check_records()
    assert simulation.error is not None
