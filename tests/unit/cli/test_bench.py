from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.benchmark.contestants import Absentee
from paceline.benchmark.method_rows import MethodsResult
from paceline.cli.app import app


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
