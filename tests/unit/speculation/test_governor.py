from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.speculation.governor import Decision, Governor, Reason, RoundOutcome
from paceline.speculation.pair import Pair
from paceline.speculation.replica_times import DrafterTimes, DraftTimes, PassTimes
from paceline.speculation.room import Room

ROOM = Room(8, 16)
PASS_S = 0.030


class Session:
    """A session alone, whose rounds take the times given and accept what `accepts` says of a block's depth."""

    def __init__(
        self,
        accepts: Callable[[int], int],
        pinned: int | None = None,
        draft_token_s: float = 0.003,
        token_s: float = 0.0001,
        room: Room = ROOM,
    ) -> None:
        self.accepts = accepts
        self.draft_token_s = draft_token_s
        self.token_s = token_s
        self.room = room
        self.now = 0.0
        self.drafter = DrafterTimes()
        self.pair = Pair(drafter=None if room.drafts_itself else self.drafter)
        self.governor = Governor(self.pair, pinned)
        self.decisions: list[Decision] = []

    def run(self, rounds: int) -> list[Decision]:
        """What was decided for each of the rounds."""
        for _ in range(rounds):
            decision = self.governor.decide(self.room)
            depth = decision.max_depth
            accepted = min(self.accepts(depth), depth)
            draft_s, pass_s = depth * self.draft_token_s, PASS_S + self.token_s * (1 + depth)
            if depth:
                self.drafter.observe(depth, DraftTimes(draft_s))
            self.now += pass_s + draft_s
            itself = self.room.drafts_itself
            self.governor.observe(
                RoundOutcome(
                    decision,
                    PassTimes(
                        verify_s=pass_s,
                        draft_wait_s=0.0 if itself else draft_s,
                        self_draft_s=draft_s if itself else 0.0,
                        self_draft_depth=depth if itself else 0,
                        period_s=pass_s + draft_s,
                        batch_tokens=1 + depth,
                    ),
                    asked=depth > 0,
                    num_draft_tokens=depth,
                    depth=depth,
                    accepted_path=tuple(range(1, accepted + 1)),
                    at=self.now,
                )
            )
            self.decisions.append(decision)
        return self.decisions[-rounds:]


def all_of_it(depth: int) -> int:
    return depth


def nothing(depth: int) -> int:
    return 0


def test_a_session_of_which_nothing_is_known_begins_with_a_small_block() -> None:
    decision = Session(all_of_it).run(1)[0]
    assert (decision.max_depth, decision.ahead_depth, decision.reason) == (4, 4, Reason.PAYS)


def test_drafts_that_are_all_accepted_get_the_largest_block() -> None:
    session = Session(all_of_it)
    assert {decision.max_depth for decision in session.run(200)[100:] if decision.reason is Reason.PAYS} == {8}
    assert session.governor.num_changes <= 3


def test_drafts_that_are_never_accepted_are_given_up_soon() -> None:
    reasons = [decision.reason for decision in Session(nothing).run(16)]
    assert reasons[-8:] == [Reason.OFF] * 8


def probes_of(session: Session, rounds: int) -> list[int]:
    """Plain rounds before each probe."""
    gaps, plain = [], 0
    for decision in session.run(rounds):
        if decision.reason is Reason.PROBE:
            gaps.append(plain)
            plain = 0
        plain += decision.reason is Reason.OFF
    return gaps


def test_a_probe_comes_after_200_times_the_plain_rounds_that_the_one_before_it_cost() -> None:
    """A draft of one token takes a tenth of a plain round, or all of it, or four."""
    assert probes_of(Session(nothing), 200)[:4] == [16, 20, 20, 20]
    for draft_rounds in (1, 4):
        gaps = probes_of(Session(nothing, draft_token_s=draft_rounds * PASS_S), 500 * draft_rounds)
        assert len(gaps) == 3
        assert all(190 * draft_rounds <= gap <= 210 * draft_rounds for gap in gaps[1:])


def test_a_probe_that_pays_is_followed_by_another_at_once_and_speculation_comes_back() -> None:
    session = Session(nothing, draft_token_s=PASS_S / 2)
    session.run(40)
    session.accepts = all_of_it
    later = session.run(150)
    first = next(index for index, decision in enumerate(later) if decision.reason is Reason.PROBE)
    assert later[first + 1].reason is Reason.PROBE
    assert later[-1].reason is Reason.PAYS


@pytest.mark.parametrize("pinned", [0, 1, 3, 7])
def test_a_pinned_size_is_not_interfered_with(pinned: int) -> None:
    decisions = Session(nothing, pinned=pinned).run(300)
    assert {(decision.max_depth, decision.reason) for decision in decisions} == {(pinned, Reason.PINNED)}


def test_a_pinned_size_gives_way_to_the_end_of_a_context() -> None:
    governor = Governor(Pair(), pinned=7)
    assert governor.decide(Room(3, 16)).max_depth == 3
    assert governor.decide(Room(0, 16)) == Decision(0, 0, 0, Reason.NO_ROOM)


def test_near_the_end_blocks_are_cut_and_nothing_is_learned_of_it() -> None:
    session = Session(all_of_it)
    session.run(100)
    session.room = Room(2, 16)
    assert {decision.max_depth for decision in session.run(5) if decision.reason is Reason.PAYS} == {2}
    assert session.governor.size == 8


def test_less_room_that_stays_is_no_end_of_a_session() -> None:
    session = Session(all_of_it)
    session.run(200)
    session.room, session.accepts = Room(5, 16), nothing
    reasons = [decision.reason for decision in session.run(500)]
    assert Reason.PAYS not in reasons[150:]
    assert Reason.PROBE in reasons[150:]


def test_drafts_made_ahead_go_on_with_less_room() -> None:
    session = Session(all_of_it)
    before = session.run(200)[-1]
    assert (before.max_depth, before.ahead_depth) == (8, 8)
    session.room = Room(5, 16)
    after = session.run(200)[-1]
    assert (after.max_depth, after.ahead_depth > 0) == (5, True)


def test_where_blocks_pay_a_plain_round_is_measured_seldom_and_ever_seldomer() -> None:
    reasons = [decision.reason for decision in Session(all_of_it).run(1200)]
    measured = [index for index, reason in enumerate(reasons) if reason is Reason.MEASURE]
    assert measured == [64, 64 + 129, 64 + 129 + 257, 64 + 129 + 257 + 513]


def test_what_is_hardly_better_is_not_worth_a_change() -> None:
    """Drafts as expensive as passes and always right: every size is about as fast."""
    session = Session(all_of_it, draft_token_s=PASS_S, token_s=0.0, room=Room(8, 16, may_draft_ahead=False))
    session.run(50)
    before = session.governor.num_changes
    session.run(1000)
    assert session.governor.num_changes == before


def test_slow_drafts_that_are_often_right_are_drafted_ahead() -> None:
    session = Session(all_of_it, draft_token_s=0.012)
    assert session.run(200)[-1].ahead_depth
    without = Session(all_of_it, draft_token_s=0.012, room=Room(8, 16, may_draft_ahead=False))
    assert not any(decision.ahead_depth for decision in without.run(200))


def test_a_verifier_that_drafts_by_itself_is_governed_too() -> None:
    room = Room(8, 16, may_draft_ahead=False, drafts_itself=True)
    assert Session(all_of_it, room=room).run(100)[-1].max_depth == 8
    assert probes_of(Session(nothing, room=room), 100) == [16, 20, 20, 20]


def test_a_session_begins_with_what_others_have_seen() -> None:
    """Where nothing was accepted of others, a new session does not try: probes find out when that is over."""
    first = Session(nothing, draft_token_s=0.010)
    first.run(200)
    assert [Governor(first.pair).decide(ROOM).max_depth for _ in range(10)] == [0] * 10


def test_a_session_that_decodes_plainly_alone_does_not_make_forget_how_slow_the_blocks_of_all_are() -> None:
    session = Session(all_of_it)
    session.run(100)
    pair = session.pair
    for _ in range(200):
        pair.block_ended(8, True, 0.060)
    before = pair.model(ROOM, pair.gains(8), 1.0).block(8, True).seconds
    for _ in range(500):
        pair.takes_probe()
    assert pair.model(ROOM, pair.gains(8), 1.0).block(8, True).seconds == before


# --- trees ------------------------------------------------------------------------------------------------------------


def size_of_trees(token_s: float) -> int:
    """Nodes that are sent of trees of 16 whose first three nodes bring all there is, at so much per token of a pass."""
    drafter = DrafterTimes()
    governor = Governor(Pair(drafter=drafter))
    now = 0.0
    decision = governor.decide(ROOM)
    for _ in range(300):
        nodes = min(decision.num_draft_tokens, 16)
        pass_s = PASS_S + token_s * (1 + nodes)
        if nodes:
            drafter.observe(3, DraftTimes(0.006))
        path = tuple([node for node in (1, 2, 3) if node <= nodes])
        times = PassTimes(pass_s, draft_wait_s=0.006, period_s=pass_s + 0.006, batch_tokens=1 + nodes)
        now += pass_s + 0.006
        governor.observe(RoundOutcome(decision, times, nodes > 0, nodes, min(nodes, 3), path, branched=True, at=now))
        decision = governor.decide(ROOM)
    assert decision.max_depth == 8
    return decision.num_draft_tokens


def test_of_a_tree_so_much_is_sent_as_pays() -> None:
    assert size_of_trees(token_s=0.003) in (3, 4)


# --- whatever is observed ---------------------------------------------------------------------------------------------

_SECONDS = st.floats(0.0, 1e3)
_outcomes = st.tuples(
    st.integers(0, 20),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.builds(
        PassTimes,
        verify_s=_SECONDS,
        queue_s=_SECONDS,
        draft_wait_s=_SECONDS,
        self_draft_s=_SECONDS,
        self_draft_depth=st.integers(0, 20),
        period_s=st.none() | _SECONDS,
        batch_sessions=st.integers(0, 300),
        batch_tokens=st.integers(0, 5000),
    ),
)
_rooms = st.builds(Room, st.integers(-2, 70), st.integers(0, 70), st.booleans(), st.booleans())


@settings(max_examples=40)
@given(st.lists(st.tuples(_outcomes, _rooms, _SECONDS), max_size=60), st.none() | st.integers(0, 64))
def test_sizes_stay_within_the_room_and_depend_on_nothing_else(
    rounds: list[tuple[tuple[int, int, bool, bool, PassTimes], Room, float]], pinned: int | None
) -> None:
    twins = []
    for _ in range(2):
        drafter = DrafterTimes()
        twins.append((Governor(Pair(drafter=drafter), pinned), drafter))
    for (depth, accepted, asked, branched, times), room, draft_s in rounds:
        first, second = [governor.decide(room) for governor, _ in twins]
        assert first == second
        assert 0 <= first.max_depth <= max(room.max_depth, 0)
        assert 0 <= first.num_draft_tokens <= room.max_draft_tokens
        assert (first.max_depth == 0) == (first.num_draft_tokens == 0)
        assert room.may_draft_ahead or not first.ahead_depth
        path = tuple(range(1, min(accepted, depth) + 1))
        nodes = 2 * depth if branched else depth
        for governor, drafter in twins:
            drafter.observe(depth, DraftTimes(draft_s))
            governor.observe(RoundOutcome(first, times, asked, nodes, depth, path, branched))


@settings(max_examples=10)
@given(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.1]), min_size=6, max_size=6), st.integers(0, 2**32 - 1))
def test_changes_per_minute_are_bounded_whatever_happens(draft_times_s: list[float], luck: int) -> None:
    session = Session(lambda depth: (luck >> (len(session.decisions) // 16 % 32)) % 2 * depth)
    seconds = 0.0
    for draft_token_s in draft_times_s:
        session.draft_token_s = draft_token_s
        seconds += sum(PASS_S + decision.max_depth * draft_token_s for decision in session.run(60))
    assert session.governor.num_changes <= 8 + 2 * seconds + 1
