from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.engine import processors
from paceline.engine.judging import JudgeRequest, Verdict, judge, node_paths
from paceline.engine.processors import PrefixState, SessionRows, Shaping
from paceline.engine.sampling import DraftRow, draft_tokens
from paceline.messages import GREEDY_TEMPERATURE, SamplingParams
from paceline.speculation.noise import keyed_argmax, noise_keys
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.unit.engine.test_sampling import PARAMS
from tests.unit.speculation.law import reference_distribution

TOKENS = st.lists(st.integers(0, 9), max_size=8)


def random_logits(seed: int, rows: int, vocab_size: int, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def distribution(session: SessionRows, row: int) -> torch.Tensor:
    """What the row is sampled from, as the processors leave it."""
    logits, usable = session.processed((row,))
    assert usable.all()
    if session.shaping is None:
        return torch.nn.functional.one_hot(logits[0].argmax(), logits.shape[1]).float()
    if session.shaping.truncates:
        logits = logits.masked_fill(logits < session.shaping.floors(logits).unsqueeze(1), -torch.inf)
    return logits[0].softmax(-1)


class TestAgainstReference:
    @settings(max_examples=100)
    @given(sampling=PARAMS, prompt=TOKENS, output=TOKENS, path=TOKENS, seed=st.integers(0, 10**6))
    def test_distribution(
        self, sampling: SamplingParams, prompt: list[int], output: list[int], path: list[int], seed: int
    ) -> None:
        logits = random_logits(seed, 1, 10)
        session = SessionRows(logits, PrefixState(sampling, prompt + output, len(prompt), (2,)), [path])
        expected = reference_distribution(logits[0].tolist(), sampling, prompt, output + path, (2,))
        torch.testing.assert_close(distribution(session, 0), torch.tensor(expected), atol=1e-5, rtol=1e-4)

    @pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
    @pytest.mark.parametrize(
        "sampling",
        [
            SamplingParams(top_k=50),
            SamplingParams(top_k=700),
            SamplingParams(top_p=0.5),
            SamplingParams(top_p=0.999),
            SamplingParams(top_k=600, top_p=0.7, min_p=0.01),
            SamplingParams(min_p=0.2),
            SamplingParams(temperature=0.4, top_p=0.95),
        ],
    )
    def test_truncation_of_a_large_vocabulary(self, sampling: SamplingParams, spread: float) -> None:
        """Narrow rows are settled on the shortlist, wide ones by sorting: both must be the plain definition."""
        logits = random_logits(1, 1, 3000, spread) + torch.linspace(0, 1e-3, 3000)  # without equal logits
        session = SessionRows(logits, PrefixState(sampling, [1], 1), [()])
        expected = torch.tensor(reference_distribution(logits[0].tolist(), sampling))
        got = distribution(session, 0)
        assert abs(int((got > 0).sum()) - int((expected > 0).sum())) <= 1  # rounding may move the edge by one token
        torch.testing.assert_close(got, expected, atol=2e-5, rtol=0.01)


class TestTruncation:
    def test_equal_logits_stay_or_go_together(self) -> None:
        logits = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 0.0]])
        assert Shaping(top_k=2).floors(logits).tolist() == [2.0]
        assert Shaping(top_p=0.6).floors(logits).tolist() == [2.0]
        assert Shaping(min_p=1.0).floors(logits).tolist() == [3.0]

    def test_best_token_always_stays(self) -> None:
        logits = random_logits(3, 4, 600)
        for shaping in (Shaping(top_k=1), Shaping(top_p=1e-9), Shaping(min_p=1.0), Shaping(0.5, 1, 1e-6, 1.0)):
            assert torch.equal(shaping.floors(logits), logits.amax(-1))

    def test_top_k_beyond_what_is_left(self) -> None:
        logits = torch.tensor([[1.0, -torch.inf, 0.0] + [-torch.inf] * 2000])
        assert Shaping(top_k=5).choose(logits, noise_keys([1], [1])).item() in (0, 2)
        assert Shaping(top_k=10_000).floors(logits).tolist() == [-torch.inf]

    @settings(max_examples=50)
    @given(
        shaping=st.builds(
            Shaping,
            top_k=st.sampled_from([0, 1, 40, 511, 512, 513, 1500]),
            top_p=st.sampled_from([0.3, 0.9, 0.999, 1.0]),
            min_p=st.sampled_from([0.0, 0.001, 0.5]),
        ),
        spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 1e5]),
        seed=st.integers(0, 10**6),
    )
    def test_choice_equals_sampling_the_masked_row(self, shaping: Shaping, spread: float, seed: int) -> None:
        logits = random_logits(seed, 3, 1500, spread)
        keys = noise_keys([seed] * 3, [0, 1, 2])
        masked = logits
        if shaping.truncates:
            masked = logits.masked_fill(logits < shaping.floors(logits).unsqueeze(1), -torch.inf)
        expected = keyed_argmax(masked, keys)
        assert torch.equal(shaping.choose(logits, keys), expected)
        alone = [shaping.choose(logits[row : row + 1], keys[row : row + 1]) for row in range(3)]
        assert torch.equal(torch.cat(alone), expected)

    @pytest.mark.parametrize("shortlist", [1, 2, 7, 64])
    def test_length_of_the_shortlist_does_not_matter(self, shortlist: int, monkeypatch: pytest.MonkeyPatch) -> None:
        logits = random_logits(5, 6, 400, 1.5)
        keys = noise_keys([5] * 6, list(range(6)))
        shapings = [Shaping(top_k=20), Shaping(top_p=0.8), Shaping(top_k=30, top_p=0.5, min_p=0.05), Shaping(min_p=0.1)]
        before = [(s.choose(logits, keys).tolist(), s.floors(logits).tolist()) for s in shapings]
        monkeypatch.setattr(processors, "_SHORTLIST", shortlist)
        assert [(s.choose(logits, keys).tolist(), s.floors(logits).tolist()) for s in shapings] == before

    def test_a_total_that_rounding_made_too_large_ends_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sums of other shapes or threads differ in their last bits: then all tokens together miss the mass."""
        logits = random_logits(4, 2, 700, spread=0.1)
        totals_of = Shaping._totals

        def too_large(shaping: Shaping, rows: torch.Tensor) -> torch.Tensor | None:
            totals = totals_of(shaping, rows)
            return None if totals is None else totals * (1 + 1e-14)

        monkeypatch.setattr(Shaping, "_totals", too_large)
        assert torch.equal(Shaping(top_p=1 - 2**-53).floors(logits), logits.amin(-1))

    def test_rows_do_not_depend_on_their_neighbours(self) -> None:
        logits = torch.cat([random_logits(7, 3, 2000, 4.0), random_logits(8, 3, 2000, 0.2)])
        for shaping in (Shaping(top_p=0.9), Shaping(top_k=300, top_p=0.8), Shaping(min_p=0.3)):
            keys = noise_keys([5] * 6, list(range(6)))
            chosen = [shaping.choose(logits[row : row + 1], keys[row : row + 1]) for row in range(6)]
            assert torch.equal(shaping.choose(logits, keys), torch.cat(chosen))
            together = shaping.floors(logits)
            alone = torch.cat([shaping.floors(logits[row : row + 1]) for row in range(6)])
            assert torch.equal(together, alone)


class TestRowsOfATree:
    @settings(max_examples=50)
    @given(sampling=PARAMS, prompt=TOKENS, output=TOKENS, paths=st.lists(TOKENS, max_size=4), seed=st.integers(0, 99))
    def test_node_rows_equal_plain_rows_bit_by_bit(
        self, sampling: SamplingParams, prompt: list[int], output: list[int], paths: list[list[int]], seed: int
    ) -> None:
        """Processing a node within its tree is processing the plain row after the same tokens."""
        tree = DraftTree.from_paths(paths)
        logits = random_logits(seed, 1 + tree.num_draft_tokens, 10)
        node_rows = SessionRows(logits, PrefixState(sampling, prompt + output, len(prompt), (2,)), node_paths(tree))
        everything, _ = node_rows.processed(range(1 + tree.num_draft_tokens))
        for node, path in enumerate(node_paths(tree)):
            committed = prompt + output + list(path)
            plain = SessionRows(logits[node : node + 1], PrefixState(sampling, committed, len(prompt), (2,)), [()])
            assert torch.equal(node_rows.processed((node,))[0], plain.processed((0,))[0])
            assert torch.equal(everything[node], plain.processed((0,))[0][0])
            assert node_rows.position(node) == plain.position(0) == len(committed)

    @settings(max_examples=60)
    @given(
        sampling=PARAMS,
        output=TOKENS,
        seed=st.integers(0, 99),
        odd=st.sampled_from([0.0, torch.nan, torch.inf, -torch.inf, 3e38]),
    )
    def test_one_row_is_processed_as_several_are(
        self, sampling: SamplingParams, output: list[int], seed: int, odd: float
    ) -> None:
        logits = random_logits(seed, 2, 10)
        logits[1, 3] += odd
        session = SessionRows(logits, PrefixState(sampling, [1, *output], 1, (2,)), [(), (4,)])
        together, usable = session.processed((0, 1))
        for row in range(2):
            alone = session.processed_row(row)
            assert (alone is not None) == bool(usable[row])
            assert alone is None or torch.equal(torch.from_numpy(alone), together[row])

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("penalties", [{}, {"repetition_penalty": 0.5}, {"presence_penalty": -2.0}], ids=str)
    def test_what_the_temperature_makes_infinite_is_no_warning(self, penalties: dict[str, float]) -> None:
        sampling = SamplingParams(temperature=0.5, **penalties)  # type: ignore[arg-type]
        huge, usable = torch.tensor([[3e38, 1.0, 2.0]]), torch.tensor([[-3e38, 1.0, 2.0]])
        for logits, is_usable in ((huge, False), (usable, True)):
            alone = SessionRows(logits, PrefixState(sampling, [1, 2], 1), [()]).processed_row(0)
            assert (alone is not None) == is_usable
            assert alone is None or alone[0] == -math.inf

    def test_positions_count_the_path(self) -> None:
        session = SessionRows(torch.zeros(3, 5), PrefixState(SamplingParams(), [1, 2, 3], 1), [(), (4,), (4, 4)])
        assert [session.position(row) for row in range(3)] == [3, 4, 5]

    def test_untouched_rows_are_not_copied(self) -> None:
        logits = random_logits(1, 2, 10)
        session = SessionRows(logits, PrefixState(SamplingParams(), [1, 2], 1, (2,)), [(), (3,)])
        assert session.processed((1,))[0].data_ptr() == logits[1:].data_ptr()


def choose(logits: torch.Tensor, sampling: SamplingParams, committed: list[int], start: int = 0) -> int:
    vocab_size = logits.shape[1]
    (verdict,) = judge([JudgeRequest(logits, EMPTY_BLOCK, committed, start, sampling, vocab_size, (2,))])
    assert isinstance(verdict, Verdict)
    return verdict.tokens[0]


class TestTemperature:
    @pytest.mark.parametrize("temperature", [0.0, 1e-6, GREEDY_TEMPERATURE, 1e-4])
    def test_next_to_zero_is_greedy(self, temperature: float) -> None:
        for seed in range(30):
            logits = random_logits(seed, 1, 500, 8.0)
            expected = int(logits.argmax())
            for top_p in (1.0, 0.5):
                sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
                assert choose(logits, sampling, [1]) == expected
                (draft,) = draft_tokens(logits, [DraftRow(sampling, [1])], vocab_size=500)
                assert draft is not None
                assert draft.token == expected

    def test_one_threshold(self) -> None:
        assert SamplingParams(temperature=GREEDY_TEMPERATURE * 0.999).greedy
        assert Shaping.of(SamplingParams(temperature=GREEDY_TEMPERATURE * 0.999)) is None
        assert Shaping.of(SamplingParams(temperature=GREEDY_TEMPERATURE)) is not None

    def test_greedy_tie_goes_to_the_lowest_id(self) -> None:
        assert choose(torch.tensor([[0.0, 5.0, 1.0, 5.0]]), SamplingParams(temperature=0.0), [1]) == 1

    def test_greedy_ignores_what_a_drafter_likes(self) -> None:
        """Target {a: .3, b: .5, c: .2}, drafter says a, temperature 0: b."""
        logits = torch.tensor([[0.3, 0.5, 0.2]]).log().repeat(2, 1)
        asked = JudgeRequest(logits, DraftTree.chain([0]), [1], 1, SamplingParams(temperature=0.0), 3)
        assert judge([asked]) == [Verdict((), (1,))]

    def test_seeds_differ(self) -> None:
        logits = torch.zeros(1, 1000)
        assert len({choose(logits, SamplingParams(seed=seed), [1]) for seed in range(50)}) > 40
        assert len({choose(logits, SamplingParams(seed=1), [1] * length) for length in range(1, 51)}) > 40


class TestEdits:
    def test_penalties_count_the_output_only_but_repetition_counts_the_prompt_too(self) -> None:
        logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])

        def processed(committed: list[int], path: tuple[int, ...] = (), **params: float) -> list[float]:
            state = PrefixState(SamplingParams(temperature=1.0, **params), committed, 2)  # type: ignore[arg-type]
            values: list[float] = SessionRows(logits, state, [path]).processed((0,))[0][0].tolist()
            return values

        assert processed([0, 1], repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.5]
        assert processed([0, 1], (3, 3), repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.25]
        assert processed([0, 1], presence_penalty=1.0) == [2.0, -2.0, 1.0, 0.5]
        assert processed([0, 1, 2], (2,), presence_penalty=1.0) == [2.0, -2.0, 0.0, 0.5]
        assert processed([0, 1, 2], (2, 3), frequency_penalty=0.5) == [2.0, -2.0, 0.0, 0.0]

    def test_bias_comes_before_penalties_and_temperature(self) -> None:
        sampling = SamplingParams(temperature=0.5, logit_bias={1: 3.0, 99: 5.0}, repetition_penalty=2.0)
        session = SessionRows(torch.tensor([[1.0, -1.0]]), PrefixState(sampling, [1], 0), [()])
        assert session.processed((0,))[0].tolist() == [[2.0, 2.0]]

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_ends_are_masked_until_min_tokens_exist(self, ignore_eos: bool) -> None:
        """Drafter and target both want the end at 3; position by position it is masked until 8 tokens exist."""
        sampling = SamplingParams(temperature=0.0, min_tokens=8, stop_token_ids=(4,), ignore_eos=ignore_eos)
        logits = torch.tensor([[0.0, 1.0, 9.0, 0.5, 8.0]])
        prompt = [1, 1]
        output: list[int] = []
        while len(output) < 10:
            drafts = [1] * 3 + [2, 2]
            (verdict,) = judge(
                [JudgeRequest(logits.repeat(6, 1), DraftTree.chain(drafts), prompt + output, 2, sampling, 5, (2,))]
            )
            assert isinstance(verdict, Verdict)
            output += verdict.tokens
        assert output[:8] == [1] * 8
        assert set(output[8:]) == {2}

    def test_biased_away_token_never_comes_though_it_is_drafted(self) -> None:
        logits = torch.tensor([[5.0, 1.0, 0.0]]).repeat(2, 1)
        for seed in range(50):
            sampling = SamplingParams(logit_bias={0: -100.0}, seed=seed)
            (verdict,) = judge([JudgeRequest(logits, DraftTree.chain([0]), [1], 1, sampling, 3)])
            assert isinstance(verdict, Verdict)
            assert verdict.accepted_path == ()
            assert verdict.tokens[0] != 0
