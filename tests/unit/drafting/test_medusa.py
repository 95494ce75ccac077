from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from paceline.drafting.checkpoints.medusa_checkpoint import MedusaCheckpoint
from paceline.drafting.medusa import MedusaMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.self_drafting import SelfDrafting
from paceline.drafting.tree_shape import DEFAULT_ACCURACIES, TreeShape
from paceline.engine.draft_candidates import draft_candidates
from paceline.engine.features import FeatureTaps
from paceline.engine.loader import load_model
from paceline.engine.local import LocalRequest, LocalResult, generate
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.sampling import DraftRow
from paceline.engine.shared_parts import SharedParts
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import ConfigurationError
from paceline.messages import AcceptanceRule, SamplingParams
from tests.fakes.tiny_models import SERVED, write_model
from tests.fakes.toy_runner import Law, ToyRunner, cycle_law, hash_law
from tests.unit.drafting.medusa_toys import (
    HIDDEN,
    VOCAB,
    Ahead,
    knowing_heads,
    knowing_parts,
    random_heads,
    random_parts,
    transitions_ahead,
)
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED

DERIVED = TreeShape.from_accuracies(DEFAULT_ACCURACIES, 12)
SHAPES = {"chain": TreeShape.chain(3), "derived": DERIVED, "classic_63": TreeShape.classic_63()}
CONTEXT = (3, 1, 4, 1, 5)


class Rows:
    """Features of a session: random rows, of which the ones before `first_row` were never received."""

    def __init__(self, num_rows: int, *, seed: int = 0, first_row: int = 0) -> None:
        self.num_rows, self.first_row = num_rows, first_row
        self.rows = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def read(self, start: int, stop: int) -> torch.Tensor:
        assert self.first_row <= start <= stop <= self.num_rows
        return self.rows[start:stop]


def job_of(
    context: tuple[int, ...] = CONTEXT,
    *,
    sampling: SamplingParams = GREEDY,
    depth: int = 9,
    rule: AcceptanceRule = AcceptanceRule.MATCH,
    features: Rows | None = None,
) -> DraftJob:
    rows = features or Rows(len(context) - 1, seed=len(context))
    return DraftJob("s", context, depth, sampling, 2, rule=rule, features=rows)


def drafted(method: MedusaMethod, job: DraftJob) -> DraftJob:
    method.advance([job])
    assert job.done
    assert job.method == "medusa"
    assert len(job.tokens) == len(job.parents) == len(job.confidences)
    return job


def reference(
    checkpoint: MedusaCheckpoint, parts: SharedParts, tree: TreeShape, job: DraftJob
) -> dict[tuple[int, ...], float]:
    """Paths of tokens with the last one's probability, one head and one row at a time."""
    assert job.features is not None
    hidden = job.features.read(len(job.context) - 2, len(job.context) - 1)
    per_depth = []
    for head, block in enumerate(checkpoint.blocks):
        state = hidden
        for weight, bias in block:
            state = state + functional.silu(functional.linear(state, weight, bias))
        logits = parts.head(state) if checkpoint.heads is None else state @ checkpoint.heads[head].T
        row = DraftRow(job.sampling, job.context, (-1,) * head, job.generation_start)
        (choices,) = draft_candidates(
            logits, [row], num=10, vocab_size=VOCAB, eos_token_ids=(7,), target_ids=checkpoint.token_map
        )
        per_depth.append(choices)
    paths: dict[tuple[int, ...], float] = {}
    for node in tree.nodes:
        if len(node) <= min(job.max_depth, len(per_depth)) and all(
            rank < len(per_depth[depth]) for depth, rank in enumerate(node)
        ):
            path = [per_depth[depth][rank] for depth, rank in enumerate(node)]
            paths[tuple(choice.token for choice in path)] = path[-1].confidence
    return paths


def paths_of(job: DraftJob) -> dict[tuple[int, ...], float]:
    block = job.block
    return {
        tuple(block.token_of(ancestor) for ancestor in block.ancestors(node)[1:]): job.confidences[node - 1]
        for node in range(1, block.num_draft_tokens + 1)
    }


class TestHeads:
    @pytest.mark.parametrize("sampling", [GREEDY, HOT, SAMPLED, SamplingParams(seed=4, min_tokens=9, top_k=2)])
    @pytest.mark.parametrize("kind", ["shared", "own", "tied", "trimmed"])
    def test_draft_is_the_one_that_naive_heads_make(self, kind: str, sampling: SamplingParams) -> None:
        for layers, bias in ((1, True), (2, False)):
            checkpoint, parts = random_heads(kind, layers=layers, bias=bias), random_parts()
            method = MedusaMethod(checkpoint, parts, tree=TreeShape.classic_63(), eos_token_ids=(7,))
            job = drafted(method, job_of(sampling=sampling))
            expected = reference(checkpoint, parts, method.tree, job)
            assert list(paths_of(job)) == list(expected)
            assert list(paths_of(job).values()) == pytest.approx(list(expected.values()), rel=1e-4)

    def test_first_children_are_the_best_of_their_depth(self) -> None:
        """So whoever follows first children walks the chain of the heads' choices."""
        block = drafted(MedusaMethod(random_heads(), random_parts(), tree=DERIVED), job_of()).block
        chain = drafted(MedusaMethod(random_heads(), random_parts(), tree=TreeShape.chain(4)), job_of())
        node, walked = 0, list[int]()
        while children := block.children()[node]:
            token, node = next(iter(children.items()))
            walked.append(token)
        assert walked == chain.tokens[: len(walked)]
        assert len(walked) >= 3

    def test_ids_that_are_no_tokens_are_not_proposed(self) -> None:
        for kind in ("shared", "trimmed"):
            whole = drafted(MedusaMethod(random_heads(kind), random_parts(), tree=TreeShape.classic_63()), job_of())
            limited = MedusaMethod(random_heads(kind), random_parts(), tree=TreeShape.classic_63(), vocab_limit=20)
            assert max(whole.tokens) >= 20
            assert 0 < max(drafted(limited, job_of()).tokens) < 20

    def test_heads_of_another_target_are_refused(self) -> None:
        with pytest.raises(ConfigurationError, match="trained for this target"):
            MedusaMethod(knowing_heads(2), random_parts(), tree=DERIVED)

    def test_facts(self) -> None:
        method = MedusaMethod(random_heads("trimmed", heads=3), random_parts(), tree=TreeShape.classic_63())
        assert method.info.taps is not None
        assert (method.info.taps.layers, method.info.taps.project) == ((), None)
        assert (method.info.vocab_size, method.info.kv_bytes, method.kv_len("s")) == (VOCAB, 0, 0)
        # One head for all, once.
        assert method.info.weights_bytes == 4 * (3 * HIDDEN * (HIDDEN + 1) + 9 * HIDDEN)
        assert method.tree.max_depth == 3


class TestJobs:
    def test_a_batch_drafts_what_each_drafts_alone(self) -> None:
        method = MedusaMethod(random_heads(), random_parts(), tree=DERIVED)
        kinds = list(itertools.product((GREEDY, HOT, SAMPLED), (1, 2, 9), AcceptanceRule))

        def jobs() -> list[DraftJob]:
            return [
                job_of((*CONTEXT, *range(index)), sampling=sampling, depth=depth, rule=rule)
                for index, (sampling, depth, rule) in enumerate(kinds)
            ]

        together = jobs()
        method.advance(together)
        for job, alone in zip(together, jobs(), strict=True):
            drafted(method, alone)
            assert (job.tokens, job.parents) == (alone.tokens, alone.parents)
            assert job.confidences == pytest.approx(alone.confidences, rel=1e-4)

    def test_depth_is_heeded(self) -> None:
        method = MedusaMethod(random_heads(), random_parts(), tree=DERIVED)
        whole = drafted(method, job_of()).block
        assert drafted(method, job_of(depth=2)).block == whole.crop_depth(2)
        assert drafted(method, job_of(depth=1)).block == whole.crop_depth(1)

    def test_under_ratio_a_chain_of_the_best_without_chance(self) -> None:
        method = MedusaMethod(random_heads(), random_parts(), tree=DERIVED)
        best = drafted(MedusaMethod(random_heads(), random_parts(), tree=TreeShape.chain(4)), job_of())
        for sampling in (GREEDY, HOT):
            job = drafted(method, job_of(sampling=sampling, rule=AcceptanceRule.RATIO))
            assert job.block.is_chain
            assert job.tokens == best.tokens[: DERIVED.max_depth]
            assert job.draft_probs == []

    @pytest.mark.parametrize(
        "features",
        [None, Rows(3), Rows(0), Rows(4, first_row=4)],
        ids=["none", "a row short", "no rows", "not received"],
    )
    def test_without_the_hidden_state_nothing_is_drafted(self, features: Rows | None) -> None:
        method = MedusaMethod(random_heads(), random_parts(), tree=DERIVED)
        blind = replace(job_of(), features=features)
        sighted, first = job_of(), job_of((3,), features=Rows(0))
        method.advance([blind, sighted, first])
        assert (blind.done, blind.tokens, first.tokens) == (True, [], [])
        assert sighted.tokens == drafted(method, job_of()).tokens

    def test_a_row_that_is_not_finite_costs_its_own_draft_only(self) -> None:
        method = MedusaMethod(random_heads(), random_parts(), tree=DERIVED)
        sick, well = job_of(), job_of()
        assert isinstance(sick.features, Rows)
        sick.features.rows[-1, 3] = float("nan")
        method.advance([sick, well])
        assert sick.tokens == []
        assert well.tokens == drafted(method, job_of()).tokens

    def test_truncation_may_leave_fewer_candidates_than_the_tree_has_places(self) -> None:
        job = drafted(
            MedusaMethod(random_heads(), random_parts(), tree=TreeShape.classic_63()),
            job_of(sampling=SamplingParams(top_k=1, seed=1)),
        )
        assert job.block.is_chain
        assert job.block.max_depth == 4

    def test_jobs_that_are_done_are_left_alone(self) -> None:
        job = replace(job_of(), done=True)
        MedusaMethod(random_heads(), random_parts(), tree=DERIVED).advance([job])
        assert job.tokens == []


def run(
    law: Law, method: MedusaMethod | None, sampling: SamplingParams, num_tokens: int = 30, batch: int = 1
) -> list[LocalResult]:
    """Decodes with a toy target of VOCAB tokens."""
    engine = TargetEngine(
        ToyRunner(law, VOCAB, max_model_len=128),
        options=TargetOptions(max_batch_tokens=512, max_draft_tokens=63),
        self_drafter=None if method is None else SelfDrafting(method),
    )
    requests = [
        LocalRequest((*CONTEXT, index), sampling, num_tokens, self_draft_depth=0 if method is None else 9)
        for index in range(batch)
    ]
    results = generate(engine, requests)
    assert engine.self_drafting.num_failures == 0
    return results


def knowing(ahead: Ahead, tree: TreeShape, heads: int = 4) -> MedusaMethod:
    return MedusaMethod(knowing_heads(heads), knowing_parts(ahead, VOCAB), tree=tree)


class TestInTheTarget:
    @pytest.mark.parametrize("sampling", [GREEDY, HOT, SAMPLED], ids=["greedy", "hot", "sampled"])
    @pytest.mark.parametrize("shape", SHAPES)
    def test_tokens_are_plain_decoding_s(self, shape: str, sampling: SamplingParams) -> None:
        """With heads that are right sometimes."""
        law = hash_law(VOCAB, seed=4, order=1)
        ahead = transitions_ahead(law, VOCAB, error=1.0)
        plain = run(law, None, sampling, 20, batch=2)
        with_heads = run(law, knowing(ahead, SHAPES[shape]), sampling, 20, batch=2)
        assert [result.tokens for result in with_heads] == [result.tokens for result in plain]
        num_accepted = sum(result.num_accepted for result in with_heads)
        assert 0 < num_accepted < sum(result.num_drafted for result in with_heads)

    @pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
    @pytest.mark.parametrize("tree", [TreeShape.chain(4), DERIVED], ids=["chain", "derived"])
    def test_heads_that_know_what_comes_are_accepted_always(self, tree: TreeShape, sampling: SamplingParams) -> None:
        """Any error of one in rows, heads or positions ends that."""
        cycle = [3, 5, 7, 11, 2, 13, 17]
        one_hots = cycle_law(cycle, VOCAB)
        (result,) = run(one_hots, knowing(lambda _token, row, head: one_hots((0,) * (row + 2 + head)), tree), sampling)
        expected = [cycle[(len(CONTEXT) + 1 + index) % len(cycle)] for index in range(30)]
        assert result.tokens == expected
        # The first round has no draft; the last ones end with the text.
        depth = tree.max_depth
        assert result.rounds[1:-1] == [depth + 1] * len(result.rounds[1:-1])
        assert len(result.rounds) > 4

    def test_the_noise_is_that_of_the_position(self) -> None:
        """The same law everywhere: only the noise tells tokens apart, and the heads share it."""
        logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
        (result,) = run(lambda _prefix: logits, knowing(lambda *_: logits, TreeShape.chain(4)), HOT)
        assert result.rounds[1:-1] == [5] * len(result.rounds[1:-1])
        assert len(set(result.tokens)) > 10

    def test_sharing_the_noise_raises_acceptance(self) -> None:
        """Against drafts without chance, for the same sampled requests."""

        class WithoutChance(MedusaMethod):
            def advance(self, jobs: list[DraftJob]) -> None:  # type: ignore[override]
                asked = [replace(job, sampling=GREEDY) for job in jobs]
                super().advance(asked)
                for job, own in zip(jobs, asked, strict=True):
                    job.tokens, job.parents, job.done = own.tokens, own.parents, True

        law = hash_law(VOCAB, seed=4, order=1, scale=1.5)
        ahead = transitions_ahead(law, VOCAB, error=0.3)
        accepted = {}
        for kind in (MedusaMethod, WithoutChance):
            method = kind(knowing_heads(4), knowing_parts(ahead, VOCAB), tree=DERIVED)
            accepted[kind] = sum(result.num_accepted for result in run(law, method, HOT, 40, batch=2))
        assert accepted[MedusaMethod] > 1.3 * accepted[WithoutChance]

    def test_beside_a_real_model(self, tmp_path: Path) -> None:
        """Features of the model's own pool and the head that it lends, chain and tree, greedy and sampled."""
        folder = write_model(tmp_path, SERVED["llama"])
        options = RunnerOptions(kv_bytes=1 << 20, taps=FeatureTaps())
        runner = NativeRunner(load_model(folder), options)
        hidden, vocab_size = 32, 64
        untrained = random_heads(layers=1)
        blocks = tuple(((torch.zeros(hidden, hidden), torch.zeros(hidden)),) for _ in untrained.blocks)
        checkpoint = replace(untrained, blocks=blocks, config=replace(untrained.config, hidden_size=hidden))
        for sampling, tree in itertools.product((GREEDY, HOT), (TreeShape.chain(3), TreeShape.classic_63())):
            requests = [LocalRequest((1, 2, 3, index), sampling, 12) for index in range(2)]
            limits = TargetOptions(max_draft_tokens=63)
            plain = generate(TargetEngine(runner, options=limits, vocab_size=vocab_size), requests)
            method = MedusaMethod(checkpoint, runner.shared_parts(), tree=tree)
            engine = TargetEngine(runner, options=limits, vocab_size=vocab_size, self_drafter=SelfDrafting(method))
            own = generate(engine, [replace(request, self_draft_depth=4) for request in requests])
            assert [result.tokens for result in own] == [result.tokens for result in plain]
            if tree.num_ranks > 1:
                assert sum(result.num_accepted for result in own) > 0
            assert engine.self_drafting.num_drafts > 0
