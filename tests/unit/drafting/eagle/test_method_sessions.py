"""Several sessions of one head: each gets what it gets alone, in a batch and where there is not room for all rows."""

from __future__ import annotations

import pytest

from paceline.drafting.method import DraftJob
from paceline.engine.kv.sequence import page_runs
from paceline.errors import CapacityExceeded
from tests.unit.drafting.eagle.drafts import HEAD, LONG, PROMPT, chain_from_nothing, draft, reads
from tests.unit.drafting.eagle.heads import finish, job_of, method_of
from tests.unit.drafting.rounds import GREEDY, HOT


@pytest.mark.parametrize("topk", [1, 3])
def test_sessions_of_a_batch_get_what_they_get_alone(topk: int) -> None:
    contexts = {"a": PROMPT, "b": LONG, "c": LONG[5:40], "d": (*PROMPT, 3, 3)}
    samplings = {"a": GREEDY, "b": HOT, "c": GREEDY, "d": HOT}

    def jobs() -> list[DraftJob]:
        return [job_of(HEAD, contexts[name], 4, samplings[name], session=name) for name in contexts]

    together, alone = jobs(), jobs()
    method = method_of(HEAD, eagle_topk=topk, num_draft_tokens=8, max_batch_tokens=24)
    for name in contexts:
        method.open(name)
    finish(method, *together)
    for job in alone:
        single = method_of(HEAD, eagle_topk=topk, num_draft_tokens=8)
        single.open(job.session)
        finish(single, job)
    assert [job.block for job in together] == [job.block for job in alone]
    for left, right in zip(together, alone, strict=True):
        assert left.confidences == pytest.approx(right.confidences, abs=1e-5)


def test_a_long_context_is_fed_in_chunks() -> None:
    method = method_of(HEAD, max_batch_tokens=16)
    method.open("s")
    job = draft(method, LONG)
    assert len(reads(job)) >= 4
    assert job.tokens == chain_from_nothing(LONG)


def test_idle_sessions_give_up_their_rows_for_others() -> None:
    """Three contexts of 59 rows and a pool of 128: every draft is served, also one that needs pages for its levels."""
    for topk in (1, 4):
        method = method_of(HEAD, kv_bytes=128 * 64, eagle_topk=topk, num_draft_tokens=20)
        fresh = method_of(HEAD, eagle_topk=topk, num_draft_tokens=20)
        contexts = {name: (index, *LONG) for index, name in enumerate("abc")}
        for name in contexts:
            method.open(name)
            fresh.open(name)
        for name in "abcabcaacb":
            contexts[name] = (*contexts[name], 1)
            job = draft(method, contexts[name], 5, session=name)
            assert job.block == draft(fresh, contexts[name], 5, session=name).block
            assert job.tokens


def test_trees_on_scattered_pages_see_what_they_should() -> None:
    method, fresh = (
        method_of(HEAD, kv_bytes=24 * 16 * 64 * scale, eagle_topk=4, num_draft_tokens=20) for scale in (1, 9)
    )
    contexts: dict[str, tuple[int, ...]] = {name: (index, *LONG[:14]) for index, name in enumerate("abcd")}
    for name in contexts:
        method.open(name)
    for turn in range(6):  # grown in turns, the sequences get into each other's way
        for name, context in contexts.items():
            contexts[name] = (*context, *LONG[turn : turn + 16])
            draft(method, contexts[name], 1, session=name)
    session = method._sessions.get("b")
    assert session is not None
    assert len(page_runs(session.holder.kv.pages)) > 1
    fresh.open("b")
    job, expected = (draft(each, contexts["b"], 4, session="b") for each in (method, fresh))
    assert job.block == expected.block
    assert job.confidences == pytest.approx(expected.confidences, abs=1e-5)


def test_more_jobs_than_there_is_room_for_end_all_the_same() -> None:
    method = method_of(HEAD, kv_bytes=128 * 64, eagle_topk=4, num_draft_tokens=20)
    jobs = [job_of(HEAD, (index, *LONG), 4, session=str(index)) for index in range(5)]
    for job in jobs:
        method.open(job.session)
    finish(method, *jobs)
    assert all(job.tokens for job in jobs)


@pytest.mark.parametrize("topk", [1, 4])
@pytest.mark.parametrize("steps_before", [0, 1], ids=["again at the same length", "while it grows"])
def test_a_draft_whose_rows_go_to_others_ends_and_leaves_no_rows_of_its_own(steps_before: int, topk: int) -> None:
    """Room for one of two contexts: the one that is still to be fed takes the other's rows."""
    method, fresh = (method_of(HEAD, kv_bytes=kv_bytes, eagle_topk=topk) for kv_bytes in (128 * 64, 1 << 20))
    long = LONG + LONG[:40]
    for name in "ab":
        method.open(name)
        fresh.open(name)
    expected = draft(fresh, long, 5, session="a")
    if not steps_before:
        draft(method, long, 5, session="a")
    job, other = job_of(HEAD, long, 5, session="a"), job_of(HEAD, (5, *long), 5, session="b")
    for _ in range(steps_before):
        method.advance([job])
    finish(method, job, other)
    assert job.block.max_depth == 1, "what it had until then"
    assert other.block == draft(fresh, (5, *long), 5, session="b").block
    assert method.kv_len("a") == 0
    assert draft(method, long, 5, session="a").block == expected.block
    method.check_integrity()


def test_sessions_are_counted_and_freed() -> None:
    method = method_of(HEAD, max_sessions=1)
    method.open("a")
    method.open("a")
    with pytest.raises(CapacityExceeded, match="all 1 draft sessions"):
        method.open("b")
    draft(method, PROMPT, session="a")
    assert method.kv_usage().used_tokens == 16
    method.close("a")
    method.close("a")
    assert method.kv_len("a") == method.kv_usage().used_tokens == 0
    assert draft(method, PROMPT, session="a").tokens == []  # not open
