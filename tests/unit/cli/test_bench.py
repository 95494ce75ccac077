from __future__ import annotations

import pytest
from typer.testing import CliRunner

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
