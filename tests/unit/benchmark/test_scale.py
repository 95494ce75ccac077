"""Figures, table and plot of `paceline bench scale`, without a fleet."""

from __future__ import annotations

import importlib.util
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline.benchmark.ideal import IdealResult
from paceline.benchmark.scale import Run, ScalePlan, ScaleResult, figures, rows
from paceline.benchmark.scale_fleet import ScaleOptions
from paceline.benchmark.scale_load import prompts
from paceline.benchmark.scale_meter import NO_CPU, PHASES, CpuSeconds, Reading
from paceline.benchmark.scale_table import notes, plot_distances, scale_table
from paceline.errors import ConfigurationError, InvalidArgument

OPTIONS = ScaleOptions(verifiers=4, drafters=2, max_sessions=64)


def _run(tokens_per_second: float, **fields: Any) -> Run:
    return Run(tokens_per_second, 100.0, rounds_per_second=20.0, **fields)


def test_figures_are_differences_per_second_and_per_round() -> None:
    before = Reading(10.0, 100, 9.9, CpuSeconds(gateway=1.0), rounds=5, phases_s=dict.fromkeys(PHASES, 1.0))
    after = Reading(
        12.0,
        400,
        11.4,
        CpuSeconds(gateway=1.5, redis=0.1, client=0.2),
        rounds=105,
        ahead_hits=30,
        fallbacks=2,
        phases_s=dict.fromkeys(PHASES, 1.0) | {"verify": 4.0},
        verifying_s=6.0,
        drafting_s=1.0,
    )
    found = figures(before, after, IdealResult(250.0, 55.0, 1.0, 1.0), OPTIONS, sessions=64)
    # tokens from the newest before to the newest after, the rest from reading to reading
    assert found.tokens_per_second == pytest.approx(200.0)
    assert found.rounds_per_second == 50.0
    assert found.achieved == pytest.approx(200 / 250)
    cpu = found.cpu_ms_per_round
    assert (cpu.gateway, cpu.redis, cpu.client, cpu.verifiers) == pytest.approx((5.0, 1.0, 2.0, 0.0))
    assert found.busy_cores == pytest.approx(0.8 / 2)
    assert dict(zip(PHASES, found.phases_ms, strict=True))["verify"] == pytest.approx(30.0)
    assert (found.verifier_busy, found.drafter_busy) == (6 / 2 / 4, 1 / 2 / 2)
    assert (found.ahead_hits, found.fallbacks) == (0.3, 0.02)
    # one session keeps one replica of each kind busy
    assert figures(before, after, IdealResult(250.0, 55.0, 1.0, 1.0), OPTIONS, sessions=1).verifier_busy == 3.0


def test_rows_are_medians_of_quotients_in_the_same_repeat() -> None:
    found = {
        "plain": [_run(30.0), _run(10.0), _run(20.0)],
        "sequential": [_run(60.0), _run(30.0), _run(40.0)],
        "ahead": [_run(90.0), _run(33.0), _run(80.0)],
    }
    plain, sequential, ahead = rows(1, 0.2, ("plain", "one process", "sequential", "ahead"), found)
    assert (plain.way, plain.over_plain, plain.tokens_per_second, plain.achieved) == ("plain", 1.0, 20.0, 0.2)
    assert (sequential.over_plain, sequential.over_sequential) == (2.0, 1.0)
    assert (ahead.over_plain, ahead.over_sequential, ahead.middle) == (3.3, 1.5, found["ahead"][2])
    (alone,) = rows(1, 0.2, ("ahead",), {"ahead": found["ahead"]})
    assert (alone.over_plain, alone.over_sequential) == (0.0, 0.0)


def _result(**fields: Any) -> ScaleResult:
    plan = ScalePlan(OPTIONS, (1, 64), (0.2, 5.0), repeats=1)
    found = {"plain": [_run(30.0)], "one process": [Run(70.0, 80.0)], "ahead": [_run(90.0, **fields)]}
    return ScaleResult(
        plan, PHASES, tuple([row for rtt_ms in plan.rtts_ms for row in rows(1, rtt_ms, plan.ways, found)])
    )


def test_the_table_has_a_line_for_each_row_and_no_cost_where_there_are_no_services() -> None:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(scale_table(_result(ahead_hits=0.25)))
    text = console.export_text()
    lines = [line for line in text.splitlines() if " 0.2 " in line or " 5 " in line]
    assert len(lines) == 6
    assert "4 verifiers (30 ms a pass and 0.05 a token), 2 drafters" in text
    assert "prepared" not in text
    assert lines[1].split() == ["1", "0.2", "one", "process", "70.0", "80.0", "0.875", "2.33"]
    assert lines[2].split()[-3:] == ["0.00", "0.00", "0.25"]


def test_the_title_names_prepared_outcomes() -> None:
    result = _result()
    options = replace(OPTIONS, prepared_outcomes=8)
    title = str(scale_table(replace(result, plan=replace(result.plan, options=options))).title)
    assert "blocks of 4, 8 outcomes prepared, 1 x" in title


def test_notes_name_what_is_full() -> None:
    def limit(**fields: Any) -> str:
        return notes(_result(**fields), num_cores=4)[1].partition("ahead: ")[2]

    assert limit().startswith("nothing of it is full")
    assert "verifiers, in passes for 95% of the time" in limit(verifier_busy=0.95, drafter_busy=0.5)
    assert "the machine: 3.8 of its 4 cores" in limit(busy_cores=3.8)
    # 50 ms per round at 20 rounds a second
    assert "gateway's event loop, busy for 100% of the time" in limit(cpu_ms_per_round=replace(NO_CPU, gateway=50.0))
    both = limit(verifier_busy=0.99, drafter_busy=0.99)
    assert both.startswith("limited by the verifiers, ")
    assert " and the drafters, " in both


def test_the_plot_is_a_picture_and_says_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plot_distances(tmp_path / "plot.png", _result().rows)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigurationError, match=r"paceline\[train\]"):
        plot_distances(tmp_path / "none.png", _result().rows)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"ways": ("plain", "fast")}, "--way fast"), ({"ways": ("one process",), "sessions": (1, 2)}, "one session only")],
)
def test_what_cannot_be_measured_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ScalePlan(OPTIONS, **fields).check()


def test_sessions_have_prompts_of_their_own_that_are_the_same_each_time() -> None:
    assert len(set(prompts(100, 50))) == 100
    assert prompts(3, 50) == prompts(100, 50)[:3]


def test_the_ideal_knows_how_often_an_outcome_is_prepared() -> None:
    assert ScaleOptions().outcome_chances(4) == (0.0,) * 5
    # Of three positions the next best token of each, and the one after that of the first.
    options = ScaleOptions(candidates=0.6, prepared_outcomes=4)
    assert options.outcome_chances(2) == pytest.approx((0.6 + 0.4 * 0.6, 0.6, 0.6))
