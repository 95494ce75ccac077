"""Fencing numbers of owners that may not know of each other."""

from __future__ import annotations

import time

import pytest
from paceline_gateway.epochs import next_epoch

LARGEST = 2**63 - 1
"""Of the wire."""


def at(monkeypatch: pytest.MonkeyPatch, ms: int) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: ms * 1_000_000)


def test_it_is_newer_than_the_records_and_than_any_that_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, 1_800_000_000_000)
    forgotten = next_epoch(7)
    assert forgotten > 7
    at(monkeypatch, 1_800_000_000_002)
    assert next_epoch(7) > forgotten
    assert next_epoch() > forgotten


@pytest.mark.parametrize("clock_ms", [1_800_000_000_000, 0])
def test_two_that_take_theirs_at_once_after_one_record_share_none(
    monkeypatch: pytest.MonkeyPatch, clock_ms: int
) -> None:
    """The second clock is behind that of the gateway that wrote the record."""
    at(monkeypatch, clock_ms)
    before = 1_700_000_000_000 << 20
    epochs = {next_epoch(before) for _ in range(16)}
    assert len(epochs) > 14, "of 120 pairs hardly one may be equal"
    assert min(epochs) > before


def test_it_fits_the_wire_for_two_hundred_years(monkeypatch: pytest.MonkeyPatch) -> None:
    at(monkeypatch, (2248 - 1970) * 365 * 86_400_000)
    assert next_epoch() < LARGEST
