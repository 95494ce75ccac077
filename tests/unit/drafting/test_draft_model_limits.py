"""The method at its limits: contexts and ids beyond the model, rows that run out, are lost or cannot be trusted."""

from __future__ import annotations

import pytest
import torch

from paceline.drafting.method import DraftJob
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.errors import CapacityExceeded, ConfigurationError
from tests.fakes.toy_runner import ToyRunner, hash_law, one_hot, poisoned_law
from tests.unit.drafting.rounds import GREEDY, HOT, draft
from tests.unit.drafting.toy_drafter import LAW, PROMPT, VOCAB, Drafter


@pytest.mark.parametrize(("prompt_len", "expected"), [(10, 5), (14, 3), (16, 1), (17, 0), (40, 0)])
def test_drafts_stop_at_the_drafter_s_context(prompt_len: int, expected: int) -> None:
    """A context of 16 rows: after 16 tokens one more can be guessed, after 17 none."""
    drafter = Drafter(max_model_len=16)
    drafter.method.open("s")
    job = draft(drafter.method, "s", [i % VOCAB for i in range(prompt_len)], 5)
    assert (len(job.tokens), job.done) == (expected, True)
    drafter.check()


def test_a_session_beyond_the_drafter_s_context_does_not_hurt_others() -> None:
    drafter = Drafter(max_model_len=16)
    for session in ("long", "short"):
        drafter.method.open(session)
    jobs = [DraftJob("long", tuple(i % VOCAB for i in range(20)), 3, GREEDY), DraftJob("short", PROMPT, 3, GREEDY)]
    while not all(job.done for job in jobs):
        drafter.method.advance(jobs)
    assert [len(job.tokens) for job in jobs] == [0, 3]


def test_ids_beyond_the_vocabulary_limit_are_never_proposed() -> None:
    def padded(prefix: tuple[int, ...]) -> torch.Tensor:
        return one_hot(15, VOCAB) + hash_law(VOCAB)(prefix)

    for sampling in (GREEDY, HOT):
        drafter = Drafter(padded, vocab_limit=12)
        drafter.method.open("s")
        tokens = draft(drafter.method, "s", PROMPT, 8, sampling).tokens
        assert len(tokens) == 8
        assert max(tokens) < 12
    assert drafter.method.info.vocab_size == 12
    assert Drafter(vocab_limit=99).method.info.vocab_size == VOCAB


@pytest.mark.parametrize("token", [VOCAB, -1])
def test_a_context_that_the_model_cannot_embed_is_not_drafted_for(token: int) -> None:
    drafter = Drafter()
    for session in ("bad", "good"):
        drafter.method.open(session)
    jobs = [DraftJob("bad", (1, token, 2), 2, GREEDY), DraftJob("good", PROMPT, 2, GREEDY)]
    while not all(job.done for job in jobs):
        drafter.method.advance(jobs)
    assert [len(job.tokens) for job in jobs] == [0, 2]
    assert drafter.method.kv_len("bad") == 0


def test_nothing_is_drafted_for_no_depth_no_context_and_no_session() -> None:
    drafter = Drafter()
    drafter.method.open("s")
    jobs = [DraftJob("s", PROMPT, 0, GREEDY), DraftJob("s", (), 2, GREEDY), DraftJob("unknown", PROMPT, 2, GREEDY)]
    drafter.method.advance(jobs)
    assert all(job.done and not job.tokens for job in jobs)
    assert drafter.passes() == []
    drafter.method.advance([])


def test_rows_that_are_not_finite_end_that_draft_only() -> None:
    law = poisoned_law(LAW, lambda prefix: prefix[0] == 9 and len(prefix) == 6)
    drafter = Drafter(law)
    for session in ("bad", "good"):
        drafter.method.open(session)
    jobs = [DraftJob("bad", (9, 1, 2, 3), 5, GREEDY), DraftJob("good", PROMPT, 5, GREEDY)]
    while not all(job.done for job in jobs):
        drafter.method.advance(jobs)
    assert [len(job.tokens) for job in jobs] == [2, 5]
    assert drafter.method.kv_len("bad") == 0  # its rows are not trusted
    drafter.check()
    assert len(draft(drafter.method, "bad", PROMPT, 3).tokens) == 3


def test_a_full_pool_fails_no_draft() -> None:
    """Both of two sessions that do not fit together get all their drafts, one after the other."""
    drafter = Drafter(num_pages=5)
    for session in ("small", "big"):
        drafter.method.open(session)
    draft(drafter.method, "small", PROMPT, 1)
    jobs = [DraftJob("big", tuple(i % VOCAB for i in range(14)), 3, GREEDY), DraftJob("small", (*PROMPT, 1), 3, GREEDY)]
    steps = 0
    while not all(job.done for job in jobs):
        drafter.method.advance(jobs)
        drafter.check()
        steps += 1
    assert steps < 12
    assert drafter.runner.stats.preemptions > 0
    for job in jobs:
        fresh = Drafter()
        fresh.method.open("s")
        assert job.tokens == draft(fresh.method, "s", job.context, 3).tokens


def test_a_session_that_lost_its_rows_drafts_as_before() -> None:
    drafter = Drafter(num_pages=6)
    contexts = {session: tuple(range(first, first + 10)) for session, first in (("a", 1), ("b", 2), ("c", 3))}
    expected = {}
    for session, context in contexts.items():
        drafter.method.open(session)
        expected[session] = draft(drafter.method, session, context, 4, HOT).tokens
    assert drafter.method.kv_len("a") == 0  # idle, and the others needed its pages
    assert drafter.method.fed_tokens("a") == ()
    for session, context in contexts.items():
        assert draft(drafter.method, session, context, 4, HOT).tokens == expected[session]
        drafter.check()


def test_rows_that_may_be_wrong_are_not_shared() -> None:
    """The rows of a context that gave no finite logits are computed anew, also by others."""
    context = tuple(i % VOCAB for i in range(9))
    poisoned = True
    drafter = Drafter(poisoned_law(LAW, lambda prefix: poisoned and len(prefix) == 9))
    for session in ("a", "b"):
        drafter.method.open(session)
    assert draft(drafter.method, "a", context, 2).tokens == []
    poisoned = False
    drafter.passes()
    assert len(draft(drafter.method, "b", context, 2).tokens) == 2
    assert drafter.passes()[0] == (9,)
    drafter.check()


def test_a_pass_that_raises_is_repeated_for_each_session_alone() -> None:
    def failing(prefix: tuple[int, ...]) -> torch.Tensor:
        if prefix[0] == 9:
            raise RuntimeError("scripted")
        return LAW(prefix)

    drafter = Drafter(failing)
    for session in ("bad", "good"):
        drafter.method.open(session)
    jobs = [DraftJob("bad", (9, 1), 3, GREEDY), DraftJob("good", PROMPT, 3, GREEDY)]
    while not all(job.done for job in jobs):
        drafter.method.advance(jobs)
    assert [len(job.tokens) for job in jobs] == [0, 3]
    drafter.check()


def test_sessions_are_bounded_and_closing_frees_everything() -> None:
    drafter = Drafter(max_sessions=2)
    drafter.method.open("a")
    drafter.method.open("b")
    with pytest.raises(CapacityExceeded, match="2"):
        drafter.method.open("c")
    draft(drafter.method, "a", PROMPT, 2)
    drafter.method.open("a")  # begins again
    assert drafter.method.kv_len("a") == 0
    draft(drafter.method, "a", PROMPT, 2)
    for session in ("a", "b", "never"):
        drafter.method.close(session)
        drafter.method.close(session)
    assert drafter.toy.pool.pages_in_use == 0
    assert drafter.toy.pool.num_sequences == 0
    assert drafter.method.kv_len("a") == 0
    drafter.method.open("c")


def test_a_pass_needs_room() -> None:
    with pytest.raises(ConfigurationError, match="max_batch_tokens"):
        TorchDraftRunner(ToyRunner(LAW, VOCAB), max_batch_tokens=0)
