"""`draft_model` on a real, tiny model: acceptance and rows, with the same weights on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.draft_runner import Feed
from paceline.drafting.method import DraftJob
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.loader import load_model
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.transformers_runner import TransformersRunner
from paceline.errors import CapacityExceeded
from paceline.messages import SamplingParams
from tests.integration.drafting.conftest import TINY_CONTEXT, TINY_VOCAB
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED, Target, draft, speculate

PROMPT = (1, 12, 53, 4, 95, 6, 77)


def load(folder: Path) -> TransformersRunner:
    torch.set_num_threads(1)
    return TransformersRunner(load_model(folder), RunnerOptions(kv_bytes=4 << 20))


@pytest.fixture(scope="module")
def target(tiny_llama_dir: Path) -> Target:
    return Target(load(tiny_llama_dir))


@pytest.fixture(scope="module")
def shared_runner(tiny_llama_dir: Path) -> TorchDraftRunner:
    return TorchDraftRunner(load(tiny_llama_dir))


@pytest.fixture
def method(shared_runner: TorchDraftRunner) -> DraftModelMethod:
    for session in list(shared_runner._holders):
        shared_runner.close(session)
    return DraftModelMethod(shared_runner)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HOT], ids=["greedy", "top_p", "hot"])
@pytest.mark.parametrize("depth", [1, 4])
def test_a_drafter_equal_to_the_target_is_always_accepted(
    target: Target, method: DraftModelMethod, sampling: SamplingParams, depth: int
) -> None:
    outcome = speculate(target, method, PROMPT, 40, depth, sampling)
    assert outcome.accepted == outcome.drafted
    assert outcome.tokens == target.plain(PROMPT, 40, sampling)


@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "hot"])
def test_drafts_and_rows_after_acceptance_none_partial_and_full(
    target: Target, method: DraftModelMethod, sampling: SamplingParams
) -> None:
    for accepted in range(4):
        method.open("s")
        drafts = draft(method, "s", PROMPT, 3, sampling).tokens
        extra = next(token for token in range(TINY_VOCAB) if accepted == 3 or token != drafts[accepted])
        committed = (*PROMPT, *drafts[:accepted], extra)
        job = DraftJob("s", committed, 3, sampling)
        method.advance([job])
        assert method.kv_len("s") == len(committed)
        assert method.fed_tokens("s") == committed
        while not job.done:
            method.advance([job])
        # Right rows give the drafts of a target that computes everything from nothing.
        assert job.tokens == target.plain(committed, 3, sampling)
        method.check_integrity()


def test_sessions_in_one_pass_equal_sessions_alone(target: Target, method: DraftModelMethod) -> None:
    jobs = [
        DraftJob(f"s{i}", PROMPT[: 2 + i], 4, GREEDY if i % 2 else SamplingParams(temperature=0.9, seed=i))
        for i in range(5)
    ]
    for job in jobs:
        method.open(job.session)
    while not all(job.done for job in jobs):
        method.advance(jobs)
    for job in jobs:
        assert job.tokens == target.plain(job.context, 4, job.sampling)


def test_a_superseded_prompt_and_assumed_tokens_leave_rows_right(target: Target, tiny_llama_dir: Path) -> None:
    method = DraftModelMethod(TorchDraftRunner(load(tiny_llama_dir), max_batch_tokens=4))
    method.open("s")
    method.advance([DraftJob("s", (*PROMPT, 9, 9), 3, GREEDY)])
    assert method.kv_len("s") == 4
    block = draft(method, "s", PROMPT, 3).tokens
    draft(method, "s", (*PROMPT, *block), 4)  # ahead
    committed = (*PROMPT, block[0], (block[1] + 1) % TINY_VOCAB)
    assert draft(method, "s", committed, 3).tokens == target.plain(committed, 3, GREEDY)
    method.check_integrity()
    method.close("s")


def test_facts_and_limits(shared_runner: TorchDraftRunner, tiny_llama_dir: Path) -> None:
    info = shared_runner.info
    assert (info.vocab_size, info.max_model_len, info.max_sessions) == (TINY_VOCAB, TINY_CONTEXT, 0)
    assert info.weights_bytes > 0
    assert info.kv_bytes <= 4 << 20
    limited = TorchDraftRunner(load(tiny_llama_dir), max_sessions=1)
    limited.open("a")
    with pytest.raises(CapacityExceeded, match="1 draft sessions"):
        limited.open("b")


def test_logits_come_only_where_they_are_wanted(shared_runner: TorchDraftRunner) -> None:
    for session in ("a", "b"):
        shared_runner.open(session)
    results = shared_runner.forward([Feed("a", PROMPT, wants_logits=False), Feed("b", PROMPT)])
    assert results[0].logits is None
    assert results[1].logits is not None
    assert results[1].logits.shape == (1, TINY_VOCAB)
    assert shared_runner.forward([]) == []
    for session in ("a", "b"):
        shared_runner.close(session)


@pytest.mark.parametrize("native", [False, True], ids=["transformers", "native"])
def test_steps_taken_at_once_give_the_tokens_of_single_steps(tiny_llama_dir: Path, native: bool) -> None:
    options = RunnerOptions(kv_bytes=4 << 20)
    loaded = load_model(tiny_llama_dir)
    method = DraftModelMethod(
        TorchDraftRunner(NativeRunner(loaded, options) if native else TransformersRunner(loaded, options))
    )
    method.open("at once")
    method.open("step by step")
    context = list(PROMPT)
    for accepted in (6, 0, 3, 6, 1):
        stepwise = draft(method, "step by step", context, 6)
        job = DraftJob("at once", tuple(context), 6, GREEDY)
        while not job.done:
            if not method.draft_at_once(job):
                method.advance([job])
        method.check_integrity()
        assert job.tokens == stepwise.tokens
        assert job.confidences == pytest.approx(stepwise.confidences, rel=1e-4)
        assert method.kv_len("at once") == method.kv_len("step by step")
        context += [*job.tokens[:accepted], 7]
