"""Drafts for the rule `ratio`: what is sent with them, and rounds in which they are judged."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from paceline.drafting.draft_model import DraftModelMethod, DraftSampleMethod
from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.local import LocalDrafter
from paceline.drafting.method import DraftJob, DraftMethod
from paceline.drafting.ngram import NgramMethod
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.local import LocalRequest, LocalResult, generate
from paceline.engine.processors import Shaping
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import ConfigurationError
from paceline.messages import AcceptanceRule, SamplingParams
from tests.fakes.toy_runner import Law, ToyRunner, hash_law, poisoned_law
from tests.unit.speculation.law import P_VALUE, fit_p_value, reference_distribution

VOCAB = 100
LAW = hash_law(VOCAB, seed=3)
PROMPT = (1, 2, 3, 1, 2)
SAMPLED = SamplingParams(temperature=0.8, seed=7)


def drafter(
    law: Law = LAW,
    sample_method: DraftSampleMethod = DraftSampleMethod.PROBABILISTIC,
    *,
    vocab_size: int = VOCAB,
    num_draft_probs: int = 64,
) -> DraftModelMethod:
    runner = TorchDraftRunner(ToyRunner(law, vocab_size))
    return DraftModelMethod(
        runner, eos_token_ids=(0,), draft_sample_method=sample_method, num_draft_probs=num_draft_probs
    )


def drafted(
    method: DraftMethod,
    sampling: SamplingParams = SAMPLED,
    rule: AcceptanceRule = AcceptanceRule.RATIO,
    *,
    context: Sequence[int] = PROMPT,
    depth: int = 4,
) -> DraftJob:
    method.open("s")
    job = DraftJob("s", context, depth, sampling, rule=rule)
    while not job.done:
        method.advance([job])
    return job


class TestWhatIsSent:
    def test_is_the_best_of_the_drafters_processed_row(self) -> None:
        sampling = SamplingParams(temperature=0.8, seed=7, presence_penalty=1.0, logit_bias={5: 2.0}, min_tokens=99)
        job = drafted(drafter(num_draft_probs=10), sampling)
        assert len(job.draft_probs) == len(job.tokens) == len(job.confidences) == 4
        for index, (token, sent) in enumerate(zip(job.tokens, job.draft_probs, strict=True)):
            output = [*PROMPT, *job.tokens[:index]]
            row = reference_distribution(LAW(tuple(output)).tolist(), sampling, (), output, (0,))
            best = sorted(range(VOCAB), key=lambda i: -row[i])[:10]
            assert sent.token_ids == tuple(best)
            assert sent.probs == pytest.approx([row[i] / sum(row[j] for j in best) for i in best], rel=1e-4)
            assert token in sent.token_ids

    @pytest.mark.parametrize(
        "sampling", [SamplingParams(seed=7, top_k=3), SamplingParams(seed=7, top_p=0.6), SamplingParams(min_p=0.3)]
    )
    def test_holds_no_more_than_truncation_leaves(self, sampling: SamplingParams) -> None:
        job = drafted(drafter(), sampling)
        shaping = Shaping.of(sampling)
        assert shaping is not None
        for index, sent in enumerate(job.draft_probs):
            probs = shaping.probs(LAW((*PROMPT, *job.tokens[:index]))[None])[0]
            assert set(sent.token_ids) == set(probs.nonzero()[:, 0].tolist())
            assert sent.probs == pytest.approx([float(probs[i]) for i in sent.token_ids], rel=1e-5)

    def test_is_float32_that_sums_to_one(self) -> None:
        job = drafted(drafter())
        assert all(prob > 0 and torch.tensor(prob).item() == prob for sent in job.draft_probs for prob in sent.probs)
        assert all(abs(sum(sent.probs) - 1) < 1e-6 for sent in job.draft_probs)

    def test_is_drawn_from(self) -> None:
        """1,000 seeds draw one token each, from what is sent with it."""
        method = drafter(hash_law(8, seed=1), vocab_size=8, num_draft_probs=5)
        jobs = [drafted(method, SamplingParams(seed=seed), context=(1,), depth=1) for seed in range(1000)]
        (sent,) = {job.draft_probs[0] for job in jobs}
        counts = Counter(job.tokens[0] for job in jobs)
        assert set(counts) <= set(sent.token_ids)
        assert fit_p_value([counts[token] for token in sent.token_ids], sent.probs) > P_VALUE


class TestNothingIsSent:
    def test_for_greedy_requests(self) -> None:
        greedy = SamplingParams(temperature=0.0, seed=7)
        job = drafted(drafter(), greedy)
        assert job.draft_probs == []
        assert job.tokens == drafted(drafter(), greedy, AcceptanceRule.MATCH).tokens

    def test_when_the_best_tokens_are_wanted(self) -> None:
        sampling = SamplingParams(temperature=1.0, seed=7, logit_bias={5: 2.0})
        job = drafted(drafter(sample_method=DraftSampleMethod.GREEDY), sampling)
        assert job.draft_probs == []
        for index, token in enumerate(job.tokens):
            row = reference_distribution(LAW((*PROMPT, *job.tokens[:index])).tolist(), sampling)
            assert token == max(range(VOCAB), key=row.__getitem__)
        other_seed = SamplingParams(temperature=1.0, seed=8, logit_bias={5: 2.0})
        assert drafted(drafter(sample_method=DraftSampleMethod.GREEDY), other_seed).tokens == job.tokens

    def test_under_match_whatever_the_setting(self) -> None:
        jobs = [drafted(drafter(sample_method=way), SAMPLED, AcceptanceRule.MATCH) for way in DraftSampleMethod]
        assert jobs[0].tokens == jobs[1].tokens
        assert [job.draft_probs for job in jobs] == [[], []]

    def test_by_a_method_without_chance(self) -> None:
        job = drafted(NgramMethod(2, 3))
        assert job.tokens
        assert job.draft_probs == []


def test_a_chain_of_methods_does_not_mix_within_a_draft() -> None:
    chain = FallbackMethod([NgramMethod(2, 3), drafter()])
    found = drafted(chain, context=PROMPT)
    assert (found.method, found.draft_probs) == ("ngram", [])
    missed = drafted(chain, context=(9, 8, 7))
    assert missed.method == "draft_model"
    assert len(missed.draft_probs) == len(missed.tokens) == 4


def test_a_superseded_draft_keeps_its_probabilities_beside_its_tokens() -> None:
    whole = drafted(drafter())
    method = drafter()
    method.open("s")
    job = DraftJob("s", PROMPT, 4, SAMPLED, rule=AcceptanceRule.RATIO)
    method.advance([job])
    method.advance([job])
    assert (job.tokens, job.draft_probs) == (whole.tokens[:2], whole.draft_probs[:2])


def test_a_batch_of_both_rules_drafts_what_each_drafts_alone() -> None:
    samplings = [SAMPLED, SamplingParams(temperature=0.0), SamplingParams(top_p=0.8, seed=3), SamplingParams(seed=4)]
    cases = [(sampling, rule) for sampling in samplings for rule in AcceptanceRule]
    method = drafter()
    jobs = [DraftJob(f"s{i}", PROMPT, 3, sampling, rule=rule) for i, (sampling, rule) in enumerate(cases)]
    for job in jobs:
        method.open(job.session)
    while not all(job.done for job in jobs):
        method.advance(jobs)
    for job, (sampling, rule) in zip(jobs, cases, strict=True):
        alone = drafted(drafter(), sampling, rule, depth=3)
        assert (job.tokens, job.draft_probs) == (alone.tokens, alone.draft_probs)


def test_a_row_that_is_not_finite_ends_that_draft_only() -> None:
    method = drafter(poisoned_law(LAW, lambda prefix: prefix[0] == 9))
    jobs = [DraftJob(name, (start, 2), 3, SAMPLED, rule=AcceptanceRule.RATIO) for name, start in (("a", 9), ("b", 1))]
    for job in jobs:
        method.open(job.session)
    while not all(job.done for job in jobs):
        method.advance(jobs)
    assert (jobs[0].tokens, jobs[0].draft_probs) == ([], [])
    assert len(jobs[1].draft_probs) == 3


def test_a_distribution_needs_a_token() -> None:
    with pytest.raises(ConfigurationError, match="num_draft_probs"):
        drafter(num_draft_probs=0)


def rounds(
    target: Law, method: DraftMethod, samplings: Sequence[SamplingParams], *, vocab_size: int, length: int = 3
) -> list[LocalResult]:
    """One generation for each sampling, by target engine and drafting method, all at once."""
    engine = TargetEngine(
        ToyRunner(target, vocab_size, num_pages=32 + 4 * len(samplings)),
        options=TargetOptions(max_sessions=len(samplings), max_batch_tokens=4096),
    )
    return generate(
        engine,
        [
            LocalRequest(
                (1, 2),
                sampling,
                length,
                2,
                LocalDrafter(method, sampling, 2).draw,
                rule=AcceptanceRule.RATIO,
            )
            for sampling in samplings
        ],
    )


@pytest.mark.parametrize("sampling", [SAMPLED, SamplingParams(seed=2, top_p=0.9), SamplingParams(temperature=1.5)])
def test_a_drafter_equal_to_the_target_is_always_accepted(sampling: SamplingParams) -> None:
    method = DraftModelMethod(TorchDraftRunner(ToyRunner(LAW, VOCAB)), num_draft_probs=VOCAB)
    (result,) = rounds(LAW, method, [sampling], vocab_size=VOCAB, length=40)
    assert result.num_accepted == result.num_drafted > 20


@pytest.mark.parametrize("way", DraftSampleMethod)
def test_rounds_have_the_law_of_the_target(way: DraftSampleMethod) -> None:
    """Engine and method together, 250 generations of two tokens; tests/unit/engine/test_ratio_law.py looks closer."""
    target, other = hash_law(4, seed=1, scale=1.0), hash_law(4, seed=2, scale=1.0)
    method = DraftModelMethod(
        TorchDraftRunner(ToyRunner(other, 4, num_pages=2048)), draft_sample_method=way, num_draft_probs=3
    )
    samplings = [SamplingParams(seed=seed) for seed in range(250)]
    counts = Counter(tuple(r.tokens) for r in rounds(target, method, samplings, vocab_size=4, length=2))
    law = {
        (first, second): target((1, 2)).softmax(-1)[first].item() * target((1, 2, first)).softmax(-1)[second].item()
        for first in range(4)
        for second in range(4)
    }
    assert fit_p_value([counts[pair] for pair in law], law.values()) > P_VALUE
