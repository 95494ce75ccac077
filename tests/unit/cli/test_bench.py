from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.benchmark.contestants import Absentee
from paceline.benchmark.method_rows import MethodsResult
from paceline.benchmark.scale import ScalePlan
from paceline.cli.app import app
from paceline.errors import Unavailable


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--head", "eagle3"], "METHOD=FOLDER"),
        (["--head", "eagle4=x"], "eagle4"),
        (["--method", "medusa2"], "medusa2"),
    ],
)
def test_what_is_wrong_is_refused_before_a_fleet_is_started(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", "methods", *arguments])
    assert done.exit_code == 2
    assert message in done.stderr


def test_nothing_measured_is_a_failure_and_no_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def nothing(*_arguments: object) -> MethodsResult:
        return MethodsResult("target", ("chat",), 1, 8, (), (Absentee("eagle3", "pool", "its head is gone"),))

    monkeypatch.setattr("paceline.benchmark.methods.measure_methods", nothing)
    done = CliRunner().invoke(app, ["bench", "methods", "--out", str(tmp_path)])
    assert done.exit_code == 1
    assert "its head is gone" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("flags", "prepared", "candidates"),
    [
        ([], 0, 0.0),
        (["--prepared-outcomes", "8"], 8, 0.6),
        (["--prepared-outcomes", "3", "--candidates", "0.5"], 3, 0.5),
    ],
)
def test_outcomes_to_prepare_reach_the_simulated_fleet(
    flags: list[str], prepared: int, candidates: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[ScalePlan] = []

    async def nothing(plan: ScalePlan, *_arguments: object) -> None:
        plans.append(plan)
        raise Unavailable("nothing is measured here")

    monkeypatch.setattr("paceline.benchmark.scale.measure_scale", nothing)
    assert CliRunner().invoke(app, ["bench", "scale", *flags]).exit_code != 0
    assert (plans[0].options.prepared_outcomes, plans[0].options.candidates) == (prepared, candidates)
