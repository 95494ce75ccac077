"""What goes along with verdicts: the newest rows, in bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.engine import feature_bytes
from paceline.engine.served_features import ServedFeatures
from paceline.engine.target import TargetEngine
from paceline.messages import FeatureFormat, Features, Verified
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.unit.engine.rounds import Owner, run

FORM = FeatureFormat("final_norm", 2)
PROMPT = (3, 5, 7, 3, 5, 7, 3, 5)


def along(num_sessions: int, features_from: int = 0) -> Sequence[Features | None]:
    """What comes with the verdicts of one pass over sessions of 8 rows."""
    runner = ToyRunner(cycle_law((3, 5, 7)))
    engine = TargetEngine(runner, served=ServedFeatures(runner, FORM))
    for index in range(num_sessions):
        command = Owner(engine, PROMPT, name=str(index)).command()
        assert engine.submit(replace(command, features_from=features_from)) is None
    answers = run(engine)
    assert len(answers) == num_sessions
    return [answer.features for answer in answers if isinstance(answer, Verified)]


def ranges(features: Sequence[Features | None]) -> set[tuple[int, int] | None]:
    return {None if rows is None else (rows.first_row, rows.end) for rows in features}


@pytest.mark.parametrize(("features_from", "rows"), [(0, (2, 8)), (2, (2, 8)), (7, (7, 8)), (8, None), (9, None)])
def test_as_many_of_the_newest_rows_as_a_message_holds(
    features_from: int, rows: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_bytes, "MAX_FEATURE_BYTES", 6 * 8)
    assert ranges(along(1, features_from)) == {rows}


@pytest.mark.parametrize(("num_sessions", "first_row"), [(32, 2), (33, 5), (64, 5)])
def test_the_answers_of_a_large_pass_share_what_waits_in_a_stream(
    num_sessions: int, first_row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are queued before the first one is written: with full messages hundreds would overflow it."""
    monkeypatch.setattr(feature_bytes, "MAX_FEATURE_BYTES", 6 * 8)
    assert ranges(along(num_sessions)) == {(first_row, 8)}
