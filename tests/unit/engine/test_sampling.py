from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.judging import JudgeRequest, Verdict, judge, node_paths
from paceline.engine.processors import SessionRows
from paceline.engine.sampling import LOGPROB_FLOOR, DraftChoice, DraftRow, draft_tokens
from paceline.errors import ModelError
from paceline.messages import SamplingParams
from paceline.speculation.noise import gumbel, noise_keys
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.unit.speculation.law import ToyModel, reference_distribution

EOS = 2


def request(
    model: ToyModel,
    tree: DraftTree,
    committed: list[int],
    sampling: SamplingParams,
    *,
    start: int = 0,
    eos: tuple[int, ...] = (EOS,),
) -> JudgeRequest:
    logits = torch.stack([model.logits((*committed, *path)) for path in node_paths(tree)])
    return JudgeRequest(logits, tree, committed, start, sampling, model.vocab_size, eos)


def verdict_of(asked: JudgeRequest) -> Verdict:
    (verdict,) = judge([asked])
    assert isinstance(verdict, Verdict), verdict
    return verdict


def decode(
    model: ToyModel, prompt: list[int], sampling: SamplingParams, length: int, draft_seed: int | None
) -> list[int]:
    """Generates with random trees as drafts, or plainly."""
    rng = random.Random(draft_seed)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + length:
        depth = min(4, len(prompt) + length - len(tokens) - 1)
        tree = EMPTY_BLOCK
        if draft_seed is not None:
            paths = [[rng.randrange(model.vocab_size) for _ in range(depth)] for _ in range(rng.randrange(6))]
            tree = DraftTree.from_paths(paths)
        tokens += verdict_of(request(model, tree, tokens, sampling, start=len(prompt))).tokens
    return tokens[len(prompt) :]


class TestTextbook:
    def test_textbook_block_of_five(self) -> None:
        """Five drafts: all right gives six tokens from one pass; the fourth wrong gives three and the target's own."""
        model = ToyModel(12, seed=1)
        for sampling in (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=4)):
            prompt = [3, 4]
            own = decode(model, prompt, sampling, 6, None)

            all_right = verdict_of(request(model, DraftTree.chain(own[:5]), prompt, sampling, start=2))
            assert all_right == Verdict((1, 2, 3, 4, 5), tuple(own))

            drafts = [*own[:3], (own[3] + 1) % 12, own[4]]
            fourth_wrong = verdict_of(request(model, DraftTree.chain(drafts), prompt, sampling, start=2))
            assert fourth_wrong == Verdict((1, 2, 3), tuple(own[:4]))

    def test_tree_accepts_the_branch_that_the_target_writes(self) -> None:
        model = ToyModel(12, seed=1)
        sampling = SamplingParams(seed=9)
        own = decode(model, [5], sampling, 4, None)
        wrong = [(token + 1) % 12 for token in own]
        tree = DraftTree.from_paths([[wrong[0], own[1]], [own[0], wrong[1]], [own[0], own[1], wrong[2]]])
        assert verdict_of(request(model, tree, [5], sampling, start=1)) == Verdict((3, 5), tuple(own[:3]))


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4, 0.9]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
    min_tokens=st.sampled_from([0, 3, 8]),
    stop_token_ids=st.sampled_from([(), (4,)]),
    top_logprobs=st.sampled_from([None, 0, 3]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


class TestDraftsChangeNothing:
    @settings(max_examples=30)
    @given(sampling=PARAMS, prompt=st.lists(st.integers(0, 9), min_size=1, max_size=5), draft_seed=st.integers(0, 99))
    def test_any_drafter_gives_the_tokens_of_plain_decoding(
        self, sampling: SamplingParams, prompt: list[int], draft_seed: int
    ) -> None:
        model = ToyModel(10, seed=8)
        assert decode(model, prompt, sampling, 12, draft_seed) == decode(model, prompt, sampling, 12, None)

    @settings(max_examples=30)
    @given(sampling=PARAMS, prompt=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
    def test_a_node_is_judged_as_a_plain_step_after_its_path(
        self, sampling: SamplingParams, prompt: list[int], data: st.DataObject
    ) -> None:
        """Follows the target's own path down a tree: tokens and logprobs are those of steps without drafts."""
        model = ToyModel(10, seed=8)
        own = decode(model, prompt, sampling, 5, None)
        others = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4))
        verdict = verdict_of(
            request(model, DraftTree.from_paths([*others, own[:4]]), prompt, sampling, start=len(prompt))
        )
        assert verdict.tokens == tuple(own)
        plain = [
            verdict_of(request(model, EMPTY_BLOCK, prompt + own[:i], sampling, start=len(prompt))) for i in range(5)
        ]
        assert verdict.logprobs == tuple(entry for step in plain for entry in step.logprobs)

    def test_garbage_ids_are_never_accepted_and_do_no_harm(self) -> None:
        model = ToyModel(10, seed=8)
        sampling = SamplingParams(seed=5, repetition_penalty=1.3, presence_penalty=0.5)
        own = decode(model, [1], sampling, 3, None)
        paths = [[10, 3], [-1, 2], [2**31 - 1], [own[0], own[1], -7]]
        tree = DraftTree.from_paths(paths)
        assert verdict_of(request(model, tree, [1], sampling, start=1)).tokens == tuple(own)

    def test_draft_that_is_the_target_is_always_accepted(self) -> None:
        model = ToyModel(50, seed=2)
        for seed in range(20):
            sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=seed)
            context, drafted = [1, 2, 3], list[int]()
            for _ in range(4):
                row = DraftRow(sampling, context, drafted, generation_start=3)
                (choice,) = draft_tokens(model.logits((*context, *drafted))[None], [row], vocab_size=50)
                assert choice is not None
                drafted.append(choice.token)
            verdict = verdict_of(request(model, DraftTree.chain(drafted), context, sampling, start=3))
            assert verdict.accepted_path == (1, 2, 3, 4)


class TestBatch:
    def test_alone_and_in_a_crowd(self) -> None:
        """A verdict does not depend on which sessions are judged with it, nor on their order."""
        crowd = self.crowd()
        alone = [judge([asked])[0] for asked in crowd]
        assert judge(crowd) == alone
        assert judge(crowd[::-1]) == alone[::-1]

    def test_all_rows_at_once_and_row_by_row(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What a GPU does and what a CPU does, failing rows included."""
        crowd = self.crowd()
        crowd[3].logits[0] = float("nan")
        crowd[4].logits[-1] = float("nan")
        row_by_row = judge(crowd)
        monkeypatch.setattr(SessionRows, "goes_row_by_row", False)
        for one, other in zip(judge(crowd), row_by_row, strict=True):
            assert one == other or str(one) == str(other)
        assert isinstance(row_by_row[3], ModelError)

    def crowd(self) -> list[JudgeRequest]:
        model = ToyModel(300, seed=4)
        rng = random.Random(1)
        requests = []
        for index in range(24):
            sampling = SamplingParams(
                temperature=rng.choice([0.0, 0.7, 1.0]),
                top_p=rng.choice([0.9, 1.0]),
                top_k=rng.choice([0, 20]),
                presence_penalty=rng.choice([0.0, 0.5]),
                top_logprobs=rng.choice([None, 2]),
                seed=index,
            )
            tree = DraftTree.from_paths([[rng.randrange(300) for _ in range(3)] for _ in range(rng.randrange(3))])
            committed = [rng.randrange(300) for _ in range(rng.randrange(1, 9))]
            requests.append(request(model, tree, committed, sampling))
        return requests

    def test_logits_are_not_changed(self) -> None:
        model = ToyModel(10, seed=4)
        asked = request(
            model,
            DraftTree.chain([1, 2]),
            [3],
            SamplingParams(temperature=0.5, logit_bias={1: 5.0}, presence_penalty=1.0, min_tokens=9, top_p=0.5),
        )
        before = asked.logits.clone()
        judge([asked])
        assert torch.equal(asked.logits, before)

    def test_nothing_to_judge(self) -> None:
        assert judge([]) == []
        assert draft_tokens(torch.empty(0, 5), [], vocab_size=5) == []

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_rows_are_judged_in_float32(self, dtype: torch.dtype) -> None:
        logits = ToyModel(30, seed=4).logits(())[None].to(dtype)
        sampling = SamplingParams(temperature=0.7, seed=3)
        half = JudgeRequest(logits, EMPTY_BLOCK, [1], 0, sampling, 30)
        assert judge([half]) == judge([JudgeRequest(logits.float(), EMPTY_BLOCK, [1], 0, sampling, 30)])


class TestVocabulary:
    def test_padding_columns_are_never_chosen(self) -> None:
        logits = torch.zeros(1, 16)
        logits[0, 10:] = 50.0
        for temperature in (0.0, 1.0):
            for seed in range(50):
                sampling = SamplingParams(temperature=temperature, seed=seed)
                assert verdict_of(JudgeRequest(logits, EMPTY_BLOCK, [1], 0, sampling, 10)).tokens[0] < 10
                (choice,) = draft_tokens(logits, [DraftRow(sampling, [1])], vocab_size=10)
                assert choice is not None
                assert choice.token < 10

    def test_padding_may_hold_anything(self) -> None:
        logits = torch.zeros(1, 16)
        logits[0, 10:] = float("nan")
        assert isinstance(judge([JudgeRequest(logits, EMPTY_BLOCK, [1], 0, SamplingParams(), 10)])[0], Verdict)


BAD = [float("nan"), float("inf"), -float("inf")]


class TestBadRows:
    @pytest.mark.parametrize("bad", BAD)
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_fails_its_own_session_only(self, bad: float, temperature: float) -> None:
        model = ToyModel(10, seed=4)
        sampling = SamplingParams(temperature=temperature, top_p=0.9)
        good = request(model, DraftTree.chain([1, 2]), [3], sampling)
        sick = request(model, DraftTree.chain([1, 2]), [3], sampling)
        sick.logits[0, 7] = bad
        before, failed, after = judge([good, sick, good])
        assert isinstance(failed, ModelError)
        assert "position 1 are not finite" in failed.message
        assert before == after == verdict_of(good)

    @pytest.mark.parametrize("bad", BAD)
    def test_discarded_draft_does_no_harm(self, bad: float) -> None:
        """A row that plain decoding would never compute cannot fail a request."""
        model = ToyModel(10, seed=4)
        (own,) = verdict_of(request(model, EMPTY_BLOCK, [3], SamplingParams())).tokens
        asked = request(model, DraftTree.chain([(own + 1) % 10, 2]), [3], SamplingParams())
        asked.logits[1:] = bad
        assert verdict_of(asked) == Verdict((), (own,))

    def test_accepted_draft_leads_to_the_bad_row(self) -> None:
        model = ToyModel(10, seed=4)
        (own,) = verdict_of(request(model, EMPTY_BLOCK, [3], SamplingParams())).tokens
        asked = request(model, DraftTree.chain([own]), [3], SamplingParams())
        asked.logits[1] = float("nan")
        assert isinstance(judge([asked])[0], ModelError)

    def test_nothing_left_to_choose(self) -> None:
        sampling = SamplingParams(min_tokens=5, stop_token_ids=(0, 1, 2))
        (failed,) = judge([JudgeRequest(torch.zeros(1, 3), EMPTY_BLOCK, [1], 1, sampling, 3)])
        assert isinstance(failed, ModelError)

    def test_drafter_stops_at_a_bad_row(self) -> None:
        logits = torch.zeros(3, 5)
        logits[1, 2] = float("nan")
        rows = [DraftRow(SamplingParams(seed=seed), [1]) for seed in range(3)]
        first, second, third = draft_tokens(logits, rows, vocab_size=5)
        assert second is None
        assert isinstance(first, DraftChoice)
        assert isinstance(third, DraftChoice)


class TestLogprobs:
    def test_are_of_the_distribution_that_the_token_was_drawn_from(self) -> None:
        model = ToyModel(20, seed=6)
        for seed in range(30):
            sampling = SamplingParams(temperature=0.7, top_p=0.8, presence_penalty=0.5, top_logprobs=20, seed=seed)
            verdict = verdict_of(request(model, EMPTY_BLOCK, [3, 4, 5], sampling, start=2))
            probs = reference_distribution(model.logits((3, 4, 5)).tolist(), sampling, [3, 4], [5])
            (entry,) = verdict.logprobs
            assert entry.logprob == pytest.approx(math.log(probs[verdict.tokens[0]]), abs=1e-5)
            assert sorted(entry.top_tokens) == list(range(20))
            for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True):
                expected = math.log(probs[token]) if probs[token] else LOGPROB_FLOOR
                assert logprob == pytest.approx(expected, abs=1e-5)
            assert entry.top_logprobs == tuple(sorted(entry.top_logprobs, reverse=True))

    def test_greedy_reports_temperature_one_without_truncation(self) -> None:
        model = ToyModel(20, seed=6)
        verdict = verdict_of(request(model, EMPTY_BLOCK, [3], SamplingParams(temperature=0.0, top_k=1, top_logprobs=2)))
        logprobs = model.logits((3,)).log_softmax(-1)
        (entry,) = verdict.logprobs
        assert entry.top_tokens[0] == verdict.tokens[0]
        assert entry.logprob == pytest.approx(float(logprobs.max()))
        assert entry.top_logprobs == pytest.approx(logprobs.topk(2).values.tolist())

    def test_floor_is_finite(self) -> None:
        sampling = SamplingParams(temperature=1.0, top_k=1, top_logprobs=3)
        (entry,) = verdict_of(JudgeRequest(torch.tensor([[0.0, 1.0, 2.0]]), EMPTY_BLOCK, [1], 0, sampling, 3)).logprobs
        assert entry.logprob == 0.0
        assert entry.top_logprobs == (0.0, LOGPROB_FLOOR, LOGPROB_FLOOR)
        assert entry.top_tokens == (2, 1, 0)

    def test_more_alternatives_than_tokens(self) -> None:
        sampling = SamplingParams(top_logprobs=9)
        (entry,) = verdict_of(JudgeRequest(torch.zeros(1, 3), EMPTY_BLOCK, [1], 0, sampling, 3)).logprobs
        assert entry.top_tokens == (0, 1, 2)

    @pytest.mark.parametrize(("asked", "entries", "alternatives"), [(None, 0, 0), (0, 2, 0), (2, 2, 2)])
    def test_only_what_was_asked_for(self, asked: int | None, entries: int, alternatives: int) -> None:
        model = ToyModel(20, seed=6)
        sampling = SamplingParams(top_logprobs=asked)
        own = decode(model, [3], sampling, 2, None)
        verdict = verdict_of(request(model, DraftTree.chain(own[:1]), [3], sampling))
        assert len(verdict.logprobs) == entries
        assert all(len(entry.top_tokens) == alternatives for entry in verdict.logprobs)


class TestDraftTokens:
    def test_uses_the_noise_of_its_position(self) -> None:
        logits = ToyModel(40, seed=3).logits(())
        sampling = SamplingParams(temperature=0.8, seed=11)
        row = DraftRow(sampling, [1, 2, 3], [4, 5])
        (choice,) = draft_tokens(logits[None], [row], vocab_size=40)
        score = logits.double() / 0.8 + gumbel(noise_keys([11], [5]), torch.arange(40))[0]
        assert choice is not None
        assert choice.token == int(score.argmax())
        assert choice.confidence == pytest.approx(float((logits / 0.8).softmax(-1)[choice.token]))

    def test_greedy_takes_the_best_with_its_probability_at_temperature_one(self) -> None:
        (choice,) = draft_tokens(
            torch.tensor([[1.0, 3.0, 3.0, 2.0]]), [DraftRow(SamplingParams(temperature=0.0), [1])], vocab_size=4
        )
        assert choice is not None
        assert choice.token == 1
        assert choice.confidence == pytest.approx(float(torch.tensor([1.0, 3.0, 3.0, 2.0]).softmax(-1)[1]))

    def test_rows_of_several_requests(self) -> None:
        model = ToyModel(40, seed=3)
        rows = [
            DraftRow(SamplingParams(temperature=0.0), [1, 2]),
            DraftRow(SamplingParams(seed=5), [1, 2, 3], [7]),
            DraftRow(SamplingParams(seed=6, top_k=3, logit_bias={4: 9.0}), [8]),
            DraftRow(SamplingParams(seed=5), [1, 2, 3], [7]),
        ]
        logits = torch.stack([model.logits((*row.context, *row.drafted)) for row in rows])
        together = draft_tokens(logits, rows, vocab_size=40)
        assert together == [draft_tokens(logits[i : i + 1], rows[i : i + 1], vocab_size=40)[0] for i in range(4)]
        assert together[1] == together[3]

    def test_sharing_the_noise_raises_acceptance(self) -> None:
        """Against a drafter that samples independently, by a wide margin; and not below drafting by argmax."""
        target = ToyModel(30, seed=3)
        drafter = target.blurred(0.7)
        hits = {"shared": 0, "argmax": 0, "independent": 0}
        for seed in range(400):
            context = [seed % 30]
            wanted = verdict_of(request(target, EMPTY_BLOCK, context, SamplingParams(seed=seed))).tokens[0]
            for name, sampling in (
                ("shared", SamplingParams(seed=seed)),
                ("argmax", SamplingParams(temperature=0.0)),
                ("independent", SamplingParams(seed=seed + 10**6)),
            ):
                (choice,) = draft_tokens(drafter.logits(context)[None], [DraftRow(sampling, context)], vocab_size=30)
                assert choice is not None
                hits[name] += choice.token == wanted
        assert hits["shared"] > hits["argmax"] > hits["independent"]
        assert hits["shared"] > 1.3 * hits["independent"]
