from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.benchmark.report import commit, write_report


@dataclass(frozen=True)
class _Point:
    name: str
    values: dict[str, float]


def test_a_report_names_machine_and_commit(tmp_path: Path) -> None:
    path = write_report("some", [_Point("a", {"x": 1.5})], tmp_path / "results")
    content = json.loads(path.read_text())
    assert path.name == "some.json"
    assert content["benchmark"] == "some"
    assert content["results"] == [{"name": "a", "values": {"x": 1.5}}]
    assert content["commit"] == commit()
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["packages"]["torch"]


def test_what_is_not_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="object"):
        write_report("some", [object()], tmp_path)
