"""The comparison behind `make verify-lossless`: it finds differences, and excuses near-ties only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
import torch

from bench.near_ties import Tally, compare
from bench.reference import GREEDY, SAMPLED, CacheFreeReference, Choice, Mode, choose, edit, gumbel_row
from paceline.engine.judging import JudgeRequest, Verdict, judge
from paceline.messages import SamplingParams
from paceline.speculation.noise import gumbel, noise_keys
from paceline.speculation.tree import EMPTY_BLOCK

EXPECTED = [1, 2, 3, 4, 5, 6]


class GapReference:
    """Says how close the best two are behind each prefix length."""

    def __init__(self, gaps: dict[int, float]) -> None:
        self.gaps = gaps

    def choice_after(self, tokens: Sequence[int], _mode: Mode, _seed: int, generation_start: int) -> Choice:
        assert generation_start == 1
        return Choice(0, self.gaps.get(len(tokens), 1.0))


def compared(actual: Sequence[int], gaps: dict[int, float], behind: dict[int, Sequence[int]]) -> Tally:
    tally = Tally()
    compare(
        "case",
        EXPECTED,
        actual,
        prompt=[0],
        mode=GREEDY,
        seed=1,
        reference=cast("CacheFreeReference", GapReference(gaps)),
        decode_behind=lambda forced: behind[len(forced)],
        tally=tally,
    )
    return tally


def test_equal_tokens_pass() -> None:
    tally = compared(EXPECTED, {}, {})
    assert (tally.passed, tally.num_tokens, tally.near_ties) == (True, 6, [])


def test_a_clear_difference_is_a_fault() -> None:
    tally = compared([1, 2, 9, 4, 5, 6], {3: 2e-4}, {})
    assert not tally.passed
    assert tally.faults == ["case: token 2 is 9, expected 3; the best two are 2.0e-04 apart"]


def test_a_near_tie_is_counted_and_the_rest_compared_behind_the_expected_token() -> None:
    tally = compared([1, 2, 9, 9, 9, 9], {3: 5e-5}, {3: [4, 5, 6]})
    assert tally.passed
    assert len(tally.near_ties) == 1
    assert tally.num_tokens == 5
    assert not compared([1, 2, 9, 9, 9, 9], {3: 5e-5}, {3: [4, 7, 6]}).passed


def test_a_near_tie_at_the_last_token_ends_the_comparison() -> None:
    assert compared([1, 2, 3, 4, 5, 9], {6: 0.0}, {}).passed


def test_more_near_ties_than_the_bound_fail() -> None:
    tally = compared([9] * 6, dict.fromkeys(range(7), 0.0), {n: [9] * (6 - n) for n in range(7)})
    assert len(tally.near_ties) == 6
    assert not tally.passed
    tally.num_tokens = 30_000
    assert tally.passed


@pytest.mark.parametrize("actual", [EXPECTED[:4], [*EXPECTED, 7]])
def test_another_length_is_a_fault(actual: Sequence[int]) -> None:
    assert not compared(actual, {}, {}).passed


@pytest.mark.parametrize("seed", [0, 7, -1, 2**63, 123456789])
def test_the_reference_s_noise_is_the_documented_one(seed: int) -> None:
    ids = torch.arange(500)
    for position in (0, 1, 8191):
        ours = gumbel(noise_keys([seed], [position]), ids)[0].numpy()
        np.testing.assert_allclose(gumbel_row(seed, position, 500), ours, rtol=1e-12, atol=1e-12)


ENDS = (4, 9)
EVERYTHING = Mode(
    "everything",
    SamplingParams(
        temperature=1.3,
        top_k=40,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 5.0, 8: -100.0, 4: 30.0},
        min_tokens=6,
        stop_token_ids=(11,),
    ),
)


@pytest.mark.parametrize("mode", [GREEDY, SAMPLED, EVERYTHING], ids=lambda mode: mode.name)
def test_the_reference_chooses_what_the_engine_chooses(mode: Mode) -> None:
    generator = torch.Generator().manual_seed(1)
    before = [1, 2, 3, 7, 7, 3, 5, 5, 60]
    chosen: set[int] = set()
    for seed in range(200):
        row = torch.randn(1, 300, generator=generator) * 3
        sampling = replace(mode.sampling, seed=seed)
        request = JudgeRequest(row, EMPTY_BLOCK, before, 5, sampling, 300, ENDS)
        (verdict,) = judge([request])
        assert isinstance(verdict, Verdict)
        edited = edit(row[0].double().numpy(), mode.sampling, before[:5], before[5:], ENDS)
        assert verdict.tokens == (choose(edited, mode, seed, 9).token,)
        chosen.update(verdict.tokens)
    assert len(chosen) > 20
    assert mode is not EVERYTHING or (3 in chosen and not chosen & {*ENDS, 8, 11})
