from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine import near_best
from paceline.engine.near_best import NearBest, choose_near_best
from paceline.engine.processors import PrefixState, SessionRows, Shaping
from paceline.engine.sampling import sample
from paceline.messages import SamplingParams
from paceline.speculation.noise import keyed_argmax_brute_force, noise_keys


def random_row(seed: int, size: int, spread: float) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread


def chosen_from_all(row: torch.Tensor, shaping: Shaping, keys: torch.Tensor) -> int:
    """The choice by its definition: noise on every token that truncation leaves."""
    rows = row.unsqueeze(0)
    kept = rows.masked_fill(rows < shaping.floors(rows).unsqueeze(1), -torch.inf)
    return int(keyed_argmax_brute_force(kept, keys))


def test_a_head_is_the_few_best_tokens() -> None:
    row = random_row(1, 3000, 5.0)
    shortlist = NearBest.of(row, 0.9, 0.0)
    assert shortlist is not None
    assert 10 < len(shortlist.ids) < 500
    assert shortlist.logits.sort(descending=True).values.tolist() == row.topk(len(shortlist.ids)).values.tolist()
    assert torch.equal(shortlist.logits, row[shortlist.ids])


@settings(max_examples=40)
@given(
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 1.0]),
    size=st.sampled_from([3, 200, 1500]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    equals=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_what_heads_settle_is_the_choice_of_the_whole_row(
    top_p: float, min_p: float, size: int, spread: float, equals: bool, seed: int
) -> None:
    rows = [random_row(seed + index, size, spread) for index in range(3)]
    rows = [row.round() for row in rows] if equals else rows
    keys = noise_keys([seed] * 3, [4, 5, 6])
    shortlists = {
        index: shortlist for index, row in enumerate(rows) if (shortlist := NearBest.of(row, top_p, min_p)) is not None
    }
    for (index, shortlist), token in zip(
        shortlists.items(),
        choose_near_best(list(shortlists.values()), keys[list(shortlists)]) if shortlists else (),
        strict=True,
    ):
        assert token in (None, chosen_from_all(rows[index], Shaping(1.0, 0, top_p, min_p), keys[index : index + 1]))
        assert choose_near_best([shortlist], keys[index : index + 1]) == [token]


class TestWhereAHeadDoesNotDo:
    def test_nothing_is_cut_off(self) -> None:
        assert NearBest.of(random_row(1, 100, 3.0), 1.0, 0.0) is None

    def test_too_little_mass_is_near_the_best(self) -> None:
        row = torch.cat([torch.zeros(1), torch.full((40_000,), -9.5)])  # 1 against 3
        assert NearBest.of(row, 0.3, 0.0) is None
        assert NearBest.of(row, 0.2, 0.0) is not None

    def test_too_many_tokens_are_near_the_best(self) -> None:
        assert NearBest.of(torch.zeros(5000), 0.9, 0.0) is None

    def test_min_p_reaches_further_down(self) -> None:
        row = random_row(2, 1000, 4.0)
        assert NearBest.of(row, 1.0, 1e-4) is None
        assert NearBest.of(row, 1.0, 1e-2) is not None

    @pytest.mark.parametrize("steps", [-3, 0, 3])
    def test_mass_that_rounding_could_move_settles_nothing(self, steps: int) -> None:
        """Two equal tokens and a third: with top_p next to two thirds it is open whether the third stays."""
        row = torch.tensor([0.0, 0.0, 0.0, -8.5])
        top_p = 2 / (3 + 2.7182818284590452**-8.5) + steps * 2.0**-23
        shortlist = NearBest.of(row + torch.tensor([0.0, 0.0, -1e-6, 0.0]), top_p, 0.0)
        assert shortlist is not None
        tokens = [choose_near_best([shortlist], noise_keys([seed], [0]))[0] for seed in range(60)]
        assert set(tokens) == {0, 1, None}


def test_sampler_takes_the_whole_row_where_a_shortlist_settles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows of several requests at once; the same tokens with shortlists, without, and with doubt everywhere."""
    params = [
        SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, seed=seed)
        for seed, (temperature, top_p, min_p, top_k) in enumerate(
            itertools.product((0.0, 0.7, 1.5), (0.6, 0.95, 1.0), (0.0, 0.02), (0, 9))
        )
    ]
    sessions = [
        SessionRows(
            torch.stack([random_row(index, 900, 4.0), random_row(index + 99, 900, 1.0)]),
            PrefixState(sampling, [1, 2, 3], 1),
            [(), (5,)],
        )
        for index, sampling in enumerate(params)
    ]
    batch = [(session, (0, 1)) for session in sessions]
    tokens = sample(batch)
    assert tokens == [sample([(session, (0,))])[0] + sample([(session, (1,))])[0] for session in sessions]
    for session, chosen in zip(sessions, tokens, strict=True):
        for row, token in enumerate(chosen):
            logits, _ = session.processed((row,))
            keys = noise_keys([session.state.sampling.seed], [session.position(row)])
            expected = int(logits.argmax())
            if session.shaping is not None:
                expected = chosen_from_all(logits[0], session.shaping, keys)
            assert token == expected
    for name, value in (("_MAX_TOKENS", 0), ("_FLOAT32_STEP", 1e-3)):
        with monkeypatch.context() as patch:
            patch.setattr(near_best, name, value)
            assert sample(batch) == tokens
