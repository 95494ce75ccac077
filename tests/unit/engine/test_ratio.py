from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline.engine.draft_sampling import draw_drafts
from paceline.engine.judging import JudgeRequest, Verdict, judge, node_paths
from paceline.engine.processors import PrefixState, SessionRows
from paceline.engine.sampling import DraftRow
from paceline.errors import InvalidArgument, ModelError
from paceline.messages import AcceptanceRule, DraftProbs, SamplingParams
from paceline.speculation.tree import DraftTree
from tests.unit.speculation.law import ToyModel

VOCAB_SIZE = 40
TARGET = ToyModel(VOCAB_SIZE, seed=1)
DRAFTER = TARGET.blurred(1.0)


def drawn(
    sampling: SamplingParams, committed: Sequence[int] = (1, 2), depth: int = 4, drafter: ToyModel = DRAFTER
) -> JudgeRequest:
    """A block that was drawn from the drafter's ten best tokens."""
    drafts: list[int] = []
    sent: list[DraftProbs] = []
    for _ in range(depth):
        logits = drafter.logits([*committed, *drafts])[None]
        rows = [DraftRow(sampling, committed, drafts)]
        (choice,) = draw_drafts(logits, rows, num_draft_probs=10, vocab_size=VOCAB_SIZE)
        assert choice is not None
        assert choice.draft_probs is not None
        drafts.append(choice.token)
        sent.append(choice.draft_probs)
    return by_ratio(DraftTree.chain(drafts), committed, sampling, tuple(sent))


def by_ratio(
    tree: DraftTree, committed: Sequence[int], sampling: SamplingParams, draft_probs: tuple[DraftProbs, ...] = ()
) -> JudgeRequest:
    logits = torch.stack([TARGET.logits((*committed, *path)) for path in node_paths(tree)])
    return JudgeRequest(
        logits, tree, committed, 0, sampling, VOCAB_SIZE, rule=AcceptanceRule.RATIO, draft_probs=draft_probs
    )


def verdict_of(request: JudgeRequest) -> Verdict:
    (verdict,) = judge([request])
    assert isinstance(verdict, Verdict), verdict
    return verdict


def crowd(num_requests: int = 30) -> list[JudgeRequest]:
    """Blocks of all lengths under both rules, drawn and certain, with all kinds of parameters."""
    rng = random.Random(4)
    requests = []
    for seed in range(num_requests):
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.6, 1.0]),
            top_p=rng.choice([0.9, 1.0]),
            top_k=rng.choice([0, 5]),
            presence_penalty=rng.choice([0.0, 0.5]),
            top_logprobs=rng.choice([None, 2]),
            seed=seed,
        )
        committed = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 5))]
        request = drawn(sampling if sampling.temperature else SamplingParams(), committed, rng.randrange(5))
        request = replace(request, sampling=sampling)
        if rng.random() < 0.3:
            request = replace(request, draft_probs=())
        if rng.random() < 0.3:
            request = replace(request, rule=AcceptanceRule.MATCH)
        requests.append(request)
    return requests


class TestBatch:
    def test_alone_and_in_a_crowd(self) -> None:
        requests = crowd()
        alone = [verdict_of(request) for request in requests]
        assert judge(requests) == alone
        assert judge(requests[::-1]) == alone[::-1]
        assert {len(verdict.accepted_path) for verdict in alone} >= {0, 1, 2, 3}

    def test_all_rows_at_once_and_row_by_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a GPU does and what a CPU does, failing rows included."""
        requests = crowd()
        for sick in (3, 4, 5):
            requests[sick].logits[sick - 4] = float("nan")
        row_by_row = judge(requests)
        monkeypatch.setattr(SessionRows, "goes_row_by_row", False)
        for one, other in zip(judge(requests), row_by_row, strict=True):
            if isinstance(one, Verdict) and isinstance(other, Verdict):
                assert (one.accepted_path, one.tokens) == (other.accepted_path, other.tokens)
            else:
                assert str(one) == str(other)
        assert any(isinstance(verdict, ModelError) for verdict in row_by_row)

    def test_verdict_depends_on_block_and_seed_only(self) -> None:
        request = drawn(SamplingParams(seed=5))
        assert verdict_of(request) == verdict_of(request)
        reseeded = [
            verdict_of(replace(request, sampling=replace(request.sampling, seed=seed))).tokens for seed in range(20)
        ]
        assert len(set(reseeded)) > 5

    def test_only_rows_that_matter_are_computed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        computed: list[int] = []
        whole = SessionRows.processed

        def noting(session: SessionRows, rows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
            computed.extend(rows)
            return whole(session, rows)

        monkeypatch.setattr(SessionRows, "processed", noting)
        for seed in range(10):
            verdict = verdict_of(drawn(SamplingParams(seed=seed)))
            computed_here = sorted(set(computed[-len(verdict.tokens) :]))
            assert computed_here == list(range(len(verdict.tokens)))


class TestGreedy:
    def test_is_judged_as_under_match(self) -> None:
        tree = DraftTree.from_paths([[3, 4], [5, 6], [int(TARGET.logits((1, 2)).argmax()), 7]])
        request = by_ratio(tree, (1, 2), SamplingParams(temperature=0.0, top_logprobs=2))
        verdict = verdict_of(request)
        assert verdict == verdict_of(replace(request, rule=AcceptanceRule.MATCH))
        assert len(verdict.accepted_path) == 1


class TestLogprobs:
    def test_are_the_targets_for_the_token_that_came_out(self) -> None:
        sampling = SamplingParams(temperature=0.8, top_p=0.9, top_logprobs=3, seed=8)
        request = drawn(sampling)
        verdict = verdict_of(request)
        assert len(verdict.logprobs) == len(verdict.tokens)
        rows = SessionRows(request.logits, PrefixState(sampling, (1, 2), 0), node_paths(request.tree))
        assert rows.shaping is not None
        for row, (token, entry) in enumerate(zip(verdict.tokens, verdict.logprobs, strict=True)):
            probs = rows.shaping.probs(rows.processed((row,))[0])[0]
            assert entry.logprob == pytest.approx(float(probs[token].log()), abs=1e-5)
            assert entry.top_tokens[0] == int(probs.argmax())


class TestBadRows:
    def test_row_behind_the_first_rejection_does_no_harm(self) -> None:
        request = by_ratio(DraftTree.chain([4, 5]), (1, 2), SamplingParams(logit_bias={4: -1000.0}))
        request.logits[1:] = float("nan")
        assert verdict_of(request).accepted_path == ()

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_row_that_is_reached_fails_its_session_only(self, bad: float) -> None:
        good = drawn(SamplingParams(seed=3))
        sick = replace(good, logits=good.logits.clone())
        sick.logits[0, 7] = bad
        before, failed, after = judge([good, sick, good])
        assert before == after == verdict_of(good)
        assert isinstance(failed, ModelError)
        assert "position 2 are not finite" in failed.message

    def test_reached_after_an_accepted_draft(self) -> None:
        request = by_ratio(DraftTree.chain([4]), (1, 2), SamplingParams(logit_bias={4: 1000.0}))
        request.logits[1] = float("nan")
        (failed,) = judge([request])
        assert isinstance(failed, ModelError)
        assert "position 3" in failed.message


class TestRefusals:
    @pytest.mark.parametrize(
        ("probs", "message"),
        [
            (DraftProbs((4, 5), (0.5, float("nan"))), "not a distribution"),
            (DraftProbs((4, 5), (1.5, -0.5)), "not a distribution"),
            (DraftProbs((4, 5), (0.5, 0.4)), "not a distribution"),
            (DraftProbs((5,), (1.0,)), "no probability"),
            (DraftProbs((4, VOCAB_SIZE), (0.5, 0.5)), "outside"),
            (DraftProbs((4, 4), (0.5, 0.5)), "twice"),
        ],
    )
    def test_bad_probabilities_fail_their_session_only(self, probs: DraftProbs, message: str) -> None:
        good = drawn(SamplingParams(seed=3))
        bad = by_ratio(DraftTree.chain([4]), (1, 2), SamplingParams(), (probs,))
        before, refused, after = judge([good, bad, good])
        assert before == after == verdict_of(good)
        assert isinstance(refused, InvalidArgument)
        assert message in refused.message
        assert refused.field == "draft_probs"

    def test_too_few_probabilities(self) -> None:
        request = drawn(SamplingParams())
        (refused,) = judge([replace(request, draft_probs=request.draft_probs[:2])])
        assert isinstance(refused, InvalidArgument)

    def test_a_tree(self) -> None:
        (refused,) = judge([by_ratio(DraftTree.from_paths([[1], [2]]), (1, 2), SamplingParams())])
        assert isinstance(refused, InvalidArgument)
        assert "chains" in refused.message

    def test_an_id_that_is_no_token(self) -> None:
        request = replace(by_ratio(DraftTree.chain([4]), (1,), SamplingParams()), tree=DraftTree.chain([VOCAB_SIZE]))
        assert isinstance(judge([request])[0], InvalidArgument)

    def test_a_block_that_was_cut_short_is_judged_by_what_is_left(self) -> None:
        request = drawn(SamplingParams(seed=3))
        cut = replace(request, tree=request.tree.crop_depth(2), logits=request.logits[:3])
        assert verdict_of(cut) == verdict_of(replace(cut, draft_probs=cut.draft_probs[:2]))
