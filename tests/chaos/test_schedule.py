"""Faults are drawn from the seed alone, and all kinds come."""

from __future__ import annotations

import itertools

from tests.chaos.conversations import draw_conversation
from tests.chaos.fleet import Blackouts
from tests.chaos.schedule import DECK, FaultKind, draw_faults


def test_a_seed_gives_the_same_faults_again_and_another_one_others() -> None:
    first, again, other = [list(draw_faults(seed, 180.0, mean_gap_s=3.0, longest_s=8.0)) for seed in (1, 1, 2)]
    assert first == again
    assert first != other
    assert all(early.at_s + 1.5 <= late.at_s for early, late in itertools.pairwise(first))
    assert first[0].at_s > 0
    assert first[-1].at_s < 180.0


def test_every_deck_brings_every_kind_as_often_as_it_has_it() -> None:
    kinds = [fault.kind for fault in draw_faults(3, 180.0, mean_gap_s=3.0, longest_s=8.0)]
    for start in range(0, len(kinds) - len(DECK), len(DECK)):
        assert sorted(kind.value for kind in kinds[start : start + len(DECK)]) == sorted(kind.value for kind in DECK)
    assert set(kinds) == set(FaultKind)


def test_conversations_are_drawn_from_seed_and_number() -> None:
    drawn = [draw_conversation(5, number) for number in range(40)]
    assert drawn == [draw_conversation(5, number) for number in range(40)]
    requests = [turn.request for conversation in drawn for turn in conversation.turns]
    assert len({request.seed for request in requests}) == len(requests)
    assert {len(conversation.turns) for conversation in drawn} == {1, 2, 3}
    assert {request.sampling.greedy for request in requests} == {True, False}
    assert any(request.stop for request in requests)


def test_blackouts_are_counted_where_they_overlap() -> None:
    blackouts = Blackouts()
    for usable, now in ((True, 0.0), (False, 1.0), (False, 2.0), (True, 4.0), (False, 10.0)):
        blackouts.note(usable, now)
    assert blackouts.seconds_in(0.0, 9.0) == 3.0
    assert blackouts.seconds_in(2.0, 3.0) == 1.0
    assert blackouts.seconds_in(3.0, 12.0) == 3.0
