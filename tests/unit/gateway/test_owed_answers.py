"""What a replica owes its sessions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from paceline_gateway.owed_answers import Answer, OwedAnswers

from paceline.errors import Failure
from paceline.messages import (
    Close,
    Closed,
    Draft,
    Drafted,
    Evicted,
    Failed,
    NeedTokens,
    Open,
    SamplingParams,
    Verified,
    Verify,
)
from paceline.speculation.tree import EMPTY_BLOCK


def verify(session: str = "s", number: int = 1) -> Verify:
    return Verify(session, 1, number, 3, 99)


def draft(number: int) -> Draft:
    return Draft("s", 1, number, 3, 99, 4)


@pytest.mark.parametrize(
    "answer",
    [
        Verified("s", 1, 1, 3, (), (1,), 3),
        NeedTokens("s", 1, 1, 0),
        Evicted("s", 1, 1),
        Failed("s", 1, 1, Failure("internal", "")),
    ],
)
def test_a_replica_is_silent_from_the_question_on_until_it_answers(answer: Answer) -> None:
    owed = OwedAnswers()
    owed.sent(Open("s", 1, (1, 2, 3), 3, SamplingParams()), 5.0)
    assert owed.silent_s(9.0) == 0.0
    owed.sent(verify(), 10.0)
    owed.sent(verify(), 12.0)  # once more
    assert owed.silent_s(13.0) == 3.0
    owed.answered(answer, 13.0)
    assert owed.silent_s(99.0) == 0.0


def test_the_oldest_question_counts_and_what_is_said_to_anybody_ends_the_silence() -> None:
    owed = OwedAnswers()
    owed.sent(verify("a"), 10.0)
    owed.sent(verify("b"), 11.0)
    assert owed.silent_s(12.0) == 2.0
    owed.heard(12.0)
    owed.answered(Evicted("a", 1, 1), 12.0)
    assert owed.silent_s(14.0) == 2.0


def test_of_two_drafts_the_second_is_owed_when_the_first_has_come() -> None:
    owed = OwedAnswers()
    owed.sent(draft(1), 10.0)
    owed.sent(draft(2), 11.0)
    owed.heard(12.0)
    owed.answered(Drafted("s", 1, 1, EMPTY_BLOCK, 3), 12.0)
    assert owed.silent_s(15.0) == 3.0
    owed.answered(Drafted("s", 1, 2, EMPTY_BLOCK, 3), 15.0)
    assert owed.silent_s(99.0) == 0.0


def test_sessions_that_wait_at_one_time_tell_of_one_silence() -> None:
    owed = OwedAnswers()
    for number in range(5):
        owed.sent(verify(f"s{number}"), 10.0 + number)
    told = []
    for number in range(5):
        now = 20.0 + number
        told.append(owed.is_another_silence(f"s{number}", now))
        # It answers closes while its pass goes on.
        owed.sent(Close(f"s{number}", 1), now)
        owed.heard(now)
        owed.answered(Closed(f"s{number}", 1), now)
    assert told == [True, False, False, False, False]
    owed.sent(verify("s1"), 24.5)
    assert owed.is_another_silence("s1", 35.0)
    assert not owed.is_another_silence("s2", 35.0), "it had nothing to wait for since"


async def test_the_last_answer_ends_the_wait_for_it() -> None:
    owed = OwedAnswers()
    await owed.wait_none()
    owed.sent(verify("a"), 1.0)
    owed.sent(Close("b", 1), 2.0)
    waiting = asyncio.create_task(owed.wait_none())
    owed.answered(Closed("b", 1), 3.0)
    await asyncio.sleep(0)
    assert not waiting.done()
    owed.answered(Evicted("a", 1, 1), 3.0)
    await waiting
    owed.sent(verify("a"), 4.0)
    owed.clear()
    await owed.wait_none()


class ChangingDict(dict[str, Any]):
    """Gets one more entry, as by another thread, between the beginning of an iteration and its first value."""

    def values(self) -> Any:
        values = iter(super().values())
        self["another"] = None
        return values


def test_a_thread_that_asks_for_the_silence_while_answers_come_gets_a_number() -> None:
    owed = OwedAnswers()
    owed.sent(verify(), 1.0)
    known, owed._owed = owed._owed, ChangingDict(owed._owed)
    assert owed.silent_s(2.0) == 0.0
    owed._owed = known
    assert owed.silent_s(2.0) == 1.0


def test_an_answer_of_the_epoch_before_leaves_what_the_new_one_is_owed() -> None:
    owed = OwedAnswers()
    owed.sent(Verify("s", 1, 37, 4, 0), 0.0)
    owed.sent(Close("s", 1), 1.0)
    owed.sent(Verify("s", 2, 1, 4, 0), 1.0)
    owed.answered(Failed("s", 1, 37, Failure("cancelled", "")), 2.0)
    owed.answered(Closed("s", 1), 2.0)
    assert owed.silent_s(20.0) == 18.0
    owed.answered(Verified("s", 2, 1, 4, (), (1,), 4), 21.0)
    assert owed.silent_s(99.0) == 0.0


def test_a_follow_up_that_is_refused_leaves_the_verdict_owed() -> None:
    owed = OwedAnswers()
    owed.sent(Verify("s", 1, 5, 4, 0), 0.0)
    owed.sent(Verify("s", 1, 6, 5, 0, follows=5, expected=(1,)), 0.0)
    owed.answered(Failed("s", 1, 6, Failure("capacity_exceeded", "")), 1.0)
    assert owed.silent_s(20.0) == 19.0
    owed.answered(Verified("s", 1, 5, 4, (), (1,), 4), 20.0)
    assert owed.silent_s(99.0) == 0.0


async def test_a_close_is_settled_by_what_answers_it() -> None:
    owed = OwedAnswers()
    owed.sent(Verify("s", 1, 5, 4, 0), 0.0)
    owed.sent(Close("s", 1), 0.0)
    owed.answered(Failed("s", 1, 5, Failure("cancelled", "")), 0.1)
    assert owed.silent_s(1.0) > 0.0
    owed.answered(Closed("s", 1), 1.0)
    async with asyncio.timeout(1.0):
        await owed.wait_none()
