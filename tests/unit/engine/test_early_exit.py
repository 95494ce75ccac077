"""Passes through the first layers on a sequence's own pages, and the passes that go on from there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config

from paceline.engine.features import FeatureTaps
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.kv.sequence import page_runs
from paceline.engine.loader import load_model
from paceline.engine.native.decoder import DecoderLayer, PassState
from paceline.engine.native.early_exit import ExitStep
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.pass_plan import MAX_RUNS
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerOptions
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, WINDOW, Architecture, write_model

NUM_LAYERS, PAGE_TOKENS = 3, 4
TEXT = tuple((7 * index + 3) % VOCAB_SIZE for index in range(40))
OTHER = tuple((5 * index + 2) % VOCAB_SIZE for index in range(30))
LLAMA = SERVED["llama"].arguments
SHAPES = {
    "llama": SERVED["llama"],
    "llama_tied": Architecture(LlamaConfig, {**LLAMA, "tie_word_embeddings": True}),
    "qwen2_windows": Architecture(
        Qwen2Config,
        {
            **LLAMA,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "qwen3": SERVED["qwen3"],
    "mistral_window": SERVED["mistral_window"],
}


@dataclass
class Pair:
    """A runner and the stock model of the same weights."""

    runner: NativeRunner
    stock: LlamaForCausalLM

    @torch.inference_mode()
    def expected(self, tokens: Sequence[int], num_layers: int = NUM_LAYERS) -> torch.Tensor:
        """Logits of all tokens after the first layers, the norm and the head, without any cache."""
        result = self.stock.model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
        states = result.hidden_states
        normed = states[-1] if num_layers == NUM_LAYERS else self.stock.model.norm(states[num_layers])
        logits: torch.Tensor = self.stock.lm_head(normed)[0]
        return logits

    def fill(self, kv: SequenceKV, tokens: Sequence[int]) -> None:
        """Rows of all layers."""
        kv.reserve(len(tokens))
        self.runner.forward([SequencePass(kv, tuple(tokens))])
        kv.commit(len(tokens))

    def draft(self, fed: Sequence[tuple[SequenceKV, Sequence[int]]], num_layers: int) -> list[torch.Tensor]:
        """Feeds tokens one by one, side by side; the logits of each sequence # [tokens, vocab_size]."""
        rows = []
        for index in range(len(fed[0][1])):
            for kv, _ in fed:
                kv.reserve(index + 1)
            rows.append(self.runner.forward_first([ExitStep(kv, tokens[index]) for kv, tokens in fed], num_layers))
            self.runner.pool.check_integrity()
        return list(torch.stack(rows, dim=1))

    def verify(
        self, parts: Sequence[tuple[SequenceKV, Sequence[int], DraftTree]]
    ) -> list[torch.Tensor]:  # [chain + tree, vocab_size] each
        """One pass with the logits of everything that it feeds."""
        passes = []
        for kv, chain, tree in parts:
            passes.append(SequencePass(kv, tuple(chain), tree, len(chain) + tree.num_draft_tokens))
            kv.reserve(passes[-1].num_tokens)
        return self.runner.forward(passes)


def pair(folder: Path, taps: FeatureTaps | None = None) -> Pair:
    stock = cast("LlamaForCausalLM", AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager"))
    runner = NativeRunner(load_model(folder), RunnerOptions(kv_bytes=1 << 20, page_tokens=PAGE_TOKENS, taps=taps))
    return Pair(runner, stock)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a model of SHAPES."""
    return functools.cache(lambda name: write_model(tmp_path_factory.mktemp(name), SHAPES[name], seed=5))


@pytest.fixture(scope="module")
def llama(written: Callable[[str], Path]) -> Pair:
    return pair(written("llama"))


@dataclass
class Counted:
    """A layer that notes how many tokens went through it."""

    layer: DecoderLayer
    seen: list[int] = field(default_factory=list)

    @property
    def index(self) -> int:
        return self.layer.index

    @property
    def shape(self) -> object:
        return self.layer.shape

    def __call__(self, hidden: torch.Tensor, state: PassState) -> None:
        self.seen.append(state.num_tokens)
        self.layer(hidden, state)


@pytest.fixture
def counted(llama: Pair) -> Iterator[list[Counted]]:
    layers = llama.runner.model.layers
    counting = [Counted(layer) for layer in layers]
    llama.runner.model.layers = cast("list[DecoderLayer]", counting)
    yield counting
    llama.runner.model.layers = layers


def assert_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("exit_layer", [1, 2])
@pytest.mark.parametrize("name", SHAPES)
def test_drafting_and_judging_give_the_logits_of_fresh_forwards(
    name: str, exit_layer: int, written: Callable[[str], Path]
) -> None:
    both = pair(written(name))
    kv, other = both.runner.new_sequence(), both.runner.new_sequence()
    both.fill(kv, TEXT[:13])
    both.fill(other, OTHER[:7])
    early, early_other = both.draft([(kv, TEXT[13:18]), (other, OTHER[7:12])], exit_layer)
    assert_equal(early, both.expected(TEXT[:18], exit_layer)[13:])
    assert_equal(early_other, both.expected(OTHER[:12], exit_layer)[7:])

    # One block goes on as it was drafted, with the last draft behind it; of the other only two rows are right.
    wrong = DraftTree.chain((OTHER[8], VOCAB_SIZE - 1, 1, 2))
    logits, logits_other = both.verify(
        [(kv, TEXT[13:14], DraftTree.chain(TEXT[14:19])), (other, OTHER[7:8], wrong)],
    )
    assert_equal(logits, both.expected(TEXT[:19])[13:])
    assert_equal(logits_other, both.expected([*OTHER[:8], *wrong.tokens])[7:])
    assert kv.ahead is None is other.ahead
    kv.commit(1, (1, 2, 3))
    other.commit(1, (1,))
    both.runner.pool.check_integrity()

    # What became rows of the sequence is as good as any.
    logits, logits_other = both.verify([(kv, TEXT[17:19], EMPTY_BLOCK), (other, OTHER[9:13], EMPTY_BLOCK)])
    assert_equal(logits, both.expected(TEXT[:19])[17:])
    assert_equal(logits_other, both.expected(OTHER[:13])[9:])


def test_first_layers_see_only_what_was_not_drafted(llama: Pair, counted: list[Counted]) -> None:
    kv, other = llama.runner.new_sequence(), llama.runner.new_sequence()
    llama.fill(kv, TEXT[:9])
    llama.fill(other, OTHER[:6])
    llama.draft([(kv, TEXT[9:13])], 2)
    for layer in counted:
        layer.seen.clear()
    llama.verify([(other, OTHER[6:8], EMPTY_BLOCK), (kv, TEXT[9:10], DraftTree.chain(TEXT[10:14]))])
    # The last draft, and both tokens of a sequence that drafted nothing.
    assert [layer.seen for layer in counted] == [[3], [3], [7]]
    kv.free()
    other.free()


@pytest.mark.parametrize(
    ("chain", "block", "num_fresh"),
    [
        (TEXT[9:10], DraftTree.chain(TEXT[10:12]), 0),  # cut by the caller
        (TEXT[9:10], EMPTY_BLOCK, 0),
        (TEXT[9:12], DraftTree.chain(TEXT[12:14]), 1),  # the target agreed meanwhile
        ((1, 2), DraftTree.chain((3,)), 3),  # another pending token
        (TEXT[9:10], DraftTree((TEXT[10], 1, TEXT[11]), (0, 1, 1)), 2),  # a tree whose first path is another
        (TEXT[9:10], DraftTree((TEXT[10], TEXT[11], 1, 2), (0, 1, 0, 2)), 2),
        (TEXT[9:10], DraftTree((1, TEXT[10]), (0, 0)), 2),
    ],
)
def test_as_much_is_kept_as_is_judged(
    llama: Pair, counted: list[Counted], chain: tuple[int, ...], block: DraftTree, num_fresh: int
) -> None:
    kv = llama.runner.new_sequence()
    llama.fill(kv, TEXT[:9])
    llama.draft([(kv, TEXT[9:13])], 1)
    for layer in counted:
        layer.seen.clear()
    (logits,) = llama.verify([(kv, chain, block)])
    assert sum(counted[0].seen) == num_fresh
    assert counted[1].seen == [len(chain) + block.num_draft_tokens]
    for node in range(block.num_draft_tokens + 1):
        path = [block.token_of(step) for step in block.ancestors(node)[1:]]
        assert_equal(logits[len(chain) - 1 + node], llama.expected([*TEXT[:9], *chain, *path])[-1])
    kv.free()


def test_rows_ahead_stay_until_rows_come_or_go(llama: Pair) -> None:
    kv = llama.runner.new_sequence()
    llama.fill(kv, TEXT[:7])
    llama.draft([(kv, TEXT[7:13])], 2)
    assert len(kv.pages) == 4
    kv.rollback(7)
    kv.rollback(99)
    kv.adopt(TEXT)
    kv.publish(TEXT)
    assert kv.ahead is not None
    assert kv.pages_to_reserve(6) == 0
    kv.drop_ahead()
    assert kv.ahead is None
    assert len(kv.pages) == 2
    for forget in (lambda: kv.rollback(6), lambda: kv.rollback(0), kv.discard, lambda: kv.commit(0)):
        llama.draft([(kv, TEXT[kv.num_rows : kv.num_rows + 5])], 2)
        forget()
        assert kv.ahead is None
        assert len(kv.pages) == -(-kv.num_rows // PAGE_TOKENS)
    llama.runner.pool.check_integrity()
    llama.draft([(kv, TEXT[:1])], 2)
    kv.rollback(0)  # of nothing: a preemption
    assert not kv.pages
    kv.free()


def test_rows_ahead_move_with_the_others(llama: Pair) -> None:
    kv, gaps = llama.runner.new_sequence(), llama.runner.new_sequence()
    for start in range(0, 6, PAGE_TOKENS):
        llama.fill(kv, TEXT[start : min(start + PAGE_TOKENS, 6)])
        gaps.pages += llama.runner.pool.take_pages(1, kv.pages[-1])
    assert len(page_runs(kv.pages)) == MAX_RUNS
    # The third draft needs a page more: that is too many runs.
    (early,) = llama.draft([(kv, TEXT[6:12])], 2)
    assert len(page_runs(kv.pages)) == 1
    assert_equal(early, llama.expected(TEXT[:12], 2)[6:])
    (logits,) = llama.verify([(kv, TEXT[6:7], DraftTree.chain(TEXT[7:13]))])
    assert_equal(logits, llama.expected(TEXT[:13])[6:])
    kv.free()
    gaps.free()


def test_rows_of_another_exit_are_not_gone_on_from(llama: Pair, counted: list[Counted]) -> None:
    kv, other = llama.runner.new_sequence(), llama.runner.new_sequence()
    llama.fill(kv, TEXT[:5])
    llama.fill(other, OTHER[:5])
    llama.draft([(kv, TEXT[5:7])], 1)
    llama.draft([(other, OTHER[5:7])], 2)
    for layer in counted:
        layer.seen.clear()
    logits, logits_other = llama.verify([(kv, TEXT[5:7], EMPTY_BLOCK), (other, OTHER[5:7], EMPTY_BLOCK)])
    assert [layer.seen for layer in counted] == [[2], [4], [4]]
    assert_equal(logits, llama.expected(TEXT[:7])[5:])
    assert_equal(logits_other, llama.expected(OTHER[:7])[5:])
    kv.free()
    other.free()


@pytest.mark.parametrize("taps", [FeatureTaps(), FeatureTaps(layers=(2, 3)), FeatureTaps(layers=(1, 2))])
def test_features_of_drafted_rows_are_kept(taps: FeatureTaps, written: Callable[[str], Path]) -> None:
    both = pair(written("llama"), taps)
    drafted, plain = both.runner.new_sequence(), both.runner.new_sequence()
    for kv in (drafted, plain):
        both.fill(kv, TEXT[:9])
    both.draft([(drafted, TEXT[9:13])], 2)
    for kv in (drafted, plain):
        both.verify([(kv, TEXT[9:10], DraftTree.chain(TEXT[10:14]))])
        kv.commit(1, (1, 2, 3, 4))
    features = [both.runner.features(kv).read(0, 14) for kv in (drafted, plain)]
    assert_equal(features[0], features[1])
