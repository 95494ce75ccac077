from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine.draft_candidates import draft_candidates
from paceline.engine.processors import PrefixState, SessionRows, Shaping
from paceline.engine.sampling import DraftChoice, DraftRow, draft_tokens
from paceline.messages import SamplingParams
from paceline.speculation.noise import gumbel, noise_keys
from tests.unit.speculation.law import ToyModel

EOS = 2
GREEDY = SamplingParams(temperature=0.0)


def by_definition(logits: torch.Tensor, row: DraftRow, num: int, ids: torch.Tensor | None = None) -> list[int]:
    """Noise on every token that stays, then a sort. `logits` are of the whole vocabulary # [vocab_size].

    `ids` are the tokens that may be chosen; the others must be too unlikely to count.
    """
    state = PrefixState(row.sampling, row.context, row.generation_start, (EOS,))
    processed, _ = SessionRows(logits[None], state, (row.drafted,)).processed((0,))
    position = len(row.context) + len(row.drafted)
    shaping = Shaping.of(row.sampling)
    every_id = torch.arange(len(logits))
    scores = processed.double()
    if shaping is not None:
        scores = shaping.kept(processed).double() + gumbel(noise_keys([row.sampling.seed], [position]), every_id)
    allowed = every_id.tolist() if ids is None else ids.tolist()
    (values,) = scores.tolist()
    ranked = sorted(allowed, key=lambda token: (-values[token], token))
    return [token for token in ranked if values[token] > -math.inf][:num]


def tokens_of(candidates: tuple[DraftChoice, ...]) -> list[int]:
    return [choice.token for choice in candidates]


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.02, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.9]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-100.0, -1.0, 2.5]), max_size=3),
    min_tokens=st.sampled_from([0, 8]),
    stop_token_ids=st.sampled_from([(), (4,)]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


class TestLaw:
    @settings(max_examples=50)
    @given(sampling=PARAMS, drafted=st.lists(st.integers(0, 9), max_size=3), num=st.integers(1, 12))
    def test_is_brute_force_and_begins_with_the_draft_token(
        self, sampling: SamplingParams, drafted: list[int], num: int
    ) -> None:
        row = DraftRow(sampling, [1, 5, 3], drafted, generation_start=2)
        logits = ToyModel(10, seed=8).logits((*row.context, *drafted))
        (found,) = draft_candidates(logits[None], [row], num=num, vocab_size=10, eos_token_ids=(EOS,))
        assert tokens_of(found) == by_definition(logits, row, num)
        (best,) = draft_tokens(logits[None], [row], vocab_size=10, eos_token_ids=(EOS,))
        assert best is not None
        assert best.token == found[0].token
        assert best.confidence == pytest.approx(found[0].confidence)

    @pytest.mark.parametrize(
        "sampling",
        [
            GREEDY,
            SamplingParams(),
            SamplingParams(temperature=0.05),
            SamplingParams(top_k=30),
            SamplingParams(top_p=0.5),
            SamplingParams(temperature=2.0, top_p=0.97),
            SamplingParams(temperature=2.0, min_p=0.01),
        ],
        ids=["greedy", "plain", "cold", "top_k", "top_p", "wide_top_p", "wide_min_p"],
    )
    @pytest.mark.parametrize("spread", [1.0, 6.0, 60.0])
    def test_large_vocabulary(self, sampling: SamplingParams, spread: float) -> None:
        """Where nothing like all tokens are looked at."""
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn(4, 3000, generator=generator) * spread
        rows = [DraftRow(replace(sampling, seed=seed), [1] * seed) for seed in range(4)]
        found = draft_candidates(logits, rows, num=10, vocab_size=3000, eos_token_ids=(EOS,))
        for index, row in enumerate(rows):
            assert tokens_of(found[index]) == by_definition(logits[index], row, 10)

    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(temperature=0.5, seed=3)])
    def test_equals_come_by_id(self, sampling: SamplingParams) -> None:
        """Plateaus as large as the list and larger; sampled requests have none, their noise differs."""
        logits = torch.zeros(2, 1000)
        logits[0, 700:703] = 1.0
        rows = [DraftRow(sampling, [1])] * 2
        for row, found in zip(logits, draft_candidates(logits, rows, num=5, vocab_size=1000), strict=True):
            assert tokens_of(found) == by_definition(row, rows[0], 5)

    def test_hardly_any_weight_but_for_one_token(self) -> None:
        """The weights of all others vanish in float32, the order of their scores does not."""
        logits = torch.full((1, 2000), -200.0)
        logits[0, 1234] = 0.0
        for seed in range(5):
            row = DraftRow(SamplingParams(seed=seed), [1])
            (found,) = draft_candidates(logits, [row], num=6, vocab_size=2000)
            assert tokens_of(found) == by_definition(logits[0], row, 6)

    def test_confidence_is_the_model_s_own_probability_after_temperature(self) -> None:
        logits = ToyModel(40, seed=3).logits(())
        row = DraftRow(SamplingParams(temperature=0.8, top_k=5, seed=1), [1])
        (found,) = draft_candidates(logits[None], [row], num=9, vocab_size=40)
        assert len(found) == 5
        probs = (logits / 0.8).softmax(-1)
        assert [choice.confidence for choice in found] == pytest.approx([float(probs[c.token]) for c in found])


class TestRows:
    def test_a_row_is_chosen_from_the_same_alone_and_in_a_crowd(self) -> None:
        rng = random.Random(2)
        rows = [
            DraftRow(
                SamplingParams(
                    temperature=rng.choice([0.0, 0.7, 1.0]),
                    top_p=rng.choice([0.8, 1.0]),
                    presence_penalty=rng.choice([0.0, 0.5]),
                    seed=index,
                ),
                [rng.randrange(90) for _ in range(rng.randrange(1, 6))],
                [7] * rng.randrange(3),
            )
            for index in range(12)
        ]
        logits = torch.stack([ToyModel(90, seed=4).logits((*row.context, *row.drafted)) for row in rows])
        together = draft_candidates(logits, rows, num=4, vocab_size=90)
        assert together == [
            draft_candidates(logits[i : i + 1], rows[i : i + 1], num=4, vocab_size=90)[0] for i in range(12)
        ]

    @pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(), SamplingParams(top_p=0.9)])
    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
    def test_a_row_that_is_not_finite_has_none(self, sampling: SamplingParams, bad: float) -> None:
        logits = ToyModel(50, seed=4).logits(()).repeat(3, 1)
        logits[1, 7] = bad
        first, second, third = draft_candidates(logits, [DraftRow(sampling, [1])] * 3, num=3, vocab_size=50)
        assert second == ()
        assert len(first) == 3
        assert first == third

    def test_padding_is_never_chosen_and_may_hold_anything(self) -> None:
        logits = torch.zeros(1, 16)
        logits[0, 10:] = float("nan")
        (found,) = draft_candidates(logits, [DraftRow(SamplingParams(), [1])], num=16, vocab_size=10)
        assert sorted(tokens_of(found)) == list(range(10))

    def test_no_rows(self) -> None:
        assert draft_candidates(torch.empty(0, 5), [], num=3, vocab_size=5) == []


class TestDraftVocabulary:
    @settings(max_examples=40)
    @given(sampling=PARAMS, drafted=st.lists(st.integers(0, 9), max_size=3), data=st.data())
    def test_is_the_whole_vocabulary_with_all_other_tokens_far_below(
        self, sampling: SamplingParams, drafted: list[int], data: st.DataObject
    ) -> None:
        """The map in any order; what processing knows of tokens that the drafter lacks is left aside."""
        ids = torch.tensor(data.draw(st.permutations(range(10)))[:6])
        row = DraftRow(sampling, [1, 5, 3, 77], drafted, generation_start=2)
        full = torch.full((10,), -1e9)
        full[ids] = ToyModel(10, seed=8).logits((*row.context, *drafted))[ids]
        padded = torch.cat([full[ids], torch.full((2,), torch.nan)])
        (found,) = draft_candidates(padded[None], [row], num=3, vocab_size=10, eos_token_ids=(EOS,), target_ids=ids)
        known = set(ids.tolist())
        bias = {token: value for token, value in sampling.logit_bias.items() if token in known}
        assert tokens_of(found) == by_definition(
            full, replace(row, sampling=replace(sampling, logit_bias=bias)), 3, ids
        )

    def test_noise_is_that_of_the_target_s_id(self) -> None:
        """A drafter with the target's logits on a few tokens finds what the target finds among them."""
        ids = torch.tensor([40, 3, 17, 29, 8])
        logits = ToyModel(50, seed=1).logits(())
        for seed in range(30):
            row = DraftRow(SamplingParams(seed=seed), [1, 2])
            (found,) = draft_candidates(logits[ids][None], [row], num=5, vocab_size=50, target_ids=ids)
            assert tokens_of(found) == by_definition(logits, row, 5, ids)


def test_siblings_that_share_the_noise_hold_the_target_s_choice_more_often() -> None:
    """Than the drafter's most likely tokens, and than siblings drawn with other noise."""
    target = ToyModel(60, seed=3)
    drafter = target.blurred(0.7)
    hits = {"shared": 0, "likeliest": 0, "independent": 0}
    for seed in range(150):
        context = [seed % 60]
        (wanted,) = draft_tokens(
            target.logits(context)[None], [DraftRow(SamplingParams(seed=seed), context)], vocab_size=60
        )
        assert wanted is not None
        kinds = {
            "shared": SamplingParams(seed=seed),
            "likeliest": GREEDY,
            "independent": SamplingParams(seed=seed + 999),
        }
        for name, sampling in kinds.items():
            (found,) = draft_candidates(
                drafter.logits(context)[None], [DraftRow(sampling, context)], num=4, vocab_size=60
            )
            hits[name] += wanted.token in tokens_of(found)
    assert hits["shared"] > 1.05 * hits["likeliest"]
    assert hits["likeliest"] > hits["independent"]
