"""Drafts whose steps are taken without coming back between them: the same tokens and rows as step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.method import DraftJob
from paceline.engine.runner import SequencePass
from paceline.messages import SamplingParams
from tests.fakes.toy_runner import Law, cycle_law, hash_law
from tests.unit.drafting.rounds import GREEDY, draft
from tests.unit.drafting.toy_drafter import LAW, PROMPT, VOCAB, Drafter, open_and_draft


def at_once(drafter: Drafter, context: Sequence[int], depth: int, sampling: SamplingParams = GREEDY) -> DraftJob:
    """One draft, whose steps are taken at once where that can be."""
    job = DraftJob("s", tuple(context), depth, sampling, generation_start=len(PROMPT))
    while not job.done:
        if not drafter.method.draft_at_once(job):
            drafter.method.advance([job])
    drafter.check()
    return job


def test_one_pass_feeds_what_is_new_and_each_of_the_others_a_token() -> None:
    drafter = Drafter()
    tokens = open_and_draft(drafter, PROMPT, 4)
    job = at_once(drafter, [*PROMPT, *tokens, 9], 4)
    assert drafter.passes() == [(2,), (1,), (1,), (1,)]
    stepwise = draft_step_by_step([*PROMPT, *tokens, 9], 4)
    assert job.tokens == stepwise.tokens
    assert job.confidences == pytest.approx(stepwise.confidences)
    assert job.method == "draft_model"


def draft_step_by_step(context: Sequence[int], depth: int, law: Law = LAW) -> DraftJob:
    """What a fresh session drafts."""
    fresh = Drafter(law)
    fresh.method.open("s")
    return draft(fresh.method, "s", context, depth)


_script = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 10), st.integers(0, 4), st.booleans()), max_size=8
)


@settings(max_examples=40, deadline=None)
@given(_script, st.sampled_from([6, 256]), st.sampled_from([3, 256]))
def test_tokens_and_rows_are_right_after_any_history(
    script: list[tuple[int, int, int, int, bool]], max_batch_tokens: int, num_pages: int
) -> None:
    """Contexts shrink and grow; drafts at once and steps of drafts that are given up take turns; pages may be short."""
    drafter = Drafter(max_batch_tokens=max_batch_tokens, num_pages=num_pages)
    drafter.method.open("s")
    context = list(PROMPT)
    for dropped, appended, depth, steps, whole in script:
        context = [*context[: max(1, len(context) - dropped)], *(7 + i for i in range(appended))]
        if whole:
            job = at_once(drafter, context, depth)
        else:
            job = DraftJob("s", tuple(context), depth, GREEDY)
            for _ in range(steps):
                drafter.method.advance([job])
            drafter.check()
        expected = draft_step_by_step(context, depth).tokens
        assert job.tokens == expected[: len(job.tokens)]
        context.extend(job.tokens[:2])


def test_a_long_draft_is_taken_in_parts() -> None:
    drafter = Drafter()
    tokens = open_and_draft(drafter, PROMPT, 1)
    job = DraftJob("s", (*PROMPT, *tokens), 11, GREEDY)
    assert drafter.method.draft_at_once(job)
    assert (len(job.tokens), job.done) == (8, False)
    drafter.check()
    assert drafter.method.draft_at_once(job)
    assert job.done
    assert job.tokens == draft_step_by_step(job.context, 11).tokens
    assert len(drafter.passes()) == 11


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=0.8, seed=1),
        replace(GREEDY, logit_bias={3: 5.0}),
        replace(GREEDY, frequency_penalty=0.5),
        replace(GREEDY, min_tokens=2),
    ],
    ids=["sampled", "bias", "penalty", "min_tokens"],
)
def test_what_is_not_simply_the_best_token_goes_step_by_step(sampling: SamplingParams) -> None:
    drafter = Drafter()
    tokens = open_and_draft(drafter, PROMPT, 2)
    job = DraftJob("s", (*PROMPT, *tokens), 3, sampling)
    assert not drafter.method.draft_at_once(job)
    assert (drafter.passes(), job.tokens) == ([], [])


def test_so_does_what_has_candidates_noted_and_a_context_that_is_new() -> None:
    drafter = Drafter()
    tokens = open_and_draft(drafter, PROMPT, 2)
    assert not drafter.method.draft_at_once(DraftJob("s", (*PROMPT, *tokens), 3, GREEDY, num_candidates=2))
    assert not drafter.method.draft_at_once(DraftJob("s", (*PROMPT, *tokens, 7, 8, 9, 7, 8), 3, GREEDY))
    assert drafter.passes() == []
    drafter.check()


def test_the_end_of_the_context_ends_the_draft() -> None:
    drafter = Drafter(max_model_len=len(PROMPT) + 3)
    tokens = open_and_draft(drafter, PROMPT, 1)
    job = at_once(drafter, [*PROMPT, *tokens], 6)
    assert job.tokens == draft_step_by_step([*PROMPT, *tokens], 3).tokens


def test_a_row_that_is_not_finite_ends_the_draft_and_takes_the_rows() -> None:
    broken_at = len(PROMPT) + 3

    def law(prefix: tuple[int, ...]) -> torch.Tensor:
        return torch.full((VOCAB,), float("nan")) if len(prefix) >= broken_at else LAW(prefix)

    drafter = Drafter(law)
    tokens = open_and_draft(drafter, PROMPT, 1)
    job = at_once(drafter, [*PROMPT, *tokens], 6)
    assert job.tokens == draft_step_by_step([*PROMPT, *tokens], 6, law).tokens
    assert len(job.tokens) == 2
    assert drafter.method.kv_len("s") == 0


def test_a_model_that_fails_in_the_middle_ends_the_draft_and_the_next_one_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter = Drafter(hash_law(VOCAB, seed=3))
    tokens = open_and_draft(drafter, PROMPT, 2)
    forward = drafter.toy.forward

    def failing(batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        if batch[0].last_on_device is not None:
            raise RuntimeError("out of memory")
        return forward(batch, wait=wait)

    monkeypatch.setattr(drafter.toy, "forward", failing)
    context = [*PROMPT, *tokens, 9]
    assert at_once(drafter, context, 4).tokens == []
    monkeypatch.undo()
    assert at_once(drafter, context, 4).tokens == draft_step_by_step(context, 4).tokens


def test_the_device_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = Drafter(cycle_law([4, 6, 8], VOCAB))
    tokens = open_and_draft(drafter, PROMPT, 2)
    forward = drafter.toy.forward
    waits: list[bool] = []

    def noting(batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        waits.append(wait)
        return forward(batch, wait=wait)

    monkeypatch.setattr(drafter.toy, "forward", noting)
    monkeypatch.setattr(drafter.toy, "synchronize", lambda: waits.append(True))
    at_once(drafter, [*PROMPT, *tokens], 3)
    assert waits == [False, False, False, True]
