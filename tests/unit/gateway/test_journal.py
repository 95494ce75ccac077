from __future__ import annotations

import pytest
from paceline_gateway.effects import Commit
from paceline_gateway.journal import CreateRecord, FinishRecord, Journal, PutRecord, TouchRecord

from paceline.errors import Fenced
from paceline.messages import AcceptanceRule, SamplingParams, TokenOrigin
from paceline.session.store import Append, AppendOutcome, Positions, SessionRecord, SessionState
from paceline.token_log import TokenLog

APPLIED = AppendOutcome.APPLIED


class Setup:
    def __init__(self) -> None:
        self.log = TokenLog([1, 2])
        record = SessionRecord(
            "s", 1, "gw", "", SessionState.RUNNING, "m", SamplingParams(), AcceptanceRule.MATCH, 2, (1, 2)
        )
        self.journal = Journal(record, self.log, lambda: Positions("v"), ack_timeout_s=0.05, touch_every_s=100.0)

    def commit(self, *tokens: int) -> None:
        from_len = len(self.log)
        self.log.extend(tokens)
        self.journal.add(Commit(from_len, tokens, (TokenOrigin.PLAIN,) * len(tokens), (), ("x",) * len(tokens)))

    def released(self) -> list[tuple[tuple[int, ...], bool]]:
        return [(released.commit.tokens, released.durable) for released in self.journal.release()]

    def created(self) -> Setup:
        assert isinstance(self.journal.next_write(0.0), CreateRecord)
        self.journal.answered(APPLIED, 0.0)
        return self


def test_a_commit_is_released_when_the_record_holds_it() -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3, 4)
    assert journal.next_write(0.0) == Append("s", 1, "gw", 2, (3, 4), Positions("v"))
    assert setup.released() == []
    journal.answered(APPLIED, 0.01)
    assert setup.released() == [((3, 4), True)]


def test_one_write_at_a_time_takes_all_that_has_gathered() -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3)
    journal.next_write(0.0)
    setup.commit(4)
    setup.commit(5)
    assert journal.next_write(0.01) is None
    journal.answered(APPLIED, 0.02)
    assert setup.released() == [((3,), True)]
    assert journal.next_write(0.02) == Append("s", 1, "gw", 3, (4, 5), Positions("v"))
    journal.answered(AppendOutcome.ALREADY_APPLIED, 0.03)
    assert setup.released() == [((4,), True), ((5,), True)]


def test_a_silent_store_does_not_stop_the_stream_and_gets_the_suffix_later() -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3)
    journal.next_write(1.0)
    assert journal.deadline == pytest.approx(1.05)
    journal.tick(1.04)
    assert setup.released() == []
    journal.tick(1.05)
    assert setup.released() == [((3,), False)]
    setup.commit(4)
    setup.commit(5)
    assert setup.released() == [((4,), False), ((5,), False)]
    journal.answered(APPLIED, 3.0)
    assert journal.silent
    assert journal.next_write(3.0) == Append("s", 1, "gw", 3, (4, 5), Positions("v"))
    setup.commit(6)
    assert setup.released() == [((6,), False)]
    journal.answered(APPLIED, 3.01)
    assert journal.next_write(3.01) == Append("s", 1, "gw", 5, (6,), Positions("v"))
    journal.answered(APPLIED, 3.02)
    assert not journal.silent
    setup.commit(7)
    assert setup.released() == []


def test_a_failed_write_is_repeated_after_a_growing_pause() -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3)
    journal.next_write(0.0)
    journal.failed(0.0)
    assert setup.released() == [((3,), False)]
    assert journal.next_write(0.05) is None
    assert journal.deadline == pytest.approx(0.1)
    assert journal.next_write(0.1) == Append("s", 1, "gw", 2, (3,), Positions("v"))
    journal.failed(0.1)
    assert journal.deadline == pytest.approx(0.3)


def test_a_missing_record_is_written_whole() -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3)
    journal.next_write(0.0)
    journal.answered(AppendOutcome.MISSING, 0.0)
    assert setup.released() == []
    write = journal.next_write(0.0)
    assert isinstance(write, PutRecord)
    assert write.record.tokens == (1, 2, 3)
    assert write.record.positions == Positions("v")
    journal.answered(APPLIED, 0.0)
    assert setup.released() == [((3,), True)]
    assert journal.next_write(0.0) is None


def test_a_record_that_could_not_be_created_is_put() -> None:
    setup = Setup()
    journal = setup.journal
    journal.next_write(0.0)
    journal.failed(0.0)
    setup.commit(3)
    write = journal.next_write(1.0)
    assert isinstance(write, PutRecord)
    assert write.record.tokens == (1, 2, 3)


@pytest.mark.parametrize("outcome", [APPLIED, AppendOutcome.ALREADY_APPLIED])
def test_the_end_is_written_after_the_last_token(outcome: AppendOutcome) -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3)
    journal.end(SessionState.FINISHED, "stop")
    assert isinstance(journal.next_write(0.0), Append)
    journal.answered(outcome, 0.0)
    assert journal.next_write(0.0) == FinishRecord("s", 1, "gw", SessionState.FINISHED, "stop")
    assert not journal.settled
    journal.answered(outcome, 0.0)
    assert journal.settled
    assert journal.deadline is None


def test_the_end_of_a_missing_record_is_part_of_it() -> None:
    setup = Setup().created()
    journal = setup.journal
    journal.end(SessionState.CANCELLED, "cancelled")
    journal.next_write(0.0)
    journal.answered(AppendOutcome.MISSING, 0.0)
    write = journal.next_write(0.0)
    assert isinstance(write, PutRecord)
    assert (write.record.state, write.record.finish_reason) == (SessionState.CANCELLED, "cancelled")
    journal.answered(APPLIED, 0.0)
    assert journal.settled


def test_a_newer_owner_stops_this_one() -> None:
    setup = Setup().created()
    setup.commit(3)
    setup.journal.next_write(0.0)
    with pytest.raises(Fenced):
        setup.journal.answered(AppendOutcome.FENCED, 0.0)
    assert setup.released() == []


def test_a_session_without_progress_keeps_its_record_alive() -> None:
    setup = Setup().created()
    journal = setup.journal
    assert journal.deadline == pytest.approx(100.0)
    assert journal.next_write(99.0) is None
    assert journal.next_write(100.0) == TouchRecord("s", 1, "gw")
    journal.answered(APPLIED, 100.0)
    assert journal.deadline == pytest.approx(200.0)


def test_a_record_that_is_there_already_is_appended_to() -> None:
    log = TokenLog([1, 2, 3])
    record = SessionRecord(
        "s", 2, "gw", "", SessionState.RUNNING, "m", SamplingParams(), AcceptanceRule.MATCH, 2, (1, 2, 3)
    )
    journal = Journal(record, log, Positions, ack_timeout_s=0.05, touch_every_s=100.0, stored=True)
    assert journal.exists
    assert journal.next_write(0.0) is None
    # What the record held before is durable at once.
    journal.add(Commit(2, (3,), (TokenOrigin.RECORDED,), (), ("c",)))
    assert [released.durable for released in journal.release()] == [True]
    log.extend([4])
    assert journal.next_write(0.0) == Append("s", 2, "gw", 3, (4,), Positions())


def test_a_process_that_was_stopped_gives_the_store_its_time_again() -> None:
    setup = Setup().created()
    journal = setup.journal
    setup.commit(3)
    journal.next_write(0.0)
    journal.tick(30.0)  # the timer of 0.05 comes half a minute late
    assert setup.released() == []
    assert journal.deadline == pytest.approx(30.05)
    with pytest.raises(Fenced):
        journal.answered(AppendOutcome.FENCED, 30.01)
    assert setup.released() == []


def test_a_store_that_stays_silent_after_the_stop_is_silent() -> None:
    setup = Setup().created()
    setup.commit(3)
    setup.journal.next_write(0.0)
    setup.journal.tick(30.0)
    setup.journal.tick(30.06)
    assert setup.released() == [((3,), False)]
