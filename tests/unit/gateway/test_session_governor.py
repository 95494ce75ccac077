"""The governor among the decisions of a session: it changes when tokens come, never which. Simulated replicas."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from paceline_gateway.effects import Lane
from paceline_gateway.session_governor import FleetTimes

from paceline.messages import Drafted, Verified
from paceline.speculation.governor import Reason
from tests.unit.gateway.laws import (
    Script,
    bushy,
    garbage,
    hash_law,
    nothing,
    perfect,
    plain_text_of,
    wrong_at,
    wrong_at_position,
)
from tests.unit.gateway.simulation import Simulation, drafts, verifies

LAW = hash_law(7)
SCRIPTS: dict[str, Script] = {
    "perfect": perfect(LAW),
    "wrong_at_0": wrong_at(LAW, 0),
    "wrong_sometimes": wrong_at_position(LAW, 5),
    "tree": bushy(LAW),
    "nothing": nothing,
    "garbage": garbage(3),
}
MAX_TOKENS = 200
PLAIN = plain_text_of(LAW, [1, 2, 3], MAX_TOKENS)
ROUND_S = 0.0012
"""What the simulated verifier says that a pass takes, queue included."""


class Governed(Simulation):
    """A governed generation in which drafts and rounds take time."""

    def __init__(self, folder: Path, script: Script, *, draft_s: float = ROUND_S / 10, **options: object) -> None:
        chosen = {"governed": True, "max_tokens": MAX_TOKENS, "num_draft_tokens": 8, **options}
        super().__init__(folder, LAW, script, **chosen)  # type: ignore[arg-type]
        self._draft_s = draft_s
        self._due: dict[int, float] = {}

    def step(self) -> None:
        """What is due first happens first."""
        for event in [event for lane in Lane for event in self.waiting[lane]]:
            takes_s = {Drafted: self._draft_s, Verified: ROUND_S}.get(type(event), 0.0)
            self._due.setdefault(id(event), self.now + takes_s)
        heads = [(self._due[id(self.waiting[lane][0])], lane) for lane in Lane if self.waiting[lane]]
        deadline = self.loop.deadline
        if not heads or (deadline is not None and deadline < min(due for due, _ in heads)):
            super().step() if not heads else self.wait(max((deadline or 0.0) - self.now, 0.0))
            return
        due, lane = min(heads, key=lambda head: head[0])
        self.now = max(self.now, due)
        del self._due[id(self.waiting[lane][0])]
        self.deliver(lane)

    def reasons(self) -> Counter[Reason]:
        """How many rounds were decided how."""
        return Counter(record.decision.reason for record in self.records if record.decision is not None)

    def finished(self) -> Simulation:
        """Runs to the end."""
        self.start()
        self.run()
        return self


@pytest.mark.parametrize("draft_s", [0.0, ROUND_S / 2, 10 * ROUND_S, 0.2], ids=["fast", "usual", "slow", "late"])
@pytest.mark.parametrize("draft_ahead", [True, False], ids=["ahead", "in_turn"])
@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_do_not_depend_on_what_the_governor_chooses(
    tmp_path: Path, script: str, draft_ahead: bool, draft_s: float
) -> None:
    simulation = Governed(tmp_path, SCRIPTS[script], draft_ahead=draft_ahead, draft_s=draft_s)
    simulation.finished()
    assert simulation.committed == PLAIN
    simulation.check_records()
    assert all(command.block.max_depth <= 8 for command in verifies(simulation))


@pytest.mark.parametrize("script", SCRIPTS)
def test_tokens_do_not_depend_on_it_where_the_verifier_drafts(tmp_path: Path, script: str) -> None:
    simulation = Governed(tmp_path, perfect(LAW), self_draft=SCRIPTS[script])
    simulation.finished()
    assert simulation.committed == PLAIN
    simulation.check_records()
    assert all(0 <= command.next_depth <= 8 for command in verifies(simulation))


def test_drafts_that_are_fast_and_right_get_the_largest_blocks(tmp_path: Path) -> None:
    simulation = Governed(tmp_path, perfect(LAW))
    simulation.finished()
    assert max(command.block.max_depth for command in verifies(simulation)) == 8
    assert simulation.loop.report(simulation.now).off_rounds == 0


@pytest.mark.parametrize("itself", [False, True], ids=["drafter", "verifier"])
def test_drafts_that_are_never_right_are_not_asked_for_any_more(tmp_path: Path, itself: bool) -> None:
    wrong = wrong_at(LAW, 0)
    simulation = Governed(tmp_path, wrong, draft_s=2 * ROUND_S, self_draft=wrong if itself else None)
    simulation.finished()
    reasons, evidence = simulation.reasons(), simulation.loop.report(simulation.now)
    assert evidence.off_rounds == reasons[Reason.OFF] > 150
    # The verifier's draft costs a fifth of a round, the drafter's two rounds, which are paid for first.
    assert evidence.probe_rounds == reasons[Reason.PROBE] == (5 if itself else 1)
    asked = (
        [command.next_depth for command in verifies(simulation)]
        if itself
        else [d.max_depth for d in drafts(simulation)]
    )
    assert sum(depth > 0 for depth in asked) < 30


def test_an_off_round_is_no_fallback(tmp_path: Path) -> None:
    simulation = Governed(tmp_path, wrong_at(LAW, 0), draft_s=2 * ROUND_S)
    simulation.finished()
    off = [record for record in simulation.records if record.decision and record.decision.reason is Reason.OFF]
    assert off
    assert all(
        record.fallback is None and record.draft_tokens == 0 and record.decision.size == 0
        for record in off
        if record.decision
    )


def test_a_size_that_is_fixed_is_no_decision(tmp_path: Path) -> None:
    simulation = Governed(tmp_path, wrong_at(LAW, 0), draft_s=2 * ROUND_S, governed=False, num_draft_tokens=3)
    simulation.finished()
    assert all(record.decision is None for record in simulation.records)
    assert [command.block.max_depth for command in verifies(simulation)[1:-3]] == [3] * (MAX_TOKENS - 4)


def test_sessions_learn_from_each_other(tmp_path: Path) -> None:
    """The second generation begins without blocks: the first has seen that they do not pay."""
    times = FleetTimes()
    for offs_of_the_first_rounds in (0, 9):
        simulation = Governed(tmp_path, wrong_at(LAW, 0), draft_s=2 * ROUND_S, times=times)
        simulation.finished()
        decided = [record.decision for record in simulation.records if record.decision is not None][:10]
        assert sum(decision.reason is Reason.OFF for decision in decided) >= offs_of_the_first_rounds


def test_times_of_replicas_are_kept_apart_and_are_bounded() -> None:
    times = FleetTimes()
    first = times.pair("v0", "d0", "")
    assert times.pair("v0", "d0", "") is first
    others = [times.pair("v1", "d0", ""), times.pair("v0", "d1", ""), times.pair("v0", "d0", "ngram")]
    assert all(other is not first for other in others)
    assert [other.verifier is first.verifier for other in others] == [False, True, True]
    assert [other.drafter is first.drafter for other in others] == [True, False, True]
    assert times.pair("v0", "", "").drafter is None
    times.pair("v0", "d1", "", gather_window_s=0.005)
    assert first.verifier.gather_window_s == 0.005
    for number in range(300):
        times.pair(f"v{number + 2}", "d0", "")
    assert times.pair("v0", "d0", "") is not first


def test_all_pairs_of_a_fleet_are_kept() -> None:
    times = FleetTimes()
    names = [(f"v{verifier}", f"d{drafter}" if drafter else "") for verifier in range(16) for drafter in range(17)]
    pairs = [times.pair(*name, "") for name in names]
    assert all(times.pair(*name, "") is pair for name, pair in zip(names, pairs, strict=True))


def test_pairs_of_a_verifier_always_share_its_times() -> None:
    """One pair is in use while hundreds of others come and go; another one was long forgotten and comes back."""
    times = FleetTimes()
    used = times.pair("v0", "d0", "")
    times.pair("v1", "d0", "")
    for number in range(300):
        assert times.pair("v0", "d0", "") is used
        times.pair(f"v{number + 2}", f"d{number + 1}", "")
    beside = times.pair("v0", "", "")
    assert beside.verifier is used.verifier
    assert times.pair("v1", "", "").verifier is times.pair("v1", "d0", "").verifier
    assert times.pair("v1", "d0", "").drafter is used.drafter
