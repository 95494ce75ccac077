"""Rows follow the context: after any history a draft is what it would be from nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.method import DraftJob
from paceline.engine.shared_parts import SharedParts
from paceline.messages import AcceptanceRule
from tests.unit.drafting.eagle.drafts import HEAD, LONG, NAIVE, PROMPT, chain_from_nothing, draft, reads
from tests.unit.drafting.eagle.heads import (
    VOCAB,
    Recorded,
    features_of,
    finish,
    job_of,
    method_of,
    naive_chain,
    naive_tree,
    paths_of,
    random_head,
    shared_parts,
)
from tests.unit.drafting.rounds import GREEDY, HOT

# --- the rule of rows -------------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, VOCAB - 1), st.sampled_from(["go on", "again", "divert"])),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([1, 3]),
)
@settings(max_examples=12)
def test_drafts_after_any_history_are_those_from_nothing(history: list[tuple[int, int, str]], topk: int) -> None:
    method = method_of(HEAD, eagle_topk=topk, num_draft_tokens=6, max_batch_tokens=16)
    method.open("s")
    context: tuple[int, ...] = PROMPT
    for accepted, extra, what in history:
        job = draft(method, context)
        if topk == 1:
            assert job.tokens == chain_from_nothing(context)
        else:
            expected = naive_tree(NAIVE, features_of(HEAD, context), context, topk, 6, 3)
            assert paths_of(job) == [node.path for node in expected]
        assert method.kv_len("s") == len(context) - 1  # at rest: no row of the draft is left
        if what == "go on":
            path = max(paths_of(job), key=len)[:accepted]
            context = (*context, *path, extra)
        elif what == "divert":
            context = (*context[: max(len(context) - accepted, 2)], extra)


def test_each_round_feeds_the_new_pairs_and_no_others() -> None:
    method = method_of(HEAD)
    method.open("s")
    assert reads(draft(method, PROMPT)) == [(0, 7)]
    context = (*PROMPT, 1, 2, 3)
    assert reads(draft(method, context)) == [(7, 10)]
    # One token of another text: its pair and the one before it, of which it is the second half.
    assert reads(draft(method, (*PROMPT, 1, 5))) == [(8, 9)]
    assert method.kv_len("s") == 9


def test_drafting_again_at_the_same_length_feeds_nothing() -> None:
    method = method_of(HEAD)
    method.open("s")
    first = draft(method, PROMPT)
    again = draft(method, PROMPT, depth=5)
    assert reads(again) == []
    assert again.tokens[:3] == first.tokens
    assert again.tokens == chain_from_nothing(PROMPT, 5)


def test_a_superseded_draft_leaves_nothing_behind() -> None:
    for topk in (1, 3):
        method = method_of(HEAD, eagle_topk=topk)
        method.open("s")
        job = job_of(HEAD, PROMPT, 4)
        method.advance([job])
        method.advance([job])
        assert not job.done
        # A chain can be used as far as it has come.
        assert job.tokens == (chain_from_nothing(PROMPT, 2) if topk == 1 else [])
        context = (*PROMPT, 7)
        fresh = method_of(HEAD, eagle_topk=topk)
        fresh.open("s")
        assert draft(method, context).block == draft(fresh, context).block


def test_a_chain_grows_by_a_token_a_step_and_a_tree_comes_whole() -> None:
    method = method_of(HEAD)
    method.open("s")
    job = job_of(HEAD, PROMPT, 3)
    for expected in (1, 2, 3):
        method.advance([job])
        assert len(job.tokens) == len(job.confidences) == expected
    assert job.done


# --- features ---------------------------------------------------------------------------------------------------------


def test_without_features_nothing_is_drafted() -> None:
    method = method_of(HEAD)
    method.open("s")
    for features in (None, features_of(HEAD, PROMPT[:-1]), features_of(HEAD, PROMPT, len(PROMPT) - 1)):
        job = DraftJob("s", PROMPT, 3, GREEDY, features=features)
        finish(method, job)
        assert job.tokens == []
    one = job_of(HEAD, PROMPT[:1], 3)  # its only token's feature does not exist yet
    finish(method, one)
    assert one.tokens == []
    assert draft(method, PROMPT).tokens == chain_from_nothing(PROMPT)


def test_a_session_without_its_first_features_starts_short_at_true_positions() -> None:
    method = method_of(HEAD)
    method.open("s")
    job = job_of(HEAD, LONG, 3, first_row=40)
    finish(method, job)
    assert method.num_short_starts == 1
    assert method.kv_len("s") == len(LONG) - 1 - 40
    # Only differences of positions count, so the reference may start at 0.
    short = Recorded(features_of(HEAD, LONG).rows[40:])
    assert job.tokens == naive_chain(NAIVE, short, LONG[40:], 3, GREEDY)
    # It goes on from there, and the rows that it has need not be given again.
    later = job_of(HEAD, (*LONG, 1, 2), 3, first_row=50)
    finish(method, later)
    assert reads(later) == [(59, 61)]
    assert method.num_short_starts == 1


def test_short_rows_are_made_anew_when_the_features_come() -> None:
    method = method_of(HEAD)
    method.open("s")
    finish(method, job_of(HEAD, LONG, 3, first_row=40))
    job = job_of(HEAD, (*LONG, 5), 3)
    finish(method, job)
    assert reads(job)[0][0] == 0
    assert job.tokens == chain_from_nothing((*LONG, 5))


def test_a_gap_in_the_features_starts_anew_behind_it() -> None:
    method = method_of(HEAD)
    method.open("s")
    draft(method, PROMPT)
    context = (*PROMPT, *LONG)
    job = job_of(HEAD, context, 3, first_row=30)
    finish(method, job)
    assert reads(job) == [(30, len(context) - 1)]
    assert method.num_short_starts == 1


def test_rows_of_an_equal_beginning_are_shared_with_the_token_after_them() -> None:
    method = method_of(HEAD)
    for name in ("a", "b", "c", "d"):
        method.open(name)
    draft(method, LONG, session="a")
    # The 48th row is the pair (feature 47, token 48): it is shared only if that token is the same.
    assert reads(draft(method, (*LONG[:49], 5, 5, 5), session="b")) == [(48, 51)]
    other = (LONG[48] + 1) % VOCAB
    diverted = (*LONG[:48], other, 5, 5, 5)
    job = draft(method, diverted, session="c")
    assert reads(job) == [(32, 51)]
    assert job.tokens == chain_from_nothing(diverted)
    # Who lacks features takes the rows of one who had them.
    late = job_of(HEAD, (*LONG, 1), 3, session="d", first_row=45)
    finish(method, late)
    assert reads(late) == [(48, 60)]
    assert late.tokens == chain_from_nothing((*LONG, 1))
    assert method.num_short_starts == 0


def test_short_rows_are_not_shared() -> None:
    method = method_of(HEAD)
    for name in ("a", "b"):
        method.open(name)
        job = job_of(HEAD, LONG, 3, session=name, first_row=20)
        finish(method, job)
        assert reads(job) == [(20, 59)]


# --- limits and faults ------------------------------------------------------------------------------------------------


def test_drafting_stops_at_the_heads_own_length() -> None:
    method = method_of(random_head("eagle3", max_model_len=20))
    method.open("s")
    depths = [len(draft(method, LONG[:length], 4).tokens) for length in (17, 18, 19, 20, 21, 22, 40)]
    # A draft's last token has no row: 20 rows are a context of 21 tokens and one draft, or one of 20 and two.
    assert depths == [4, 4, 3, 2, 1, 0, 0]


def test_under_ratio_the_draft_is_a_chain_without_chance() -> None:
    method = method_of(HEAD, eagle_topk=3)
    method.open("s")
    job = job_of(HEAD, PROMPT, 4, HOT, rule=AcceptanceRule.RATIO)
    finish(method, job)
    assert job.tokens == naive_chain(NAIVE, features_of(HEAD, PROMPT), PROMPT, 4, GREEDY)
    assert job.block.is_chain
    assert job.draft_probs == []


def test_a_context_with_unknown_ids_is_not_drafted_for() -> None:
    method = method_of(HEAD)
    method.open("s")
    assert draft(method, (*PROMPT, VOCAB)).tokens == []
    assert draft(method, PROMPT).tokens == chain_from_nothing(PROMPT)


def test_bad_features_end_one_draft_and_poison_nothing() -> None:
    method = method_of(HEAD)
    for name in ("good", "nan", "narrow"):
        method.open(name)
    nan = job_of(HEAD, LONG, 3, session="nan")
    assert isinstance(nan.features, Recorded)
    nan.features.rows[10] = torch.nan
    narrow = job_of(HEAD, LONG, 3, session="narrow")
    narrow.features = Recorded(torch.zeros(len(LONG) - 1, 3))
    good = job_of(HEAD, PROMPT, 3, session="good")
    finish(method, good, nan, narrow)
    assert good.tokens == chain_from_nothing(PROMPT)
    assert nan.tokens == narrow.tokens == []
    # Nobody finds rows made from them, and the sessions are as good as new.
    for name in ("nan", "narrow", "good"):
        assert draft(method, LONG, session=name).tokens == chain_from_nothing(LONG)


def test_a_head_that_fails_later_ends_the_draft_with_what_it_has() -> None:
    parts = shared_parts()
    calls = 0

    def embed(ids: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of memory")
        return parts.embed(ids)

    failing = SharedParts(
        embed, parts.head, parts.norm, parts.hidden_size, parts.num_layers, parts.vocab_size, parts.dtype, parts.device
    )
    method = method_of(HEAD, failing)
    method.open("s")
    assert draft(method, PROMPT, 4).tokens == chain_from_nothing(PROMPT, 2)
    assert draft(method, PROMPT, 4).tokens == chain_from_nothing(PROMPT, 4)


def test_kept_rows_of_own_features_are_what_refresh_drops() -> None:
    """The comparison's other side: accepted drafts keep the rows that the draft made, all but the last."""
    method = method_of(HEAD, refresh=False)
    method.open("s")
    job = draft(method, PROMPT, 4)
    context = (*PROMPT, *job.tokens[:3], 5)
    assert reads(draft(method, context)) == [(10, 11)]
    refreshed = method_of(HEAD)
    refreshed.open("s")
    draft(refreshed, PROMPT, 4)
    assert reads(draft(refreshed, context)) == [(7, 11)]
