"""When a pass waits for sessions that were answered a moment ago."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from paceline.engine.gather import GatherWindow

WINDOW_S = 0.020
PASS_S = 0.030


class Rounds:
    """Sessions that are answered together and come back after times of their own; a pass takes a fixed time."""

    def __init__(self, window_s: float = WINDOW_S, pass_s: float = PASS_S, token_s: float = 0.0) -> None:
        self.now_s = 100.0
        self.gather = GatherWindow(window_s, lambda: self.now_s)
        self.pass_s, self.token_s = pass_s, token_s

    def answer(self, *sessions: str) -> None:
        """A pass ends that had these, with five tokens each."""
        num_tokens = 5 * len(sessions)
        self.gather.pass_took(self.pass_s + self.token_s * num_tokens, len(sessions), num_tokens)
        for session in sessions:
            self.gather.answered(session)

    def play(self, returns_s: Mapping[str, float], times: int = 3) -> None:
        """All are answered, then all come back, the quickest first."""
        for _ in range(times):
            self.answer(*returns_s)
            answered_s = self.now_s
            for session, took_s in sorted(returns_s.items(), key=lambda item: item[1]):
                self.now_s = answered_s + took_s
                self.gather.returned(session, self.now_s)

    def back(self, session: str, after_s: float = 0.0) -> None:
        self.now_s += after_s
        self.gather.returned(session, self.now_s)


def test_a_pass_waits_until_the_others_of_the_last_one_are_usually_back() -> None:
    rounds = Rounds()
    rounds.play({"a": 0.001, "b": 0.009})
    rounds.answer("a", "b")
    rounds.back("a", 0.001)
    assert rounds.gather.delay_s(1) == pytest.approx(0.008)
    rounds.back("b", 0.008)
    assert rounds.gather.delay_s(2) == 0


def test_a_session_alone_never_waits() -> None:
    rounds = Rounds()
    for _ in range(5):
        rounds.play({"a": 0.001}, times=1)
        assert rounds.gather.delay_s(1) == 0


def test_one_that_is_late_is_waited_for_a_little_longer_and_then_no_more() -> None:
    rounds = Rounds()
    rounds.play({"a": 0.001, "b": 0.008})
    rounds.answer("a", "b")
    rounds.back("a", 0.001)
    rounds.now_s += 0.009
    assert 0 < rounds.gather.delay_s(1) <= 0.001
    rounds.now_s += 0.002
    assert rounds.gather.delay_s(1) == 0, "12 ms are half as long again"


def test_nobody_waits_for_a_session_that_takes_long_that_is_not_known_or_that_comes_now_soon_now_late() -> None:
    rounds = Rounds()
    rounds.play({"quick": 0.001, "slow": 0.050})
    rounds.answer("quick", "slow", "new")
    rounds.back("quick", 0.001)
    assert rounds.gather.delay_s(1) == 0
    fickle = Rounds()
    for took_s in (0.001, 0.030) * 4:
        fickle.play({"a": 0.001, "b": took_s}, times=1)
    fickle.answer("a", "b")
    fickle.back("a", 0.001)
    assert fickle.gather.delay_s(1) == 0, "15 ms on average, and as much away from that"


@pytest.mark.parametrize(("num_ready", "waits"), [(1, True), (2, True), (8, False)])
def test_one_more_is_worth_a_wait_while_few_are_ready(num_ready: int, waits: bool) -> None:
    rounds = Rounds()
    for others in ("w", "wxyz", "wx", "wxyz"):
        rounds.play(dict.fromkeys(others, 0.001), times=1)
    rounds.play({"a": 0.001, "b": 0.010})
    rounds.answer("a", "b")
    rounds.back("a", 0.001)
    # 2 / (9 + 30) against 1 / 30; 3 / 39 against 2 / 30; 9 / 39 against 8 / 30
    assert (rounds.gather.delay_s(num_ready) > 0) is waits


def test_where_time_goes_by_tokens_nobody_is_waited_for() -> None:
    rounds = Rounds(pass_s=0.0, token_s=0.003)
    for sessions in ("a", "abcd", "ab"):
        rounds.play(dict.fromkeys(sessions, 0.004), times=2)
    rounds.answer("a", "b")
    rounds.back("a", 0.001)
    assert rounds.gather.delay_s(1) == 0


def test_the_best_number_of_sessions_is_waited_for() -> None:
    rounds = Rounds()
    rounds.play({"a": 0.001, "b": 0.004, "c": 0.019})
    rounds.answer("a", "b", "c")
    rounds.back("a", 0.001)
    # 2 / (3 + 30) is more than 3 / (18 + 30)
    assert rounds.gather.delay_s(1) == pytest.approx(0.003)


def test_all_waits_together_are_never_longer_than_the_window_or_a_pass() -> None:
    for window_s, pass_s, most_s in ((0.020, 0.030, 0.020), (0.050, 0.010, 0.010)):
        rounds = Rounds(window_s, pass_s)
        names = [f"s{index}" for index in range(12)]
        rounds.play({name: 0.002 * index + 0.001 for index, name in enumerate(names)})
        rounds.answer(*names)
        rounds.back("s0", 0.001)
        ready, began_s = 1, rounds.now_s
        while delay_s := rounds.gather.delay_s(ready):
            assert rounds.now_s + delay_s <= began_s + most_s + 1e-9
            rounds.back(names[ready], delay_s)
            ready += 1
        assert ready > 1
        assert rounds.now_s - began_s <= most_s + 1e-9


def test_one_slow_round_is_forgotten_within_a_few() -> None:
    rounds = Rounds()
    rounds.play({"a": 0.001, "b": 0.002})
    rounds.play({"a": 0.001, "b": 30.0}, times=1)
    rounds.play({"a": 0.001, "b": 0.002}, times=12)
    rounds.answer("a", "b")
    rounds.back("a", 0.001)
    assert rounds.gather.delay_s(1) > 0


def test_a_session_that_has_ended_is_not_waited_for_and_window_0_waits_for_nobody() -> None:
    for window_s in (WINDOW_S, 0.0):
        rounds = Rounds(window_s)
        rounds.play({"a": 0.001, "b": 0.002})
        rounds.answer("a", "b")
        rounds.back("a", 0.001)
        assert (rounds.gather.delay_s(1) > 0) is bool(window_s)
        rounds.gather.forget("b")
        assert rounds.gather.delay_s(1) == 0
