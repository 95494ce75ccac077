from __future__ import annotations

import pytest
from rich.console import Console

from paceline.benchmark.compare import PLAIN, Configuration, Equality
from paceline.benchmark.contestants import Absentee
from paceline.benchmark.fleet_runs import FleetRuns
from paceline.benchmark.memory import ExtraMemory
from paceline.benchmark.method_rows import MethodsResult, method_row
from paceline.benchmark.methods import KINDS, QUICK, Effort
from paceline.benchmark.methods_table import methods_table, notes
from paceline.benchmark.prompts import Prompt
from paceline.cli.request import Completion
from paceline.generation import Evidence
from tests.unit.benchmark.runs import completion

WAY = Configuration("eagle", 4)
PROMPTS = (Prompt("a", "chat", "", 9), Prompt("b", "code", "", 9))


def plain(total_ms: float) -> Completion:
    """Ten tokens: the first one after 30 ms, each other one after a pass of 20 ms."""
    return completion(10, Evidence(10, 1.0, time_to_first_token_ms=30, total_ms=total_ms, verify_ms=210))


def fast(total_ms: float, drafted: tuple[int, ...] = (4, 4), accepted: tuple[int, ...] = (3, 1)) -> Completion:
    """Ten tokens in five passes."""
    return completion(
        10,
        Evidence(
            5,
            2.0,
            drafted_per_position=drafted,
            accepted_per_position=accepted,
            time_to_first_token_ms=50,
            total_ms=total_ms,
            draft_ms=10,
            verify_ms=130,
            wire_ms=5,
        ),
    )


def found(equality: Equality = Equality.EQUAL) -> FleetRuns:
    return FleetRuns(
        {
            ("a", PLAIN): [plain(210), plain(420)],
            ("b", PLAIN): [plain(210), plain(210)],
            ("a", WAY): [fast(105), fast(140)],
            ("b", WAY): [fast(210), fast(210, drafted=(4,), accepted=(1,))],
        },
        {("a", WAY): [Equality.EQUAL] * 2, ("b", WAY): [Equality.EQUAL, equality]},
    )


def test_rounds_are_told_without_the_prompt_and_ratios_are_medians() -> None:
    row = method_row("eagle", "verifier", WAY, ExtraMemory(6, 3), found(), PROMPTS)
    chat, code, overall = row.kinds
    assert [figures.kind for figures in row.kinds] == ["chat", "code", "overall"]
    assert (chat.draft_ms, chat.verify_ms, chat.wire_ms) == pytest.approx((2, 25, 1))
    assert (chat.ratio, code.ratio, overall.ratio) == pytest.approx((2.5, 1.0, 1.75))
    assert chat.acceptance == pytest.approx((6 / 8, 2 / 8))
    assert overall.acceptance == pytest.approx((10 / 16, 3 / 12))
    assert overall.tokens_per_pass == pytest.approx(2.0)
    assert row.overall is overall


def test_the_table_has_every_row_and_says_what_is_missing_or_wrong() -> None:
    row = method_row("eagle", "verifier", WAY, ExtraMemory(6, 3), found(Equality.DIFFERENT), PROMPTS)
    absent = Absentee("eagle3", "pool", "no checkpoint is known")
    result = MethodsResult("target", ("chat", "code"), 2, 96, (row,), (absent,))
    console = Console(width=160)
    with console.capture() as captured:
        console.print(methods_table(result))
    text = captured.get()
    for cell in ("eagle3", "not measured", "6 + 3", ".62 .25", "2.50", "1.75", "different"):
        assert cell in text
    missing, wrong = notes(result)
    assert "no checkpoint is known" in missing
    assert "bug" in wrong


def test_prompts_of_four_kinds() -> None:
    prompts = Effort(prompts_per_kind=2).schedule.prompts
    assert [prompt.kind for prompt in prompts] == [kind for kind in KINDS for _ in range(2)]
    assert len({prompt.name for prompt in prompts}) == 8
    assert len(QUICK.schedule.prompts) == len(KINDS) == 4
