from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.method import DraftJob, MethodInfo
from paceline.drafting.ngram import NgramMethod
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.features import FeatureTaps
from paceline.errors import CapacityExceeded, ConfigurationError
from paceline.messages import SamplingParams
from tests.fakes.scripted_drafter import ScriptedDrafter, empty, perfect
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.unit.drafting.rounds import GREEDY, HOT, Target, draft, speculate

VOCAB = 16
LAW = hash_law(VOCAB, seed=3)
REPEATING = (1, 2, 3, 4, 1, 2)
FRESH = (1, 2, 3, 4, 5, 6)


def chain(max_sessions: int = 0) -> tuple[FallbackMethod, ToyRunner]:
    toy = ToyRunner(LAW, VOCAB)
    model = DraftModelMethod(TorchDraftRunner(toy, max_sessions))
    return FallbackMethod([NgramMethod(2, 3), model]), toy


def test_the_first_method_that_proposes_wins() -> None:
    method, toy = chain()
    method.open("s")
    job = draft(method, "s", REPEATING, 3)
    assert (job.method, job.tokens) == ("ngram", [3, 4, 1])
    assert toy.passes == []
    job = draft(method, "s", FRESH, 3)
    assert (job.method, len(job.tokens)) == ("draft_model", 3)


def test_a_miss_costs_no_step() -> None:
    method, toy = chain()
    method.open("s")
    job = DraftJob("s", FRESH, 3, GREEDY)
    method.advance([job])
    assert (job.method, len(job.tokens), job.done) == ("draft_model", 1, False)
    assert len(toy.passes) == 1


def test_hits_and_misses_share_a_step_and_running_drafts_stay_where_they_are() -> None:
    method, toy = chain()
    for session in ("hit", "miss", "running"):
        method.open(session)
    running = DraftJob("running", FRESH, 3, GREEDY)
    method.advance([running])
    toy.passes.clear()
    hit, miss = DraftJob("hit", REPEATING, 3, GREEDY), DraftJob("miss", FRESH, 3, GREEDY)
    method.advance([running, hit, miss])
    assert (hit.method, len(hit.tokens)) == ("ngram", 3)
    assert (miss.method, len(miss.tokens)) == ("draft_model", 1)
    assert (running.method, len(running.tokens)) == ("draft_model", 2)
    assert [len(part) for part in toy.passes] == [2]  # one pass for both


def test_rows_catch_up_after_drafts_of_another_method() -> None:
    method, _ = chain()
    method.open("s")
    before = draft(method, "s", FRESH, 2)
    assert before.method == "draft_model"
    context = [*FRESH, 1, 2]
    assert draft(method, "s", context, 4).method == "ngram"
    context += [3, 4, 9]
    job = draft(method, "s", context, 3)
    alone, _ = chain()
    alone.open("s")
    assert job.method == "draft_model"
    assert job.tokens == draft(alone, "s", context, 3).tokens
    assert method.kv_len("s") == len(context) + 2


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_output_is_plain_decoding_s(sampling: SamplingParams) -> None:
    target = Target(ToyRunner(hash_law(3, seed=8, order=2), 3))  # three tokens repeat all the time
    toy = ToyRunner(hash_law(3, seed=8, order=2), 3)
    method = FallbackMethod([NgramMethod(2, 3), DraftModelMethod(TorchDraftRunner(toy))])
    outcome = speculate(target, method, (1, 2), 40, 4, sampling)
    assert outcome.tokens == target.plain((1, 2), 40, sampling)


def test_nothing_found_by_any_is_an_empty_draft() -> None:
    method = FallbackMethod([NgramMethod(2, 3), ScriptedDrafter(empty())])
    method.open("s")
    job = DraftJob("s", FRESH, 3, GREEDY)
    method.advance([job])
    assert (job.done, job.tokens, job.method) == (True, [], "")


def test_three_in_a_row() -> None:
    last = ScriptedDrafter(perfect(lambda context, _: len(context)), info=MethodInfo(name="last"))
    method = FallbackMethod([NgramMethod(2, 3), ScriptedDrafter(empty()), last])
    method.open("s")
    job = draft(method, "s", FRESH, 2)
    assert (job.method, job.tokens) == ("last", [6, 7])


def test_a_session_without_room_in_one_method_drafts_with_the_other() -> None:
    method, _ = chain(max_sessions=1)
    method.open("a")
    method.open("b")
    assert draft(method, "a", FRESH, 2).method == "draft_model"
    job = draft(method, "b", FRESH, 2)
    assert (job.tokens, job.method) == ([], "")
    assert draft(method, "b", REPEATING, 2).method == "ngram"
    method.close("a")
    method.open("b")  # begins again, now with room
    assert draft(method, "b", FRESH, 2).method == "draft_model"


def test_no_room_anywhere_is_refused() -> None:
    full = [ScriptedDrafter(empty(), info=MethodInfo(name=name, max_sessions=1)) for name in ("x", "y")]
    method = FallbackMethod(full)
    method.open("a")
    with pytest.raises(CapacityExceeded):
        method.open("b")
    method.close("b")
    method.close("a")
    method.open("b")


def test_unknown_sessions_are_not_drafted_for() -> None:
    method, _ = chain()
    assert draft(method, "unknown", REPEATING, 2).tokens == []
    assert method.kv_len("unknown") == 0


def test_a_draft_restricted_to_one_method_leaves_the_others_out() -> None:
    method, toy = chain()
    for session in ("ngram", "model", "any"):
        method.open(session)
    jobs = [
        DraftJob("ngram", FRESH, 3, GREEDY, only="ngram"),
        DraftJob("model", REPEATING, 3, GREEDY, only="draft_model"),
        DraftJob("any", REPEATING, 3, GREEDY),
    ]
    while not all(job.done for job in jobs):
        method.advance(jobs)
    assert [(job.method, len(job.tokens)) for job in jobs] == [("", 0), ("draft_model", 3), ("ngram", 3)]
    assert all(len(batch) == 1 for batch in toy.passes)
    hit = DraftJob("ngram", REPEATING, 3, GREEDY, only="ngram")
    method.advance([hit])
    assert (hit.method, hit.tokens) == ("ngram", [3, 4, 1])


def test_a_chain_of_chains_is_restricted_to_its_parts() -> None:
    inner, _ = chain()
    last = ScriptedDrafter(perfect(lambda context, _: len(context)), info=MethodInfo(name="last"))
    method = FallbackMethod([inner, last])
    assert method.info.methods == ("ngram", "draft_model", "last")
    method.open("s")
    for name in method.info.methods:
        job = DraftJob("s", REPEATING, 2, GREEDY, only=name)
        while not job.done:
            method.advance([job])
        assert (job.method, len(job.tokens)) == (name, 2)


def test_a_single_method_is_its_own_part() -> None:
    assert NgramMethod(2, 3).info.methods == ("ngram",)


def test_facts_of_a_chain() -> None:
    model = MethodInfo("draft_model", 100, 64, "hash", weights_bytes=5, kv_bytes=7, max_sessions=2)
    chained = FallbackMethod([NgramMethod(2, 3), ScriptedDrafter(empty(), info=model)]).info
    # ngram has no limits, so the chain has none
    assert chained == MethodInfo(
        "ngram+draft_model", 100, 0, "hash", weights_bytes=5, kv_bytes=7, parts=("ngram", "draft_model")
    )
    small = MethodInfo("other", 90, 32, "hash", weights_bytes=1, kv_bytes=1, max_sessions=9)
    both = FallbackMethod([ScriptedDrafter(empty(), info=model), ScriptedDrafter(empty(), info=small)]).info
    assert both == MethodInfo(
        "draft_model+other", 100, 64, "hash", 6, kv_bytes=8, max_sessions=9, parts=("draft_model", "other")
    )


def test_one_method_of_a_chain_may_build_on_features() -> None:
    taps = FeatureTaps(width=4)
    head = MethodInfo("eagle", taps=taps)
    chain = FallbackMethod([NgramMethod(2, 3), ScriptedDrafter(empty(), info=head)])
    assert chain.info.taps is taps
    two = [ScriptedDrafter(empty(), info=replace(head, name=name)) for name in ("eagle", "medusa")]
    with pytest.raises(ConfigurationError, match="of the methods eagle, medusa a chain can have one"):
        FallbackMethod(two)


def test_impossible_chains_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="different methods"):
        FallbackMethod([])
    with pytest.raises(ConfigurationError, match="different methods"):
        FallbackMethod([NgramMethod(2, 3), NgramMethod(3, 4)])
    infos = [MethodInfo("a", tokenizer_hash="h1"), MethodInfo("b", tokenizer_hash="h2")]
    with pytest.raises(ConfigurationError, match="share a tokenizer"):
        FallbackMethod([ScriptedDrafter(empty(), info=info) for info in infos])
