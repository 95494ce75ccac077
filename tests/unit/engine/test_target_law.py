"""The law, and sessions that know nothing of one another: every output equals plain decoding alone, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch

from bench.crowd import random_arrivals, run_crowd
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.local import LocalDrafter
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.local import LocalRequest, LocalResult, Propose, generate
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.messages import SamplingParams, TokenLogprobs
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.unit.engine.rounds import GREEDY, Owner

VOCAB = 16
EOS = 0
LAW = hash_law(VOCAB, seed=8)
PROMPT = (1, 2, 3, 4)
NUM_TOKENS = 20

PARAMETERS = {
    "greedy": GREEDY,
    "almost greedy": SamplingParams(temperature=1e-6, top_p=0.5),
    "temperature": SamplingParams(temperature=1.3),
    "top_k": SamplingParams(top_k=3),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.2),
    "repetition_penalty": replace(GREEDY, repetition_penalty=1.5),
    "presence_penalty": replace(GREEDY, presence_penalty=0.8),
    "frequency_penalty": SamplingParams(frequency_penalty=0.9),
    "logit_bias": SamplingParams(logit_bias={5: -100.0, 6: 3.0}),
    "min_tokens": SamplingParams(min_tokens=9, logit_bias={EOS: 4.0, 3: 4.0}, stop_token_ids=(3,)),
    "stop ids": SamplingParams(stop_token_ids=(2, 7)),
    "ignore_eos": SamplingParams(ignore_eos=True, logit_bias={EOS: 3.0}),
    "everything": SamplingParams(
        temperature=0.9,
        top_k=9,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        logit_bias={5: -100.0, EOS: 2.0},
        min_tokens=6,
        stop_token_ids=(4,),
    ),
}


def make_engine(**limits: int) -> TargetEngine:
    runner = ToyRunner(LAW, VOCAB, max_model_len=128)
    return TargetEngine(runner, eos_token_ids=(EOS,), options=TargetOptions(**limits))


def decode(engine: TargetEngine, *requests: LocalRequest) -> list[LocalResult]:
    return generate(engine, requests, eos_token_ids=(EOS,))


def half_right(truth: Sequence[int], seed: int = 0) -> Propose:
    """A tree whose paths follow the truth for a while, beside biased-away and end tokens."""

    def propose(context: Sequence[int], depth: int) -> DraftTree:
        generator = random.Random(f"{seed} {len(context)}")
        right = list(truth[len(context) :][:depth])
        cut = generator.randint(0, len(right))
        wrong = [generator.randrange(VOCAB) for _ in range(depth)]
        return DraftTree.from_paths([[5, EOS][:depth], [*right[:cut], *wrong[cut:]], right])

    return propose


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_equals_block_size_0(name: str) -> None:
    for seed in range(3):
        sampling = replace(PARAMETERS[name], seed=seed)
        (plain,) = decode(make_engine(), LocalRequest(PROMPT, sampling, NUM_TOKENS))
        drafts = half_right([*PROMPT, *plain.tokens], seed)
        for size in (1, 2, 4, 8):
            (drafted,) = decode(make_engine(), LocalRequest(PROMPT, sampling, NUM_TOKENS, size, drafts))
            assert drafted.tokens == plain.tokens, size
            assert len(plain.tokens) < 4 or drafted.num_accepted > 0


def test_a_banned_token_is_never_accepted_and_a_wanted_end_waits_for_min_tokens() -> None:
    sampling = replace(PARAMETERS["min_tokens"], logit_bias={5: -100.0, EOS: 9.0})
    propose = lambda _, depth: DraftTree.from_paths([[5], [EOS] * depth])  # noqa: E731
    (result,) = decode(make_engine(), LocalRequest(PROMPT, sampling, NUM_TOKENS, 3, propose))
    assert 5 not in result.tokens
    assert result.tokens.index(EOS) == len(result.tokens) - 1 >= 9


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.8, top_p=0.9, seed=3)])
def test_logprobs_with_drafts_are_those_of_block_size_0(sampling: SamplingParams) -> None:
    asked = replace(sampling, top_logprobs=3, presence_penalty=0.5)

    def told(blocks: bool) -> tuple[list[int], list[TokenLogprobs]]:
        owner, entries = Owner(make_engine(), PROMPT, asked), list[TokenLogprobs]()
        while len(owner.tokens) < len(PROMPT) + NUM_TOKENS:
            answer = owner.verify(half_right(truth)(owner.tokens, 4) if blocks else EMPTY_BLOCK)
            assert len(answer.logprobs) == len(answer.tokens)
            entries += answer.logprobs
        return owner.tokens[: len(PROMPT) + NUM_TOKENS], entries[:NUM_TOKENS]

    truth: list[int] = []
    truth, plain = told(blocks=False)
    assert told(blocks=True) == (truth, plain)


def test_fifty_mixed_prompts_half_of_them_drafted_equal_their_solo_runs() -> None:
    generator = random.Random(5)
    parameters = list(PARAMETERS.values())
    requests: list[LocalRequest] = []
    solo: list[list[int]] = []
    for index in range(50):
        prompt = tuple(generator.randrange(VOCAB) for _ in range(generator.choice([1, 3, 8, 30])))
        request = LocalRequest(prompt, replace(parameters[index % len(parameters)], seed=index // 2), 4 + index % 9)
        (plain,) = decode(make_engine(), request)
        solo.append(plain.tokens)
        if index % 2:
            request = replace(request, num_draft_tokens=5, propose=half_right([*prompt, *plain.tokens], index))
        requests.append(request)
    engine = make_engine(max_batch_tokens=48)
    outcome = run_crowd(engine, random_arrivals(requests, seed=1, most_steps_apart=1), eos_token_ids=(EOS,))
    assert [result.tokens for result in outcome.results] == solo
    assert outcome.most_sessions > 8
    assert outcome.num_mixed_passes > 5
    assert all(result.num_accepted > 0 for result in outcome.results[1::2] if len(result.tokens) > 4)
    # Once more: nothing that one run left behind changes the next.
    again = run_crowd(engine, random_arrivals(requests, seed=2, most_steps_apart=2), eos_token_ids=(EOS,))
    assert [result.tokens for result in again.results] == solo
    assert (engine.num_sessions, engine.kv_pages_in_use) == (0, 0)


def close_law(prefix: tuple[int, ...]) -> torch.Tensor:
    """Nearly the target's."""
    return LAW(prefix) + 0.4 * hash_law(VOCAB, seed=5)(prefix)


def on_and_off(drafter: Propose, sizes: Sequence[int], goes_on: bool) -> Propose:
    """Sends blocks of these sizes in turn; in the pauses the drafter drafts on, unheard, or is not asked at all."""
    rounds = count()

    def propose(context: Sequence[int], depth: int) -> DraftTree:
        size = sizes[next(rounds) % len(sizes)]
        if size or goes_on:
            block = drafter(context, depth)
        return block.crop_depth(size) if size else EMPTY_BLOCK

    return propose


def test_acceptance_after_a_pause_equals_that_of_a_drafter_that_never_paused() -> None:
    results = []
    for goes_on in (False, True):
        method = DraftModelMethod(TorchDraftRunner(ToyRunner(close_law, VOCAB)), eos_token_ids=(EOS,))
        requests = []
        for seed in range(4):
            sampling = replace(PARAMETERS["temperature"], seed=seed)
            drafter = LocalDrafter(method, sampling, len(PROMPT))
            requests.append(LocalRequest(PROMPT, sampling, 40, 3, on_and_off(drafter, (3, 0, 0, 3), goes_on)))
        results.append(decode(make_engine(), *requests))
    assert results[0] == results[1]
    assert any(result.num_accepted > 3 for result in results[0])
    assert any(result.num_accepted < result.num_drafted for result in results[0])


@pytest.mark.parametrize("arrive", ["one after another", "in one step"])
def test_a_prefix_met_before_gives_the_output_and_acceptance_of_a_cold_run(arrive: str) -> None:
    prefix = tuple((7 * index + index // 5) % VOCAB for index in range(50))
    requests: list[LocalRequest] = []
    cold: list[LocalResult] = []
    for tail in ((1, 2), (1, 2), (9,), ()):
        prompt = (*prefix, *tail)
        request = LocalRequest(prompt, SamplingParams(temperature=0.8, seed=len(tail)), 12)
        truth = [*prompt, *decode(make_engine(), request)[0].tokens]
        requests.append(replace(request, num_draft_tokens=4, propose=half_right(truth)))
        cold += decode(make_engine(), requests[-1])
    engine = make_engine()
    run: Callable[[], list[LocalResult]] = (
        (lambda: decode(engine, *requests))
        if arrive == "in one step"
        else lambda: [decode(engine, request)[0] for request in requests]
    )
    for _ in range(2):
        assert run() == cold
        engine.check_integrity()
    assert engine.scheduling.prefix_hit_tokens >= 4 * 48
    assert engine.kv_pages_in_use == 0
