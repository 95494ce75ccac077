"""A drafter that builds on the target's features: they come with verdicts, or are fetched. Simulated replicas."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paceline_gateway import feature_book
from paceline_gateway.effects import Lane
from paceline_gateway.feature_book import FeatureBook
from paceline_gateway.plan import Patience
from paceline_gateway.round_record import Fallback

from paceline.messages import MAX_FEATURE_BYTES, FeatureDtype, Features
from tests.unit.gateway.feature_simulation import FORM, ROW_BYTES, drafter_of, finish_fetch, with_features
from tests.unit.gateway.laws import bushy, hash_law, perfect, plain_text_of, wrong_at, wrong_at_position
from tests.unit.gateway.simulated_replicas import SimDrafter
from tests.unit.gateway.simulation import Simulation, deliver_verdict, drafts, drain, verifies
from tests.unit.gateway.test_round_loop_ends import random_step

LAW = hash_law(7)
PLAIN = plain_text_of(LAW, [1, 2, 3], 24)
LONG = [1] * 30


def finish(simulation: Simulation, fetches_succeed: bool = True) -> None:
    """Runs to the end; fetches end as soon as they are asked for."""
    while not simulation.terminal:
        if simulation.fetches:
            finish_fetch(simulation, fetches_succeed)
        else:
            simulation.step()


@pytest.mark.parametrize("num_draft_tokens", [1, 4])
@pytest.mark.parametrize("script", [perfect(LAW), wrong_at(LAW, 1), wrong_at_position(LAW, 5), bushy(LAW)])
def test_drafts_build_on_the_features_of_all_committed_tokens(
    tmp_path: Path, script: object, num_draft_tokens: int
) -> None:
    simulation = with_features(tmp_path, LAW, script, num_draft_tokens=num_draft_tokens)  # type: ignore[arg-type]
    simulation.start()
    finish(simulation)
    assert simulation.committed == PLAIN
    simulation.check_records()
    evidence = simulation.loop.report(simulation.now)
    assert evidence.ahead_hits == 0
    assert evidence.methods == ("sim",)
    # Each draft saw the rows of its whole context, and each row travelled once, with the verdict that made it.
    assert [built.stop for built in drafter_of(simulation).built_on] == [
        draft.base_len - 1 for draft in drafts(simulation)
    ]
    sent = [draft.features for draft in drafts(simulation) if draft.features is not None]
    assert [features.first_row for features in sent] == [0, *[features.end for features in sent[:-1]]]


def test_perfect_drafts_fill_every_round_but_the_first(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), max_tokens=26)
    simulation.start()
    finish(simulation)
    assert simulation.loop.report(simulation.now).target_passes == 1 + 5


def test_features_of_a_long_prompt_are_fetched_while_decoding_goes_on(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), prompt=LONG, max_rows=8, max_tokens=12)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    # 30 rows are computed, of which the last 8 came along.
    assert [fetch.rows for fetch in simulation.fetches] == [range(30)]
    assert not drafts(simulation)
    deliver_verdict(simulation)
    deliver_verdict(simulation)
    assert len(simulation.fetches) == 1
    finish_fetch(simulation)
    deliver_verdict(simulation)
    assert [(draft.base_len, draft.starts_short) for draft in drafts(simulation)] == [(34, False)]
    assert drafts(simulation)[0].features.first_row == 30  # type: ignore[union-attr]
    finish(simulation)
    assert simulation.committed == plain_text_of(LAW, LONG, 12)
    assert drafter_of(simulation).built_on[0] == range(33)
    causes = [record.fallback for record in simulation.records if record.fallback]
    assert causes == [Fallback.FEATURES_LACKING] * 3


def test_a_drafter_that_reads_the_last_row_only_waits_for_no_other(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), prompt=LONG, max_rows=8, only_last=True)
    simulation.start()
    finish(simulation)
    assert simulation.committed == plain_text_of(LAW, LONG, 24)
    assert not simulation.fetches
    assert all(len(built) == 1 for built in drafter_of(simulation).built_on)
    assert all(draft.features and draft.features.num_rows == 1 for draft in drafts(simulation))


@pytest.mark.parametrize(("num_rounds", "num_fetches"), [(2, 1), (7, 1), (20, 2)])
def test_rows_that_come_while_others_are_fetched_do_not_make_it_go_on_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rounds: int, num_fetches: int
) -> None:
    # No more rows are kept here than came along: each that comes meanwhile takes the place of an older one.
    monkeypatch.setattr(feature_book, "MAX_FEATURE_BYTES", 8 * ROW_BYTES)
    simulation = with_features(tmp_path, LAW, perfect(LAW), prompt=LONG, max_rows=8, max_tokens=40)
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    fetched = []
    while not drafts(simulation):
        fetched += [fetch.rows for fetch in simulation.fetches]
        for _ in range(2 if len(fetched) > 1 else num_rounds):
            deliver_verdict(simulation)
        finish_fetch(simulation)
        deliver_verdict(simulation)
    assert fetched == [range(30), range(30, 30 + num_rounds + 1)][:num_fetches]
    assert not drafts(simulation)[0].starts_short
    finish(simulation)
    assert simulation.committed == plain_text_of(LAW, LONG, 40)


def test_features_that_cannot_be_fetched_are_done_without(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), prompt=LONG, max_rows=8)
    simulation.start()
    finish(simulation, fetches_succeed=False)
    assert simulation.committed == plain_text_of(LAW, LONG, 24)
    assert [draft.starts_short for draft in drafts(simulation)][:2] == [True, False]
    assert drafter_of(simulation).built_on[0].start > 0
    assert simulation.loop.report(simulation.now).accepted_tokens > 0


def test_where_nothing_is_fetched_a_long_prompt_is_done_without(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), prompt=LONG, max_rows=8, fetch_features=False)
    simulation.start()
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, LONG, 24)
    assert [draft.starts_short for draft in drafts(simulation)] == [True, *[False] * (len(drafts(simulation)) - 1)]
    assert drafter_of(simulation).built_on[0] == range(22, 30)
    assert {record.fallback for record in simulation.records} == {None}


@pytest.mark.parametrize("max_rows", [4, 1000])
def test_a_drafter_that_has_lost_its_rows_gets_them_again(tmp_path: Path, max_rows: int) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), max_tokens=40, max_rows=max_rows)
    simulation.start()
    for _ in range(6):
        simulation.step()
    drafter_of(simulation).rows = b""
    before = len(drafts(simulation))
    while not simulation.fetches and len(drafts(simulation)) < before + 2:
        simulation.step()
    # The next verdict brings all of them if it can.
    assert bool(simulation.fetches) == (max_rows == 4)
    accepted = simulation.loop.report(simulation.now).accepted_tokens
    finish(simulation)
    assert simulation.loop.report(simulation.now).accepted_tokens > accepted
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 40)


def test_another_drafter_is_told_everything(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), max_tokens=40)
    simulation.start()
    for _ in range(6):
        simulation.step()
    simulation.break_link(Lane.DRAFTER, restart=True)
    simulation.mend_link(Lane.DRAFTER, restarted=True)
    finish(simulation)
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 40)
    assert verifies(simulation)[-2].block.tokens


def test_a_verifier_that_serves_none_is_asked_for_none(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW))
    for lane in Lane:
        simulation.infos[lane] = dataclasses.replace(simulation.infos[lane], features=None)
    simulation.start()
    deliver_verdict(simulation)
    assert {command.features_from for command in verifies(simulation)} == {None}


def test_a_drafter_that_builds_on_none_is_sent_none(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW))
    simulation.infos[Lane.DRAFTER] = dataclasses.replace(simulation.infos[Lane.DRAFTER], features=None)
    simulation.drafter = SimDrafter(perfect(LAW))
    simulation.start()
    drain(simulation, Lane.DRAFTER)
    deliver_verdict(simulation)
    # Nobody knew at the first round who would draft.
    assert [command.features_from for command in verifies(simulation)] == [0, None]


def test_a_verifier_with_other_features_wants_another_drafter(tmp_path: Path) -> None:
    simulation = with_features(tmp_path, LAW, perfect(LAW), max_tokens=40)
    simulation.start()
    for _ in range(4):
        simulation.step()
    simulation.infos[Lane.VERIFIER] = dataclasses.replace(simulation.infos[Lane.VERIFIER], features=None)
    simulation.available = {Lane.VERIFIER: ["v1"], Lane.DRAFTER: []}
    simulation.break_link(Lane.VERIFIER)
    simulation.wait(1.0)
    assert (simulation.attached[Lane.VERIFIER], simulation.attached[Lane.DRAFTER]) == ("v1", None)
    simulation.run()
    assert simulation.committed == plain_text_of(LAW, [1, 2, 3], 40)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), seed=st.integers(0, 255), max_rows=st.sampled_from([2, 5, 1000]), only_last=st.booleans())
def test_no_order_of_events_and_no_fault_changes_the_text_or_a_row(
    tmp_path: Path, data: st.DataObject, seed: int, max_rows: int, only_last: bool
) -> None:
    """Whatever is lost, a draft is made with true rows only: the drafter checks them."""
    law = hash_law(seed)
    script = data.draw(st.sampled_from([perfect(law), wrong_at(law, 1), bushy(law)]))
    patience = Patience(verifier_s=1e6, first_verifier_s=1e6)
    simulation = with_features(
        tmp_path, law, script, max_rows=max_rows, only_last=only_last, max_tokens=20, patience=patience
    )
    simulation.start()
    for _ in range(data.draw(st.integers(0, 40))):
        if simulation.terminal:
            break
        if bool(simulation.fetches) and data.draw(st.booleans()):
            finish_fetch(simulation, data.draw(st.booleans()))
        else:
            random_step(simulation, data)
    for lane in Lane:
        simulation.mend_link(lane)
    simulation.available = {Lane.VERIFIER: ["v0", "v1"], Lane.DRAFTER: ["d0"]}
    simulation.settle()
    finish(simulation)
    assert simulation.error is None
    assert simulation.committed == plain_text_of(law, [1, 2, 3], 20)
    simulation.check_records()


# --- the book ---------------------------------------------------------------------------------------------------------


def features(first_row: int, num_rows: int, width: int = 2) -> Features:
    data = b"".join([row.to_bytes(4, "little") * width for row in range(first_row, first_row + num_rows)])
    return Features(first_row, num_rows, width, FeatureDtype.FLOAT32, data)


def book_of(*arrived: Features) -> FeatureBook:
    book = FeatureBook()
    book.attached(FORM)
    for rows in arrived:
        book.verified(rows, rows.end)
    return book


def test_rows_of_several_verdicts_go_with_one_draft() -> None:
    book = book_of(features(0, 3), features(3, 2), features(4, 2))
    assert book.wanted_from(7) == 6
    assert book.lacking(7) is None
    assert book.take(7) == features(0, 6)
    assert (book.have_len, book.wanted_from(7), book.take(7)) == (6, 6, None)


def test_a_verdict_without_rows_makes_those_before_it_useless() -> None:
    book = book_of(features(0, 3))
    book.verified(None, 5)
    assert book.lacking(6) == range(5)
    book.verified(features(5, 2), 8)  # one row short: a replica that cannot count
    assert book.lacking(9) == range(8)


def test_no_more_is_kept_than_fits_into_a_message() -> None:
    width = MAX_FEATURE_BYTES // 16
    rows = Features(0, 3, width, FeatureDtype.FLOAT32, bytes(3 * width * 4))
    book = book_of(rows, dataclasses.replace(rows, first_row=3))
    assert book.lacking(7) == range(6)
    book.fetching = range(2)
    book.fetched(succeeded=True)
    assert book.lacking(7) is None, "the last four are here"
    taken = book.take(7)
    assert taken is not None
    assert (taken.first_row, taken.num_rows, len(taken.data)) == (2, 4, MAX_FEATURE_BYTES)


def test_fetching_is_given_up_after_two_failures_and_tried_again_elsewhere() -> None:
    book = book_of()
    for _ in range(2):
        assert not book.hopeless
        book.fetching = range(4)
        book.fetched(succeeded=False)
    assert book.hopeless
    book.verifier_moved()
    assert not book.hopeless


def test_rows_that_a_drafter_loses_again_and_again_are_not_brought_for_ever() -> None:
    book = book_of(features(0, 6))
    for _ in range(3):
        book.take(7)
        book.drafter_says(0, 7)
        assert not book.hopeless
        assert book.lacking(7) == range(6)
        book.fetching = range(6)
        book.fetched(succeeded=True)
    book.take(7)
    book.drafter_says(0, 7)
    assert book.hopeless
    book.attached(FORM)
    assert not book.hopeless


def test_what_the_drafter_says_counts() -> None:
    book = book_of(features(0, 6))
    book.take(7)
    book.drafter_says(6, 7)
    assert book.lacking(7) is None
    book.drafter_says(2, 7)
    assert book.lacking(7) == range(2, 6)


def test_a_drafter_that_has_just_come_has_no_rows_and_waits_for_none_that_another_one_fetches() -> None:
    book = book_of(features(0, 6))
    book.take(7)
    book.fetching = range(6, 9)
    assert book.wanted_from(7) == 9
    book.attached(FORM)
    assert book.wanted_from(7) == 0, "nothing is there or on its way"
    assert book.lacking(7) == range(6)


def test_what_was_asked_of_another_verifier_is_asked_again() -> None:
    book = book_of(features(6, 2))
    book.fetching = range(6)
    book.verifier_moved()
    assert book.fetching is None
    book.fetched(succeeded=True)  # of the old one; nobody waits for it
    assert book.lacking(9) == range(8)


def test_a_fetch_is_of_no_use_to_a_drafter_that_has_lost_the_rows_before_it() -> None:
    book = book_of(features(0, 4))
    book.take(5)
    book.verified(features(8, 2), 10)
    assert book.lacking(11) == range(4, 10)
    book.fetching = range(4, 8)
    book.drafter_says(2, 5)
    book.fetched(succeeded=True)
    assert (book.have_len, book.lacking(11)) == (2, range(2, 10))


def test_rows_of_another_number_format_are_not_joined() -> None:
    book = book_of(features(0, 4))
    book.verified(dataclasses.replace(features(4, 2), dtype=FeatureDtype.BFLOAT16, data=bytes(8)), 6)
    assert book.lacking(7) == range(6)
    taken = book.take(7)
    assert taken is not None
    assert (taken.first_row, taken.dtype, len(taken.data)) == (4, FeatureDtype.BFLOAT16, 8)
