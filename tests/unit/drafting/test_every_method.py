"""What holds for every drafting method, in both placements. A new one gets these tests by a line in `METHODS`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.fallback import FallbackMethod
from paceline.drafting.medusa import MedusaMethod
from paceline.drafting.method import DraftJob, DraftMethod, MethodInfo
from paceline.drafting.ngram import NgramMethod
from paceline.drafting.self_drafting import SelfDrafting
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.drafting.tree_shape import TreeShape
from paceline.engine.local import LocalRequest, generate
from paceline.engine.target import TargetEngine
from paceline.messages import AcceptanceRule, SamplingParams
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.unit.drafting.medusa_toys import knowing_heads, knowing_parts, transitions_ahead
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED
from tests.unit.drafting.test_recipe import shown_method

VOCAB = 16
LAW = hash_law(VOCAB, seed=6, order=1, scale=3.0)
"""The target: it looks at the last token, so all methods have a chance."""


def draft_model() -> DraftMethod:
    return DraftModelMethod(TorchDraftRunner(ToyRunner(LAW, VOCAB), max_sessions=0, max_batch_tokens=64))


def medusa() -> DraftMethod:
    parts = knowing_parts(transitions_ahead(LAW, VOCAB, error=0.5), VOCAB)
    return MedusaMethod(knowing_heads(3), parts, tree=TreeShape.parse("0,0.0,1,0.1,1.0,0.0.0"))


METHODS: dict[str, Callable[[], DraftMethod]] = {
    "draft_model": draft_model,
    "medusa": medusa,
    "ngram": lambda: NgramMethod(1, 3),
    "ngram+draft_model": lambda: FallbackMethod([NgramMethod(2, 3), draft_model()]),
    "of the recipe": shown_method,
}
"""The target's features are (token, position) of each row, as `ToyRunner` has them."""


class ToyFeatures:
    """What a toy target has of all tokens but the last."""

    first_row = 0

    def __init__(self, context: Sequence[int]) -> None:
        self.num_rows = len(context) - 1
        self.rows = torch.tensor([[token, position] for position, token in enumerate(context[:-1])])

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self.rows[start:stop]


class Watched:
    """A method whose finished jobs are checked."""

    def __init__(self, method: DraftMethod) -> None:
        self.method = method

    @property
    def info(self) -> MethodInfo:
        return self.method.info

    def open(self, session: str) -> None:
        self.method.open(session)

    def kv_len(self, session: str) -> int:
        return self.method.kv_len(session)

    def close(self, session: str) -> None:
        self.method.close(session)

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        self.method.advance(jobs)
        for job in jobs:
            if job.done and job.tokens:
                assert job.method in self.info.methods
                assert job.block.max_depth <= job.max_depth
                assert len(job.confidences) == len(job.tokens)
                assert all(0.0 <= confidence <= 1.0 for confidence in job.confidences)
                assert all(0 <= token < VOCAB for token in job.tokens)
                assert job.rule is AcceptanceRule.MATCH or job.block.is_chain


def job_for(context: Sequence[int], sampling: SamplingParams = GREEDY, depth: int = 4) -> DraftJob:
    return DraftJob("s", tuple(context), depth, sampling, features=ToyFeatures(context))


def finished(method: DraftMethod, job: DraftJob) -> DraftJob:
    for _ in range(len(job.context) + job.max_depth + 1):
        if job.done:
            return job
        method.advance([job])
    raise AssertionError("the draft does not end")


@pytest.mark.parametrize("name", METHODS)
class TestEveryMethod:
    @pytest.mark.parametrize("rule", AcceptanceRule)
    def test_inside_the_target_tokens_are_plain_decoding_s(self, name: str, rule: AcceptanceRule) -> None:
        """A sampled request under `ratio` has plain decoding's law, not its tokens: there it is only run."""
        prompts = [(1, 2, 3, 1, 2), (7, 7), (4, 5, 4, 5)]
        num_accepted = 0
        for sampling in (GREEDY, SAMPLED):
            drafter = SelfDrafting(Watched(METHODS[name]()))
            engine = TargetEngine(ToyRunner(LAW, VOCAB), self_drafter=drafter)
            drafted = generate(engine, [LocalRequest(p, sampling, 16, rule=rule, self_draft_depth=4) for p in prompts])
            plain = generate(TargetEngine(ToyRunner(LAW, VOCAB)), [LocalRequest(p, sampling, 16) for p in prompts])
            if rule is AcceptanceRule.MATCH or sampling.greedy:
                assert [result.tokens for result in drafted] == [result.tokens for result in plain]
            assert engine.self_drafting.num_failures == 0
            num_accepted += sum(result.num_accepted for result in drafted)
        assert num_accepted > 0

    def test_a_session_drafts_alone_what_it_drafts_beside_others(self, name: str) -> None:
        def engine() -> TargetEngine:
            return TargetEngine(ToyRunner(LAW, VOCAB), self_drafter=SelfDrafting(METHODS[name]()))

        requests = [
            LocalRequest((1, 2, 3, 1, 2, index), replace(HOT, seed=index), 12, self_draft_depth=1 + index % 4)
            for index in range(5)
        ]
        assert generate(engine(), requests) == [generate(engine(), [request])[0] for request in requests]

    def test_a_draft_does_not_depend_on_those_that_were_begun_before(self, name: str) -> None:
        """Contexts grow, shrink and turn elsewhere, and drafts are superseded after any number of steps."""
        method = METHODS[name]()
        method.open("s")
        for index, length in enumerate((3, 6, 2, 9, 9, 5, 1)):
            context = [(token * (1 + index // 4)) % 5 for token in range(length)]
            for steps in range(3):
                superseded = job_for(context, HOT)
                for _ in range(steps):
                    method.advance([superseded])
            fresh = METHODS[name]()
            fresh.open("s")
            for sampling in (GREEDY, HOT):
                own, expected = (
                    finished(method, job_for(context, sampling)),
                    finished(fresh, job_for(context, sampling)),
                )
                assert (own.tokens, own.parents, own.method) == (expected.tokens, expected.parents, expected.method)

    def test_without_the_target_s_features_it_drafts_as_well_or_not_at_all(self, name: str) -> None:
        method = METHODS[name]()
        method.open("s")
        context = (1, 2, 3, 1, 2)
        blind = finished(method, replace(job_for(context), features=None))
        sighted = finished(method, job_for(context))
        assert blind.tokens == ([] if method.info.taps is not None else sighted.tokens)

    def test_closing_frees_everything_and_closing_twice_is_no_error(self, name: str) -> None:
        method = METHODS[name]()
        method.open("s")
        finished(method, job_for((1, 2, 3, 1, 2)))
        for _ in range(2):
            method.close("s")
            assert method.kv_len("s") == 0
