import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.speculation import noise
from paceline.speculation.noise import (
    NoiseStream,
    gumbel,
    keyed_argmax,
    keyed_argmax_brute_force,
    keyed_argmax_of,
    noise_key,
    noise_keys,
    uniform,
)
from tests.unit.speculation.law import P_VALUE, fit_p_value, ks_p_value, many_keys, pair_p_value, uniform_p_value


class TestKnownAnswers:
    """Sessions outlive processes and versions: the same key must give the same noise for ever."""

    def test_hash_is_splitmix64(self) -> None:
        published = [
            6457827717110365317,
            3203168211198807973,
            9817491932198370423,
            4593380528125082431,
            16408922859458223821,
        ]
        got = uniform(torch.tensor([1234567]), torch.arange(5))[0]
        assert got.tolist() == [((value >> 12) + 0.5) / 2**52 for value in published]

    def test_keys(self) -> None:
        assert noise_key(0, 0) == -2152535657050944081
        assert noise_key(1, 0) == -4616330145664149646
        assert noise_key(0, 1) == 7960286522194355700
        assert noise_key(-1, 7) == -4166297692289072321
        assert noise_key(2**63, 2**40) == 1890026567520093238
        assert noise_key(5, 9, NoiseStream.RATIO_DRAFT) == -7240752336831784177
        assert noise_key(5, 9, NoiseStream.RATIO_ACCEPT) == -439783804597738812
        assert noise_key(5, 9, NoiseStream.RATIO_RESIDUAL) == -2043168908922889888

    def test_gumbel(self) -> None:
        keys = noise_keys([42, -42], [3, 2**31])
        got = gumbel(keys, torch.tensor([0, 1, 49151, 2**31 - 1]))
        expected = torch.tensor(
            [
                [-1.2139149050255746, 1.0135786763452517, 0.4944769089869352, -0.5552925352779816],
                [0.6191963800021616, 0.5469607065945506, -0.808961950332521, 2.9847175541390696],
            ],
            dtype=torch.float64,
        )
        torch.testing.assert_close(got, expected, rtol=1e-14, atol=1e-14)

    def test_sampled_tokens(self) -> None:
        logits = torch.linspace(-2, 2, 1000).repeat(8, 1)
        assert keyed_argmax(logits, noise_keys([7] * 8, list(range(8)))).tolist() == [
            405,
            404,
            578,
            691,
            964,
            592,
            413,
            792,
        ]


class TestKeys:
    def test_seed_counts_modulo_2_64(self) -> None:
        assert noise_key(-1, 3) == noise_key(2**64 - 1, 3)
        assert noise_key(-(2**63), 3) == noise_key(2**63, 3)
        assert noise_key(2**64 + 5, 3) == noise_key(5, 3)

    def test_extreme_seeds_give_noise(self) -> None:
        keys = noise_keys([-(2**63), 2**63 - 1, 2**64 - 1, -1, 0], [0, 1, 2**31, 2**40, 10**12])
        values = gumbel(keys, torch.arange(1000))
        assert values.isfinite().all()
        assert len(set(values.flatten().tolist())) == 5000

    def test_no_two_of_a_grid_are_equal(self) -> None:
        keys = [noise_key(s, p, stream) for s in range(-50, 50) for p in range(100) for stream in NoiseStream]
        assert len(set(keys)) == len(keys)

    def test_vectors_agree_with_single_keys(self) -> None:
        assert noise_keys([3, -9], [4, 5]).tolist() == [noise_key(3, 4), noise_key(-9, 5)]
        stream = NoiseStream.RATIO_DRAFT
        assert noise_keys([3], [4], stream=stream).tolist() == [noise_key(3, 4, stream)]

    @pytest.mark.parametrize("stream", NoiseStream)
    def test_the_keys_that_statistics_are_made_with_are_these(self, stream: NoiseStream) -> None:
        for first_seed, position in ((-500, 0), (0, 7), (10_000_000, 2**40), (2**63 - 1001, 3)):
            seeds = range(first_seed, first_seed + 1000)
            expected = noise_keys(seeds, [position] * 1000, stream=stream)
            assert torch.equal(many_keys(1000, position, stream, first_seed), expected)

    def test_lengths_must_agree(self) -> None:
        with pytest.raises(ValueError, match="argument 2 is shorter"):
            noise_keys([1, 2], [3])


class TestStatistics:
    def test_uniform_over_ids(self) -> None:
        values = uniform(noise_keys([0], [0]), torch.arange(200_000))
        assert ks_p_value(values, "uniform") > P_VALUE
        assert uniform_p_value(values, 1024) > P_VALUE

    @pytest.mark.parametrize("by", ["seed", "position"])
    def test_uniform_over_keys(self, by: str) -> None:
        many, one = list(range(100_000)), [11] * 100_000
        keys = noise_keys(many, one) if by == "seed" else noise_keys(one, many)
        values = uniform(keys, torch.tensor([17]))
        assert ks_p_value(values, "uniform") > P_VALUE
        assert uniform_p_value(values, 1024) > P_VALUE

    def test_gumbel_law(self) -> None:
        values = gumbel(noise_keys([5], [5]), torch.arange(200_000))
        assert ks_p_value(values, "gumbel_r") > P_VALUE

    def test_winning_tail_is_resolved(self) -> None:
        """The largest of many values, which is what wins, has its own exact law."""
        best = gumbel(noise_keys([1] * 400, list(range(400))), torch.arange(5000)).amax(-1) - math.log(5000)
        assert ks_p_value(best, "gumbel_r") > P_VALUE

    @pytest.mark.parametrize("distance", [1, 2, 64, 2**16, 2**32])
    def test_neighbouring_seeds_are_independent(self, distance: int) -> None:
        seeds = list(range(400))
        ids = torch.arange(500)
        here = uniform(noise_keys(seeds, [9] * 400), ids)
        there = uniform(noise_keys([s + distance for s in seeds], [9] * 400), ids)
        assert pair_p_value(here, there) > P_VALUE

    @pytest.mark.parametrize("distance", [1, 2, 64, 1024])
    def test_neighbouring_positions_are_independent(self, distance: int) -> None:
        positions = list(range(400))
        ids = torch.arange(500)
        here = uniform(noise_keys([9] * 400, positions), ids)
        there = uniform(noise_keys([9] * 400, [p + distance for p in positions]), ids)
        assert pair_p_value(here, there) > P_VALUE

    @pytest.mark.parametrize("distance", [1, 2, 64, 1024])
    def test_neighbouring_ids_are_independent(self, distance: int) -> None:
        keys = noise_keys([9] * 400, list(range(400)))
        ids = torch.arange(500)
        assert pair_p_value(uniform(keys, ids), uniform(keys, ids + distance)) > P_VALUE

    def test_seed_and_position_do_not_trade_places(self) -> None:
        """A seed one higher at a position one lower is another stream, and so is an id in place of a position."""
        index = list(range(400))
        ids = torch.arange(500)
        here = uniform(noise_keys(index, [i + 1 for i in index]), ids)
        assert pair_p_value(here, uniform(noise_keys([i + 1 for i in index], index), ids)) > P_VALUE
        assert pair_p_value(here[:, 1:], here[:, :-1]) > P_VALUE

    def test_streams_are_independent(self) -> None:
        seeds, positions, ids = list(range(400)), [3] * 400, torch.arange(500)
        values = [uniform(noise_keys(seeds, positions, stream=stream), ids) for stream in NoiseStream]
        for index, left in enumerate(values):
            for right in values[index + 1 :]:
                assert pair_p_value(left, right) > P_VALUE

    def test_every_bit_is_fair_and_flips_with_every_key_bit(self) -> None:
        bits = torch.arange(52)

        def hash_bits(seeds: list[int]) -> torch.Tensor:
            whole = (uniform(noise_keys(seeds, [3] * len(seeds)), torch.tensor([5])) * 2**52 - 0.5).long()
            return (whole >> bits) & 1

        base = hash_bits(list(range(4000)))
        limit = 5.5 * math.sqrt(4000) / 2  # of 52 * 16 binomial counts none should lie outside
        assert ((base.sum(0) - 2000).abs() < limit).all()
        for flipped in range(0, 64, 4):
            changed = hash_bits([seed ^ (1 << flipped) for seed in range(4000)]) ^ base
            assert ((changed.sum(0) - 2000).abs() < limit).all()


class TestShape:
    def test_noise_of_a_token_does_not_depend_on_its_batch(self) -> None:
        keys = noise_keys([1, 2, 3], [4, 5, 6])
        ids = torch.arange(1000)
        whole = uniform(keys, ids)
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
        for row in range(3):
            assert torch.equal(uniform(keys[row : row + 1], ids[order])[0], whole[row, order])
        per_row = torch.stack([order[:7], order[7:14], order[14:21]])
        assert torch.equal(uniform(keys, per_row), whole.gather(1, per_row))


class TestKeyedArgmax:
    @given(
        seed=st.integers(-(2**63), 2**63 - 1),
        scale=st.sampled_from([0.0, 0.01, 1.0, 4.0, 30.0, 1e4, 1e6]),
        vocab_size=st.sampled_from([1, 2, 7, 8, 9, 16, 100, 3001]),
        masked=st.floats(0, 1),
    )
    def test_equals_brute_force(self, seed: int, scale: float, vocab_size: int, masked: float) -> None:
        generator = torch.Generator().manual_seed(seed & 0xFFFF)
        logits = torch.randn(4, vocab_size, generator=generator) * scale
        drop = torch.rand(4, vocab_size, generator=generator) < masked
        drop[torch.arange(4), torch.randint(vocab_size, (4,), generator=generator)] = False
        logits = logits.masked_fill(drop, -torch.inf)
        keys = noise_keys([seed] * 4, list(range(4)))
        assert torch.equal(keyed_argmax(logits, keys), keyed_argmax_brute_force(logits, keys))

    @pytest.mark.parametrize("scale", [0.0, 1.0, 3.0])
    def test_equals_brute_force_on_a_real_vocabulary(self, scale: float) -> None:
        logits = torch.randn(20, 49_152, generator=torch.Generator().manual_seed(1)) * scale
        keys = noise_keys([3] * 20, list(range(20)))
        assert torch.equal(keyed_argmax(logits, keys), keyed_argmax_brute_force(logits, keys))

    def test_rows_that_the_bound_cannot_settle_are_done_in_full(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(noise, "_NEAR", 1.0)  # what is left out may score as high as what is looked at
        logits = torch.randn(30, 500, generator=torch.Generator().manual_seed(2))
        keys = noise_keys([3] * 30, list(range(30)))
        assert torch.equal(keyed_argmax(logits, keys), keyed_argmax_brute_force(logits, keys))

    def test_lists_its_candidates_in_any_order(self) -> None:
        logits = torch.randn(6, 64, generator=torch.Generator().manual_seed(3))
        keys = noise_keys([8] * 6, list(range(6)))
        order = torch.randperm(64, generator=torch.Generator().manual_seed(4)).repeat(6, 1)
        assert torch.equal(keyed_argmax_of(logits.gather(1, order), order, keys), keyed_argmax(logits, keys))

    def test_lowest_id_wins_a_tie(self) -> None:
        keys = noise_keys([8] * 6, list(range(6)))
        ids = torch.tensor([[9, 4, 30, 7]]).repeat(6, 1)
        assert keyed_argmax_of(-gumbel(keys, ids), ids, keys).tolist() == [4] * 6

    def test_does_not_change_its_input(self) -> None:
        logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(3))
        before = logits.clone()
        keyed_argmax(logits, noise_keys([1] * 3, [0, 1, 2]))
        assert torch.equal(logits, before)

    def test_no_rows(self) -> None:
        assert keyed_argmax(torch.empty(0, 10), torch.empty(0, dtype=torch.int64)).tolist() == []

    def test_law(self) -> None:
        draws = 100_000
        probs = torch.tensor([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.01, 0.006, 0.004])
        chosen = keyed_argmax(probs.log().repeat(draws, 1), many_keys(draws, 77))
        counts = torch.bincount(chosen, minlength=9).tolist()
        assert fit_p_value(counts, probs.tolist()) > P_VALUE
