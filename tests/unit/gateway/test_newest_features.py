"""Drafters that build on the newest row of features alone: no other row travels for them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from paceline_gateway.effects import Lane, Replica
from paceline_gateway.feature_book import FeatureBook
from paceline_gateway.pool_snapshot import PoolSnapshot

from paceline.messages import FeatureDtype, FeatureFormat, Features, ModelInfo
from tests.unit.gateway.feature_simulation import FORM, drafter_of, finish_fetch, with_features
from tests.unit.gateway.laws import hash_law, perfect, plain_text_of, wrong_at
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drafts, drain, verifies

LAW = hash_law(7)
LONG = [1] * 30
NEWEST = dataclasses.replace(FORM, only_last=True)


def finish(simulation: Simulation) -> None:
    """Runs to the end; fetches end as soon as they are asked for."""
    while not simulation.terminal:
        if simulation.fetches:
            finish_fetch(simulation)
        else:
            simulation.step()


@pytest.mark.parametrize("script", [perfect(LAW), wrong_at(LAW, 1)])
def test_a_verdict_brings_the_rows_that_it_made_and_a_draft_the_newest(tmp_path: Path, script: object) -> None:
    simulation = with_features(tmp_path, LAW, script, prompt=LONG, only_last=True, prompt_features=False)  # type: ignore[arg-type]
    simulation.start()
    finish(simulation)
    assert simulation.committed == plain_text_of(LAW, LONG, 24)
    assert [command.features_from for command in verifies(simulation)] == [
        command.base_len - 1 for command in verifies(simulation)
    ]
    assert [(draft.features.first_row, draft.features.num_rows) for draft in drafts(simulation) if draft.features] == [
        (draft.base_len - 2, 1) for draft in drafts(simulation)
    ]
    assert not simulation.fetches
    assert all(len(built) == 1 for built in drafter_of(simulation).built_on)


def test_a_drafter_that_comes_late_and_needs_all_of_them_gets_them_fetched(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), prompt=LONG, prompt_features=False)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    assert verifies(simulation)[0].features_from == len(LONG) - 1
    assert [fetch.rows for fetch in simulation.fetches] == [range(30)]
    finish(simulation)
    assert simulation.committed == plain_text_of(LAW, LONG, 24)
    assert drafter_of(simulation).built_on[0].start == 0


def test_rows_of_verdicts_that_no_draft_followed_do_not_gather() -> None:
    book = FeatureBook()
    book.attached(NEWEST)
    for first_row in (0, 4, 6):
        num_rows = 2
        book.verified(Features(first_row, num_rows, 2, FeatureDtype.FLOAT32, bytes(num_rows * 8)), first_row + num_rows)
    assert book.wanted_from(9) == 8
    assert book.lacking(9) is None
    taken = book.take(9)
    assert taken is not None
    assert (taken.first_row, taken.num_rows) == (7, 1)


@pytest.mark.parametrize(
    ("wanted", "method", "expected"),
    [
        ((), "", True),  # nobody is there yet: who comes may need them
        ((NEWEST,), "", False),
        ((None,), "", False),
        ((NEWEST, FORM), "", True),
        ((NEWEST, FORM), "m0", False),
        ((NEWEST, FORM), "m1", True),
        ((NEWEST,), "other", True),
    ],
)
def test_the_drafters_that_are_there_say_what_is_needed_of_prompts(
    wanted: tuple[FeatureFormat | None, ...], method: str, expected: bool
) -> None:
    infos = [
        ModelInfo("toy", 16, 64, (0,), "hash", "boot", methods=(f"m{index}",), features=features)
        for index, features in enumerate(wanted)
    ]
    snapshot = PoolSnapshot(ready=tuple([Replica(info.methods[0], info) for info in infos]))
    assert snapshot.build_on_prompts(method) == expected
