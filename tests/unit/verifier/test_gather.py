"""When a pass waits for sessions that the last one answered."""

from __future__ import annotations

import pytest
from paceline_verifier.gather import GatherWindow

WINDOW_S = 0.004
PASS_S = 0.010


class Rounds:
    """Sessions that are answered together and come back after times of their own."""

    def __init__(self, window_s: float = WINDOW_S, pass_s: float = PASS_S) -> None:
        self.now_s = 100.0
        self.gather = GatherWindow(window_s, lambda: self.now_s)
        self.pass_s = pass_s

    def play(self, returns_s: dict[str, float], times: int = 1) -> None:
        """All are answered, then all come back, the quickest first."""
        for _ in range(times):
            self.gather.pass_took(self.pass_s)
            answered_s = self.now_s
            for session in returns_s:
                self.gather.answered(session)
            for session, took_s in sorted(returns_s.items(), key=lambda item: item[1]):
                self.now_s = answered_s + took_s
                self.gather.returned(session, self.now_s)

    def answer(self, *sessions: str) -> None:
        self.gather.pass_took(self.pass_s)
        for session in sessions:
            self.gather.answered(session)


def test_a_session_that_is_usually_back_soon_is_waited_for_until_the_window_ends() -> None:
    rounds = Rounds()
    rounds.play({"a": 0.001, "b": 0.002}, times=3)
    rounds.answer("a", "b")
    rounds.now_s += 0.001
    rounds.gather.returned("a", rounds.now_s)
    assert rounds.gather.delay_s() == pytest.approx(0.003)
    rounds.now_s += 0.001
    rounds.gather.returned("b", rounds.now_s)
    assert rounds.gather.delay_s() == 0
    rounds.answer("a", "b")
    rounds.gather.returned("a", rounds.now_s)
    rounds.now_s += WINDOW_S
    assert rounds.gather.delay_s() == 0, "b is late"


def test_a_session_alone_never_waits() -> None:
    rounds = Rounds()
    for _ in range(5):
        rounds.play({"a": 0.001})
        assert rounds.gather.delay_s() == 0


def test_nobody_waits_for_a_session_whose_drafts_take_long_or_that_is_not_known() -> None:
    rounds = Rounds()
    rounds.play({"quick": 0.001, "slow": 0.050}, times=3)
    rounds.answer("quick", "slow", "new")
    rounds.gather.returned("quick", rounds.now_s + 0.001)
    assert rounds.gather.delay_s() == 0


def test_one_slow_round_is_forgotten_within_a_few() -> None:
    rounds = Rounds()
    rounds.play({"a": 0.001, "b": 0.001}, times=3)
    rounds.play({"a": 0.001, "b": 30.0})
    rounds.play({"a": 0.001, "b": 0.001}, times=3)
    rounds.answer("a", "b")
    rounds.gather.returned("a", rounds.now_s)
    assert rounds.gather.delay_s() > 0


def test_waiting_is_never_longer_than_a_pass() -> None:
    rounds = Rounds(pass_s=0.0015)
    rounds.play({"a": 0.001, "b": 0.001}, times=3)
    rounds.answer("a", "b")
    rounds.gather.returned("a", rounds.now_s)
    assert rounds.gather.delay_s() == pytest.approx(0.0015)
    rounds.pass_s = 0.0008
    rounds.answer("a")
    rounds.gather.returned("a", rounds.now_s)
    assert rounds.gather.delay_s() == 0, "b usually takes longer than a pass"


def test_a_session_that_has_ended_is_not_waited_for_and_window_0_waits_for_nobody() -> None:
    for window_s, ends in ((WINDOW_S, True), (0.0, False)):
        rounds = Rounds(window_s)
        rounds.play({"a": 0.001, "b": 0.001}, times=3)
        rounds.answer("a", "b")
        rounds.gather.returned("a", rounds.now_s)
        if ends:
            assert rounds.gather.delay_s() > 0
            rounds.gather.forget("b")
        assert rounds.gather.delay_s() == 0
