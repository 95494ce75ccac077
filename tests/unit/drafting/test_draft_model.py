"""The method on a runner without weights, which insists that the rows it reads are the ones the context says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.messages import SamplingParams
from tests.fakes.toy_runner import ToyRunner, cycle_law, hash_law, one_hot
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED, Target, draft, speculate
from tests.unit.drafting.toy_drafter import LAW, PROMPT, VOCAB, Drafter, open_and_draft


def test_rows_after_acceptance_none_partial_and_full() -> None:
    for accepted in range(5):
        drafter = Drafter()
        drafts = open_and_draft(drafter, PROMPT, 4)
        assert drafter.method.kv_len("s") == len(PROMPT) + 3  # the last draft was never fed
        extra = next(token for token in range(VOCAB) if accepted == 4 or token != drafts[accepted])
        committed = (*PROMPT, *drafts[:accepted], extra)
        draft(drafter.method, "s", committed, 1)
        # One token to feed, and two after full acceptance: the last draft and the bonus.
        assert drafter.passes() == [(2,) if accepted == 4 else (1,)]
        assert drafter.method.fed_tokens("s") == committed
        assert drafter.method.kv_len("s") == len(committed)
        drafter.check()


def test_stable_rows_never_exceed_the_committed_length_less_one_when_a_draft_begins() -> None:
    """Design invariant 1, as the runner sees it: what is kept is [0, L' - 1) at most."""
    drafter = Drafter()
    open_and_draft(drafter, PROMPT, 4)
    draft(drafter.method, "s", PROMPT, 1)  # the same context again: nothing was committed
    assert drafter.passes() == [(1,)]
    assert drafter.method.fed_tokens("s") == PROMPT


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HOT], ids=["greedy", "top_p", "hot"])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_drafter_equal_to_the_target_is_always_accepted(sampling: SamplingParams, depth: int) -> None:
    target, drafter = Target(ToyRunner(LAW, VOCAB)), Drafter()
    outcome = speculate(target, drafter.method, PROMPT, 30, depth, sampling)
    assert outcome.accepted == outcome.drafted == [depth] * len(outcome.drafted)
    assert outcome.tokens == target.plain(PROMPT, 30, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HOT], ids=["greedy", "top_p", "hot"])
def test_a_drafter_with_another_law_changes_no_token(sampling: SamplingParams) -> None:
    target, drafter = Target(ToyRunner(LAW, VOCAB)), Drafter(hash_law(VOCAB, seed=99))
    outcome = speculate(target, drafter.method, PROMPT, 30, 4, sampling)
    assert outcome.tokens == target.plain(PROMPT, 30, sampling)
    assert sum(outcome.accepted) < sum(outcome.drafted)


def test_shared_noise_makes_a_similar_drafter_choose_like_the_target() -> None:
    """With the target's seed a drafter whose logits are close is right far more often than with another one."""

    def close(prefix: tuple[int, ...]) -> torch.Tensor:
        return LAW(prefix) + 0.2 * hash_law(VOCAB, seed=5)(prefix)

    target = Target(ToyRunner(LAW, VOCAB))
    hits = {True: 0, False: 0}
    for seed in range(40):
        for shared in hits:
            drafter = Drafter(close)
            drafter.method.open("s")
            own = SamplingParams(temperature=1.0, seed=seed)
            noise = own if shared else SamplingParams(temperature=1.0, seed=seed + 1000)
            drafts = draft(drafter.method, "s", PROMPT, 4, noise).tokens
            hits[shared] += len(target.verify(PROMPT, drafts, own).accepted_path)
    assert hits[True] > 100
    assert hits[False] < 60


def test_noise_is_keyed_by_absolute_position() -> None:
    """Drafting ahead and drafting later give the same tokens."""
    drafter = Drafter()
    drafter.method.open("a")
    whole = draft(drafter.method, "a", PROMPT, 6, HOT).tokens
    drafter.method.open("b")
    first = draft(drafter.method, "b", PROMPT, 3, HOT).tokens
    second = draft(drafter.method, "b", (*PROMPT, *first), 3, HOT).tokens
    assert whole == first + second


def test_a_superseded_draft_leaves_rows_right() -> None:
    """`advance` stops being called for a job at any point; the next one has another context."""
    for steps in range(1, 5):
        drafter = Drafter()
        drafter.method.open("s")
        stale = DraftJob("s", PROMPT, 4, GREEDY)
        for _ in range(steps):
            drafter.method.advance([stale])
        drafter.check()
        committed = (*PROMPT[:3], 9, 9, 9)
        fresh = Drafter()
        fresh.method.open("s")
        expected = draft(fresh.method, "s", committed, 4).tokens
        assert draft(drafter.method, "s", committed, 4).tokens == expected
        drafter.check()


def test_a_superseding_job_may_share_a_step_with_other_sessions() -> None:
    drafter = Drafter()
    for session in ("a", "b"):
        drafter.method.open(session)
    other, stale = DraftJob("b", PROMPT, 4, GREEDY), DraftJob("a", PROMPT, 4, GREEDY)
    drafter.method.advance([stale, other])
    new = DraftJob("a", (*PROMPT, stale.tokens[0], 1), 2, GREEDY)
    drafter.method.advance([new, other])
    drafter.check()
    assert len(other.tokens) == 2
    assert drafter.method.fed_tokens("a") == new.context


def test_drafting_ahead_on_assumed_tokens() -> None:
    """Assumed tokens that come true cost nothing again; those that do not are dropped."""
    drafter = Drafter()
    block = open_and_draft(drafter, PROMPT, 3)
    ahead = draft(drafter.method, "s", (*PROMPT, *block), 4).tokens
    drafter.passes()
    # The block and the guess for the extra token were right: the tail is the next block, and drafting goes on after it.
    true = (*PROMPT, *block, ahead[0])
    draft(drafter.method, "s", (*true, *ahead[1:]), 4)
    assert drafter.passes()[0] == (1,)
    drafter.check()
    # The second token of the block was wrong.
    committed = (*PROMPT, block[0], (block[1] + 1) % VOCAB)
    draft(drafter.method, "s", committed, 2)
    assert drafter.passes()[0] == (1,)
    assert drafter.method.fed_tokens("s")[: len(committed)] == committed
    drafter.check()


def test_batch_equals_solo() -> None:
    contexts = {f"s{i}": tuple(range(1, 3 + i)) for i in range(6)}
    params = {s: SamplingParams(temperature=0.9, seed=i) if i % 2 else GREEDY for i, s in enumerate(contexts)}
    solo = {}
    for session, context in contexts.items():
        drafter = Drafter()
        drafter.method.open(session)
        solo[session] = draft(drafter.method, session, context, 5, params[session])
    crowd = Drafter()
    jobs = []
    for session, context in contexts.items():
        crowd.method.open(session)
        jobs.append(DraftJob(session, context, 5, params[session]))
    while not all(job.done for job in jobs):
        crowd.method.advance(jobs)
    for job in jobs:
        assert job.tokens == solo[job.session].tokens
        assert job.confidences == pytest.approx(solo[job.session].confidences)
    assert [len(part) for part in crowd.passes()] == [6] * 5  # one pass per step for all of them
    crowd.check()


def test_a_long_context_is_fed_in_steps_and_stalls_nobody() -> None:
    drafter = Drafter(max_batch_tokens=8)
    drafter.method.open("long")
    drafter.method.open("short")
    draft(drafter.method, "short", PROMPT, 1)
    drafter.passes()
    long = DraftJob("long", tuple(i % VOCAB for i in range(30)), 2, GREEDY)
    short = DraftJob("short", (*PROMPT, 6), 5, GREEDY)
    for step in range(1, 6):
        drafter.method.advance([long, short])
        assert len(short.tokens) == step  # one token in every step
    assert all(sum(part) <= 8 for part in drafter.passes())
    while not long.done:
        drafter.method.advance([long, short])
    fresh = Drafter()
    fresh.method.open("s")
    assert long.tokens == draft(fresh.method, "s", long.context, 2).tokens
    drafter.check()


def test_a_superseded_prompt_keeps_the_part_that_was_fed() -> None:
    drafter = Drafter(max_batch_tokens=8)
    drafter.method.open("s")
    context = tuple(i % VOCAB for i in range(30))
    drafter.method.advance([DraftJob("s", context, 2, GREEDY)])
    drafter.method.advance([DraftJob("s", (*context, 3), 2, GREEDY)])
    assert drafter.passes() == [(8,), (8,)]
    assert drafter.method.kv_len("s") == 16
    drafter.check()


def test_an_equal_beginning_is_computed_once() -> None:
    drafter = Drafter()
    shared = tuple(i % VOCAB for i in range(16))
    for session in ("a", "b"):
        drafter.method.open(session)
    draft(drafter.method, "a", (*shared, 1), 1)
    drafter.passes()
    hit = draft(drafter.method, "b", (*shared, 2), 3).tokens
    assert drafter.passes()[0] == (1,)  # its own token
    assert drafter.runner.stats.prefix_hit_tokens == 16
    fresh = Drafter()
    fresh.method.open("s")
    assert hit == draft(fresh.method, "s", (*shared, 2), 3).tokens
    drafter.check()


def test_confidence_is_the_model_s_own_probability() -> None:
    drafter = Drafter(cycle_law([3, 5], VOCAB))
    drafter.method.open("s")
    job = draft(drafter.method, "s", (1, 1), 2)
    assert job.tokens == [3, 5]
    assert job.confidences[0] == pytest.approx(float(one_hot(3, VOCAB).softmax(-1)[3]))
    assert job.method == "draft_model"


def test_min_tokens_masks_the_end_for_the_drafter_too() -> None:
    eos = 2
    runner = TorchDraftRunner(ToyRunner(cycle_law([eos], VOCAB), VOCAB))
    method = DraftModelMethod(runner, eos_token_ids=(eos,))
    method.open("s")
    job = DraftJob("s", PROMPT, 3, SamplingParams(temperature=0.0, min_tokens=2), generation_start=len(PROMPT))
    while not job.done:
        method.advance([job])
    assert job.tokens[0] != eos
    assert job.tokens[1] != eos
    assert job.tokens[2] == eos


_script = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 4), st.integers(0, 4)), max_size=8)


@settings(max_examples=30, deadline=None)
@given(_script)
def test_rows_are_right_after_any_history(script: list[tuple[int, int, int, int]]) -> None:
    """Contexts shrink and grow, drafts are cut short anywhere, and every draft equals a fresh session's."""
    drafter = Drafter(max_batch_tokens=6)
    drafter.method.open("s")
    context = list(PROMPT)
    for dropped, appended, depth, steps in script:
        context = [*context[: max(1, len(context) - dropped)], *(7 + i for i in range(appended))]
        job = DraftJob("s", tuple(context), depth, GREEDY)
        for _ in range(steps):
            drafter.method.advance([job])
        drafter.check()
        fresh = Drafter()
        fresh.method.open("s")
        expected = draft(fresh.method, "s", context, depth).tokens
        assert job.tokens == expected[: len(job.tokens)]
        context.extend(job.tokens[:2])


def test_the_toy_target_sees_the_draft_as_a_chain() -> None:
    """Guards the helper of these tests: an accepted path is a prefix of the chain."""
    target = Target(ToyRunner(cycle_law([4, 6, 8], VOCAB), VOCAB))
    verdict = target.verify((1, 1, 1), (4, 6, 0, 8), GREEDY)
    assert (verdict.accepted_path, verdict.tokens) == ((1, 2), (4, 6, 8))
