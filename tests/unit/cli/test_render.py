from __future__ import annotations

import pytest

from paceline.cli.render import STYLES, Summary, coloured, legend, summary_line
from paceline.messages import TokenOrigin as Origin


def spans(text: str, lengths: list[int], origins: list[Origin]) -> list[tuple[str, str]]:
    line = coloured(text, lengths, origins)
    assert line.plain == text
    return [(text[span.start : span.end], str(span.style)) for span in line.spans]


def test_each_token_has_the_colour_of_its_origin() -> None:
    assert spans("the quick fox", [3, 6, 4], [Origin.ACCEPTED, Origin.ACCEPTED, Origin.BONUS]) == [
        ("the", "green"),
        (" quick", "green"),
        (" fox", "cyan"),
    ]


def test_a_token_that_shows_nothing_yet_takes_no_text() -> None:
    assert spans("é!", [0, 1, 1], [Origin.ACCEPTED, Origin.RECOVERED, Origin.ACCEPTED]) == [
        ("é", "yellow"),
        ("!", "green"),
    ]


def test_text_beyond_the_lengths_is_the_last_tokens() -> None:
    assert spans("ab rest", [2], [Origin.RECOVERED]) == [("ab", "yellow"), (" rest", "yellow")]
    assert coloured("rest", [], []).plain == "rest"


def test_brackets_are_no_markup() -> None:
    assert coloured("[red]x[/]", [9], [Origin.PLAIN]).plain == "[red]x[/]"


def test_every_origin_has_a_style_of_its_own() -> None:
    assert set(STYLES) == set(Origin)
    assert len(set(STYLES.values())) == len(Origin)
    assert all(name in legend().plain for name in ("accepted", "recovered", "bonus", "plain"))


@pytest.mark.parametrize(
    ("acceptance", "expected"),
    [
        (
            0.876,
            "96 tokens | 20 passes | 4.80 tokens/pass | acceptance 88% | 40.0 tok/s | "
            "draft 900 ms, verify 1800 ms, wire 12 ms",
        ),
        (
            None,
            "96 tokens | 20 passes | 4.80 tokens/pass | no drafts | 40.0 tok/s | "
            "draft 900 ms, verify 1800 ms, wire 12 ms",
        ),
    ],
)
def test_summary_line(acceptance: float | None, expected: str) -> None:
    assert summary_line(Summary(96, 20, 4.8, acceptance, 40.0, 900.4, 1800.0, 12.3)) == expected
