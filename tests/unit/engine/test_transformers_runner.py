"""Both runners on tiny random models of many architectures, against the stock model of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from paceline.engine.kv.pool import SequenceKV
from paceline.engine.load_runner import LoadedRunner
from paceline.engine.loader import ModelDtype, load_model
from paceline.engine.local import LocalRequest, generate
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.engine.transformers_runner import TransformersRunner
from paceline.errors import ConfigurationError, ModelError
from paceline.messages import SamplingParams
from paceline.speculation.tree import DraftTree
from tests.fakes.tiny_models import REFUSED, SERVED, VOCAB_SIZE, WINDOW, Architecture, write_model
from tests.unit.engine.rounds import GREEDY, Owner
from tests.unit.engine.stock import stock_greedy, stock_model

PROMPT = tuple((7 * index + 3) % VOCAB_SIZE for index in range(WINDOW + 5))
NUM_TOKENS = 24
SMALL_POOL = RunnerOptions(kv_bytes=1 << 20, page_tokens=4)


NATIVE = ("llama", "llama_tied_bias", "qwen2", "qwen3", "mistral_window")
"""Of the served models those that the native runner knows too."""


def make_runner(folder: Path, options: RunnerOptions = SMALL_POOL) -> TransformersRunner:
    return TransformersRunner(load_model(folder), options)


def make(kind: str, folder: Path) -> LoadedRunner:
    return (NativeRunner if kind == "native" else TransformersRunner)(load_model(folder), SMALL_POOL)


@torch.inference_mode()
def fresh_logits(model: LlamaForCausalLM, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after every token, without any cache # [len(tokens), vocab_size]."""
    logits: torch.Tensor = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits.float()


def branching(truth: Sequence[int]) -> LocalRequest:
    """A request whose blocks are trees: wrong siblings first, and a truth that goes wrong after three tokens."""

    def propose(context: Sequence[int], depth: int) -> DraftTree:
        right = list(truth[len(context) : len(context) + depth])
        wrong = [(token + 1) % VOCAB_SIZE for token in right]
        return DraftTree.from_paths([wrong[:2], [*right[:1], *wrong[1:3]], [*right[:3], *wrong[3:]]])

    return LocalRequest(PROMPT, GREEDY, NUM_TOKENS, 5, propose)


@pytest.mark.parametrize(
    ("kind", "name"), [*(("transformers", name) for name in SERVED), *(("native", name) for name in NATIVE)]
)
def test_decoding_plainly_and_with_trees_equals_transformers_generate(
    kind: str, name: str, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(name)
    expected = list(stock_greedy(folder, PROMPT, NUM_TOKENS))
    engine = TargetEngine(make(kind, folder))
    plain = generate(engine, [LocalRequest(PROMPT, GREEDY, NUM_TOKENS)])[0]
    assert plain.tokens == expected
    # Two at once: the rows of a pass belong to different sequences.
    trees = generate(engine, [branching([*PROMPT, *expected]), branching([*PROMPT, *expected])])
    for result in trees:
        assert result.tokens == expected
        assert result.num_rounds < NUM_TOKENS / 2
    assert engine.kv_pages_in_use == 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_served_exactly_is_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path, REFUSED[name])
    with pytest.raises(ModelError, match=r"cannot be rolled back|s_aux") as caught:
        make_runner(folder)
    assert "give " in caught.value.message


@contextmanager
def session(runner: LoadedRunner) -> Iterator[SequenceKV]:
    kv = runner.new_sequence()
    try:
        yield kv
    finally:
        kv.free()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("transformers", "llama"),
        ("transformers", "mistral_window"),
        ("transformers", "gemma2_window"),
        ("native", "llama"),
        ("native", "mistral_window"),
    ],
)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_cached_logits_equal_a_fresh_forward_after_every_round(
    kind: str, name: str, shape: str, model_folder: Callable[..., Path]
) -> None:
    folder = model_folder(name, seed=1)
    stock, runner = stock_model(folder), make(kind, folder)
    truth = [*PROMPT, *stock_greedy(folder, PROMPT, 40)]
    owner = Owner(TargetEngine(runner), PROMPT)
    kv = owner.engine._sessions[owner.name].kv
    owner.verify()
    for num_right in (0, 2, 4, 1, 0, 3, 4):
        done = len(owner.tokens)
        right = truth[done : done + 4]
        drafts = [token if index < num_right else (token + 1) % VOCAB_SIZE for index, token in enumerate(right)]
        wrong = [(token + 2) % VOCAB_SIZE for token in right]
        paths = [wrong, drafts] if shape == "tree" else [drafts]
        answer = owner.verify(DraftTree.from_paths(paths))
        assert len(answer.accepted_path) == num_right
        assert owner.tokens == truth[: len(owner.tokens)]
        kv.reserve(1)
        cached = runner.forward([SequencePass(kv, (owner.tokens[-1],), num_logits=1)])[0][0]
        fresh = fresh_logits(stock, owner.tokens)[-1]
        torch.testing.assert_close(cached, fresh, rtol=1e-4, atol=1e-4)


def test_logits_are_those_of_each_node_s_own_path(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    stock, runner = stock_model(folder), make_runner(folder)
    tree = DraftTree((5, 6, 7, 8, 9), (0, 0, 1, 2, 2))
    with session(runner) as kv, session(runner) as other:
        kv.reserve(len(PROMPT) + 5)
        other.reserve(3)
        parts = [SequencePass(other, (1, 2, 3), num_logits=2), SequencePass(kv, PROMPT, tree, num_logits=6)]
        beside, logits = runner.forward(parts)
    torch.testing.assert_close(beside, fresh_logits(stock, (1, 2, 3))[-2:], rtol=1e-4, atol=1e-4)
    for node in range(6):
        path = [tree.token_of(above) for above in tree.ancestors(node)[1:]]
        fresh = fresh_logits(stock, [*PROMPT, *path])[-1]
        torch.testing.assert_close(logits[node], fresh, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_scattered_pages_give_the_same_logits(kind: str, model_folder: Callable[..., Path]) -> None:
    runner = make(kind, model_folder("llama"))
    with session(runner) as neat, session(runner) as scattered:
        neat.reserve(len(PROMPT))
        expected = runner.forward([SequencePass(neat, PROMPT, num_logits=4)])[0]
        scattered.pages = runner.pool.take_pages(4, None)[::-1]
        scattered.reserve(len(PROMPT))
        assert torch.equal(runner.forward([SequencePass(scattered, PROMPT, num_logits=4)])[0], expected)


def test_a_pass_without_wanted_logits_only_fills_rows(model_folder: Callable[..., Path]) -> None:
    runner = make_runner(model_folder("llama"))
    with session(runner) as kv:
        kv.reserve(4)
        (logits,) = runner.forward([SequencePass(kv, PROMPT[:4])])
        assert logits.shape == (0, VOCAB_SIZE)
        kv.commit(4)
        assert kv.num_rows == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_is_the_target_is_accepted_whole(temperature: float, model_folder: Callable[..., Path]) -> None:
    engine = TargetEngine(make_runner(model_folder("qwen3")))
    sampling = SamplingParams(temperature=temperature, seed=4)
    plain = generate(engine, [LocalRequest(PROMPT, sampling, NUM_TOKENS)])[0]
    truth = [*PROMPT, *plain.tokens]
    request = LocalRequest(
        PROMPT, sampling, NUM_TOKENS, 4, lambda context, depth: DraftTree.chain(truth[len(context) :][:depth])
    )
    drafted = generate(engine, [request])[0]
    assert drafted.tokens == plain.tokens
    assert drafted.num_accepted == drafted.num_drafted > 0


@pytest.mark.parametrize("kind", ["native", "transformers"])
def test_key_value_bytes_per_token_are_exact(kind: str, model_folder: Callable[..., Path]) -> None:
    runner = make(kind, model_folder("llama"))
    # layers x (keys and values) x key/value heads x head size x bytes
    assert runner.info.kv_bytes_per_token == 3 * 2 * 2 * 8 * 4
    assert runner.info.kv_bytes <= 1 << 20
    assert runner.info.vocab_size == VOCAB_SIZE


def test_the_context_is_the_least_of_model_pool_and_option(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    assert make_runner(folder).info.max_model_len == 256
    assert make_runner(folder, RunnerOptions(kv_bytes=1 << 20, max_model_len=100)).info.max_model_len == 100
    assert make_runner(folder, RunnerOptions(kv_bytes=384 * 160)).info.max_model_len == 160


def test_a_pool_too_small_to_serve_is_refused_with_the_least_budget(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama")
    with pytest.raises(ConfigurationError, match=rf"at least {128 * 384} bytes") as caught:
        make_runner(folder, RunnerOptions(kv_bytes=384 * 64))
    assert caught.value.field == "kv_bytes"


def test_unpacked_weights_give_the_same_tokens(model_folder: Callable[..., Path]) -> None:
    folder = model_folder("llama_tied_bias")
    packed = make_runner(folder)
    plain = make_runner(folder, RunnerOptions(kv_bytes=1 << 20, pack=False))
    assert packed.packing.num_packed == 22
    assert packed.packing.duplicated_bytes == VOCAB_SIZE * 32 * 4
    assert packed.info.weights_bytes == plain.info.weights_bytes + packed.packing.duplicated_bytes
    assert (plain.packing.num_packed, plain.packing.reason) == (0, "switched off")
    results = [generate(TargetEngine(runner), [LocalRequest(PROMPT, GREEDY, 20)])[0] for runner in (packed, plain)]
    assert results[0].tokens == results[1].tokens


def test_half_precision_is_served_within_its_own_rounding(tmp_path: Path) -> None:
    folder = write_model(tmp_path, Architecture(SERVED["llama"].config_class, SERVED["llama"].arguments), spread=0.1)
    runner = TransformersRunner(load_model(folder, dtype=ModelDtype.BFLOAT16), SMALL_POOL)
    assert runner.info.dtype == "bfloat16"
    assert runner.info.kv_bytes_per_token == 3 * 2 * 2 * 8 * 2
    assert "bfloat16" in runner.packing.reason
    result = generate(TargetEngine(runner), [LocalRequest(PROMPT, GREEDY, 8)])[0]
    assert len(result.tokens) == 8
