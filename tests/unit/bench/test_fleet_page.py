"""The tables of docs/benchmarks.md are those of bench/results."""

from __future__ import annotations

import re

from bench.fleet_page import PAGE, TABLES, filled


def test_the_page_shows_what_was_measured() -> None:
    page = PAGE.read_text("utf-8")
    assert filled(page) == page, "run `python -m bench.fleet_page`"


def test_every_table_has_its_place_once() -> None:
    page = PAGE.read_text("utf-8")
    assert sorted(re.findall(r"^<!-- table (\w+) -->$", page, re.MULTILINE)) == sorted(TABLES)


def test_a_table_is_replaced_up_to_the_next_blank_line() -> None:
    page = "Before.\n\n<!-- table distance -->\n| old |\n| --- |\n\nAfter.\n"
    first = filled(page)
    assert first.startswith("Before.\n\n<!-- table distance -->\n| way | 0 ms |")
    assert first.endswith("|\n\nAfter.\n")
    assert filled(first) == first
