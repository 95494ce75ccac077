import functools
import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InvalidArgument, ModelError
from paceline.generation import token_origins
from paceline.messages import DraftProbs, SamplingParams, TokenOrigin
from paceline.speculation.acceptance import RatioVerdicts, Walk, check_draft_probs, match, ratio
from paceline.speculation.noise import NoiseStream, keyed_argmax, uniform
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.unit.speculation.law import P_VALUE, Tokens, ToyModel, fit_p_value, many_keys, total_variation

A, B, C, D, E, F, X = range(1, 8)
DRAWS = 60_000


class TestTextbook:
    """The example that defines a block: five drafts under the pending token."""

    BLOCK = DraftTree.chain([A, B, C, D, E])

    def test_textbook_block_of_five(self) -> None:
        all_right = match(self.BLOCK, [A, B, C, D, E, F].__getitem__)
        assert all_right.tokens == (A, B, C, D, E, F)
        assert all_right.accepted_path == (1, 2, 3, 4, 5)
        assert token_origins(self.BLOCK, all_right.accepted_path) == (TokenOrigin.ACCEPTED,) * 5 + (TokenOrigin.BONUS,)

        fourth_wrong = match(self.BLOCK, [A, B, C, X, E, F].__getitem__)
        assert fourth_wrong.tokens == (A, B, C, X)
        assert fourth_wrong.accepted_path == (1, 2, 3)
        assert token_origins(self.BLOCK, fourth_wrong.accepted_path) == (
            *(TokenOrigin.ACCEPTED,) * 3,
            TokenOrigin.RECOVERED,
        )

    def test_first_wrong(self) -> None:
        assert match(self.BLOCK, [X, B, C, D, E, F].__getitem__) == Walk((), (X,))
        assert token_origins(self.BLOCK, ()) == (TokenOrigin.RECOVERED,)

    def test_empty_block_is_plain_decoding(self) -> None:
        assert match(EMPTY_BLOCK, [A].__getitem__) == Walk((), (A,))
        assert token_origins(EMPTY_BLOCK, ()) == (TokenOrigin.PLAIN,)


@st.composite
def trees(draw: st.DrawFn, vocab_size: int = 4, max_nodes: int = 12) -> DraftTree:
    """Trees of any shape over a few tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    for index in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, index if tokens else 0))
        parent = min(parent, len(tokens))
        taken = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(vocab_size) if t not in taken]
        if free:
            tokens.append(draw(st.sampled_from(free)))
            parents.append(parent)
    return DraftTree(tuple(tokens), tuple(parents))


class TestMatch:
    @given(trees(), st.lists(st.integers(0, 3), min_size=13, max_size=13))
    def test_follows_its_samples(self, tree: DraftTree, samples: list[int]) -> None:
        walk = match(tree, samples.__getitem__)
        assert walk.tokens == tuple(samples[node] for node in walk.visited)
        assert len(walk.tokens) == len(walk.accepted_path) + 1
        for parent, child in zip(walk.visited, walk.accepted_path, strict=False):
            assert tree.parents[child - 1] == parent
            assert tree.token_of(child) == samples[parent]
        last = walk.visited[-1]
        assert (last, samples[last]) not in set(zip(tree.parents, tree.tokens, strict=True))

    @given(trees(), st.integers())
    def test_output_is_the_samplers_own_whatever_was_drafted(self, tree: DraftTree, seed: int) -> None:
        """With a sampler that depends on the prefix only, the tokens are a prefix of what it writes by itself."""

        def sampler(prefix: Tokens) -> int:
            return random.Random(f"{seed} {prefix}").randrange(4)

        plain: Tokens = ()
        for _ in range(14):
            plain = (*plain, sampler(plain))
        walk = match(tree, lambda node: sampler(tuple(tree.token_of(n) for n in tree.ancestors(node)[1:])))
        assert walk.tokens == plain[: len(walk.tokens)]

    @given(trees(), st.lists(st.integers(0, 3), min_size=13, max_size=13))
    def test_samples_only_visited_nodes_and_each_once(self, tree: DraftTree, samples: list[int]) -> None:
        asked: list[int] = []

        def sample_at(node: int) -> int:
            asked.append(node)
            return samples[node]

        assert match(tree, sample_at).visited == tuple(asked)

    @given(trees(), st.lists(st.integers(0, 3), min_size=13, max_size=13))
    def test_origins_fit_the_walk(self, tree: DraftTree, samples: list[int]) -> None:
        walk = match(tree, samples.__getitem__)
        origins = token_origins(tree, walk.accepted_path)
        assert len(origins) == len(walk.tokens)
        assert origins[:-1] == (TokenOrigin.ACCEPTED,) * len(walk.accepted_path)
        is_leaf = not tree.children()[walk.visited[-1]]
        expected = TokenOrigin.PLAIN if not tree.tokens else TokenOrigin.BONUS if is_leaf else TokenOrigin.RECOVERED
        assert origins[-1] is expected


def target_probs_at(target_probs: torch.Tensor) -> Callable[[int], torch.Tensor]:
    return lambda row: target_probs[:, row]


def one_hot(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.nn.functional.one_hot(tokens, vocab_size).float()


@functools.lru_cache
def keys_of_all(draws: int, position: int, stream: NoiseStream) -> torch.Tensor:
    return many_keys(draws, position, stream)


class ChainLaw:
    """Draws of one ratio step on a chain of two drafts, continued plainly to three tokens, against the exact law."""

    def __init__(self, target: ToyModel, drafter: ToyModel, *, draws: int = DRAWS, temperature: float = 1.0) -> None:
        self.target, self.drafter, self.draws = target, drafter, draws
        self.sampling = SamplingParams(temperature=temperature)
        self.vocab_size = target.vocab_size
        self.generator = torch.Generator().manual_seed(1)

    def keys(self, position: int, stream: NoiseStream) -> torch.Tensor:
        return keys_of_all(self.draws, position, stream)

    def probs(self, model: ToyModel, prefixes: torch.Tensor) -> torch.Tensor:
        """Distribution after each prefix. # [draws, n] -> [draws, vocab_size]."""
        length = prefixes.shape[1]
        every_prefix = itertools.product(range(self.vocab_size), repeat=length)
        table = torch.stack([model.logits(prefix) for prefix in every_prefix])
        code = (prefixes * torch.tensor([self.vocab_size ** (length - 1 - i) for i in range(length)])).sum(1).long()
        return (table / self.sampling.temperature).softmax(-1)[code]

    def drafts(self, *, greedy: bool, stream: NoiseStream) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.empty(self.draws, 0, dtype=torch.int64)
        rows = []
        for position in range(2):
            probs = self.probs(self.drafter, tokens)
            token = probs.argmax(-1) if greedy else keyed_argmax(probs.log(), self.keys(position, stream))
            rows.append(one_hot(token, self.vocab_size) if greedy else probs)
            tokens = torch.cat([tokens, token.unsqueeze(1)], dim=1)
        return tokens, torch.stack(rows, dim=1)

    def outcome_counts(
        self, drafts: torch.Tensor, draft_probs: torch.Tensor, residual_stream: NoiseStream = NoiseStream.RATIO_RESIDUAL
    ) -> list[int]:
        """How often each of the vocab_size**3 first three tokens came out."""
        target_probs = torch.stack([self.probs(self.target, drafts[:, :n]) for n in range(3)], dim=1)
        uniforms = torch.cat([uniform(self.keys(n, NoiseStream.RATIO_ACCEPT), torch.tensor([0])) for n in range(2)], 1)
        verdicts = ratio(target_probs_at(target_probs), draft_probs, drafts, uniforms)
        last_tokens = self.last_tokens(verdicts, residual_stream)
        code = torch.zeros(self.draws, dtype=torch.int64)
        for accepted in range(3):
            chosen = verdicts.num_accepted == accepted
            tokens = torch.cat([drafts[chosen, :accepted], last_tokens[chosen].unsqueeze(1)], dim=1)
            while tokens.shape[1] < 3:
                probs = self.probs(self.target, tokens)
                tokens = torch.cat([tokens, torch.multinomial(probs, 1, generator=self.generator)], dim=1)
            code[chosen] = tokens @ torch.tensor([self.vocab_size**2, self.vocab_size, 1])
        counts: list[int] = torch.bincount(code, minlength=self.vocab_size**3).tolist()
        return counts

    def last_tokens(self, verdicts: RatioVerdicts, stream: NoiseStream) -> torch.Tensor:
        keys = torch.stack([self.keys(position, stream) for position in range(3)])
        return keyed_argmax(verdicts.last_weights.log().float(), keys.gather(0, verdicts.num_accepted.unsqueeze(0))[0])

    def exact(self) -> list[float]:
        return list(self.target.law(self.sampling, 3).values())


TARGET = ToyModel(4, seed=11)


class TestRatioLaw:
    @pytest.mark.parametrize("blur", [0.3, 1.5, 6.0])
    @pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
    def test_law_is_the_targets(self, blur: float, greedy: bool) -> None:
        law = ChainLaw(TARGET, TARGET.blurred(blur))
        drafts = law.drafts(greedy=greedy, stream=NoiseStream.RATIO_DRAFT)
        counts = law.outcome_counts(*drafts)
        assert fit_p_value(counts, law.exact()) > P_VALUE
        assert total_variation(counts, law.exact()) < 0.02

    def test_law_at_another_temperature(self) -> None:
        law = ChainLaw(TARGET, TARGET.blurred(1.5), temperature=0.6)
        drafts = law.drafts(greedy=False, stream=NoiseStream.RATIO_DRAFT)
        assert fit_p_value(law.outcome_counts(*drafts), law.exact()) > P_VALUE

    def test_disjoint_supports(self) -> None:
        target = torch.tensor([0.5, 0.5, 0.0, 0.0]).repeat(DRAWS, 2, 1)
        draft = torch.tensor([0.0, 0.0, 0.25, 0.75]).repeat(DRAWS, 1, 1)
        verdicts = ratio(target_probs_at(target), draft, torch.full((DRAWS, 1), 3), torch.zeros(DRAWS, 1))
        assert not verdicts.num_accepted.any()
        assert torch.equal(verdicts.last_weights, target[:, 0].double())

    def test_draft_that_is_the_target_is_always_accepted(self) -> None:
        law = ChainLaw(TARGET, TARGET)
        tokens, draft_probs = law.drafts(greedy=False, stream=NoiseStream.RATIO_DRAFT)
        target_probs = torch.cat([draft_probs, draft_probs[:, :1]], dim=1)
        uniforms = torch.rand(DRAWS, 2, generator=law.generator)
        verdicts = ratio(target_probs_at(target_probs), draft_probs, tokens, uniforms)
        assert (verdicts.num_accepted == 2).all()
        assert torch.equal(verdicts.last_weights, target_probs[:, 2].double())


class TestBiasedVariants:
    """Rules that look right and are not: the same test must tell them from the right one."""

    def test_noise_shared_with_the_drafter_is_biased_under_ratio(self) -> None:
        law = ChainLaw(TARGET, TARGET.blurred(1.5))
        drafts = law.drafts(greedy=False, stream=NoiseStream.SAMPLE)
        shared = law.outcome_counts(*drafts, residual_stream=NoiseStream.SAMPLE)
        assert fit_p_value(shared, law.exact()) < 1e-9
        independent = law.outcome_counts(*drafts, residual_stream=NoiseStream.RATIO_RESIDUAL)
        assert fit_p_value(independent, law.exact()) > P_VALUE

    def test_argmax_drafts_with_softmax_probabilities_are_biased(self) -> None:
        law = ChainLaw(TARGET, TARGET.blurred(1.5))
        tokens, _ = law.drafts(greedy=True, stream=NoiseStream.RATIO_DRAFT)
        softmax = torch.stack([law.probs(law.drafter, tokens[:, :n]) for n in range(2)], dim=1)
        counts = law.outcome_counts(tokens, softmax)
        assert fit_p_value(counts, law.exact()) < 1e-9
        assert total_variation(counts, law.exact()) > 0.05

    def test_truncated_drafts_with_untruncated_probabilities_are_biased(self) -> None:
        law = ChainLaw(TARGET, TARGET.blurred(1.5))
        tokens = torch.empty(law.draws, 0, dtype=torch.int64)
        sent, drawn = [], []
        for position in range(2):
            probs = law.probs(law.drafter, tokens)
            kept = probs * (probs >= probs.topk(2, dim=-1).values[:, -1:])
            sent.append(probs)
            drawn.append(kept / kept.sum(-1, keepdim=True))
            token = keyed_argmax(drawn[-1].log(), law.keys(position, NoiseStream.RATIO_DRAFT))
            tokens = torch.cat([tokens, token.unsqueeze(1)], dim=1)
        biased = law.outcome_counts(tokens, torch.stack(sent, dim=1))
        assert fit_p_value(biased, law.exact()) < 1e-9
        assert total_variation(biased, law.exact()) > 0.03
        right = law.outcome_counts(tokens, torch.stack(drawn, dim=1))
        assert fit_p_value(right, law.exact()) > P_VALUE


def judge_one(
    target: list[list[float]], draft: list[list[float]], tokens: list[int], uniforms: list[float]
) -> tuple[int, int]:
    """Accepted drafts and the likeliest last token."""
    verdicts = ratio(
        target_probs_at(torch.tensor([target])),
        torch.tensor([draft]).reshape(1, len(draft), len(target[0])),
        torch.tensor([tokens], dtype=torch.int64),
        torch.tensor([uniforms]),
    )
    return int(verdicts.num_accepted[0]), int(verdicts.last_weights[0].argmax())


HALF = [0.5, 0.5, 0.0]
SURE = [1.0, 0.0, 0.0]
NAN = float("nan")


class TestRatioGuards:
    def test_zero_uniform_cannot_accept_what_the_target_excludes(self) -> None:
        assert judge_one([HALF, HALF], [[0.0, 0.0, 1.0]], [2], [0.0])[0] == 0

    def test_uniform_next_to_one_cannot_reject_what_both_are_sure_of(self) -> None:
        assert judge_one([SURE, HALF], [SURE], [0], [1 - 2**-24])[0] == 1

    def test_without_drafts_the_bonus_is_the_targets(self) -> None:
        assert judge_one([[0.1, 0.7, 0.2]], [], [], []) == (0, 1)

    def test_without_residual_the_target_takes_its_place(self) -> None:
        """Rounding can reject although target and draft agree: u * draft < target fails only when they are equal."""
        target = [0.3, 0.6, 0.1]
        assert judge_one([target, SURE], [target], [1], [1.0]) == (0, 1)

    def test_stops_at_the_first_rejection(self) -> None:
        reject, accept = [0.0, 1.0, 0.0], SURE
        num_accepted, token = judge_one([accept, reject, accept, accept], [SURE, SURE, SURE], [0, 0, 0], [0.5] * 3)
        assert (num_accepted, token) == (1, 1)

    def test_rows_that_no_chain_comes_to_are_not_asked_for(self) -> None:
        asked: list[int] = []

        def rows(row: int) -> torch.Tensor:
            asked.append(row)
            return torch.tensor([[[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]][row]] * 2)

        sure_of_0 = torch.tensor([[[1.0, 0.0], [1.0, 0.0]]] * 2)
        ratio(rows, sure_of_0, torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2), 0.4))
        assert asked == [0]

    @pytest.mark.parametrize("row", [[NAN, 0.5, 0.5], [0.5, 0.6, 0.5], [-0.5, 1.0, 0.5], [0.0, 0.0, 0.0]])
    def test_bad_target_row_is_a_model_error(self, row: list[float]) -> None:
        with pytest.raises(ModelError, match="not a distribution in 1 rows"):
            judge_one([HALF, row], [HALF], [0], [0.5])
        assert judge_one([[0.0, 1.0, 0.0], row], [HALF], [0], [0.5]) == (0, 1)

    def test_sums_may_be_off_by_rounding(self) -> None:
        assert judge_one([[0.5, 0.5005, 0.0], HALF], [[0.4995, 0.5, 0.0]], [0], [0.5])[0] == 1


GOOD = DraftProbs((0, 2), (0.25, 0.75))


class TestWhatIsSentWithDrafts:
    @pytest.mark.parametrize(
        ("probs", "fault"),
        [
            (DraftProbs((0, 1), (NAN, 0.5)), "are not a distribution"),
            (DraftProbs((0, 1), (0.6, 0.5)), "are not a distribution"),
            (DraftProbs((0, 1), (1.5, -0.5)), "are not a distribution"),
            (DraftProbs((0, 1), (math.inf, 0.0)), "are not a distribution"),
            (DraftProbs((), ()), "are not a distribution"),
            (DraftProbs((0, 1), (0.5,)), "are 1 for 2 ids"),
            (DraftProbs((0, 1, 1), (0.5, 0.25, 0.25)), "name an id twice"),
            (DraftProbs((0, 3), (0.5, 0.5)), r"name an id outside \[0, 3\)"),
            (DraftProbs((-1, 0), (0.5, 0.5)), r"name an id outside \[0, 3\)"),
            (DraftProbs((1, 2), (0.5, 0.5)), "give its token 0 no probability"),
            (DraftProbs((0, 2), (0.0, 1.0)), "give its token 0 no probability"),
        ],
    )
    def test_bad_probabilities_are_refused_by_name(self, probs: DraftProbs, fault: str) -> None:
        with pytest.raises(InvalidArgument, match=f"draft 1 {fault}") as caught:
            check_draft_probs([GOOD, probs], [2, 0], 3)
        assert caught.value.field == "draft_probs"

    def test_too_few_are_refused(self) -> None:
        with pytest.raises(InvalidArgument, match="1 draft_probs for 2 drafts"):
            check_draft_probs([GOOD], [2, 0], 3)

    def test_what_was_cut_off_is_looked_at_too(self) -> None:
        """A chain must not be cut where its own draw left the vocabulary."""
        check_draft_probs([GOOD, DraftProbs((1,), (1.0,))], [2], 3)
        with pytest.raises(InvalidArgument, match="draft 1 name an id outside"):
            check_draft_probs([GOOD, DraftProbs((1, 7), (0.5, 0.5))], [2], 3)

    def test_sums_may_be_off_by_rounding(self) -> None:
        check_draft_probs([DraftProbs((0, 1), (0.4995, 0.5))], [0], 3)
