"""layerskip inside the engine: a target's first layers draft on its own rows, and no id changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.drafting.layerskip import LayerSkipMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.self_drafting import SelfDrafting
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.loader import load_model
from paceline.engine.local import LocalRequest, generate
from paceline.engine.native.early_exit import ExitStep
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.native.weights import Weight
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import ConfigurationError
from paceline.messages import AcceptanceRule, SamplingParams
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, write_model

NUM_LAYERS, PAGE_TOKENS = 3, 4
ROW_BYTES = NUM_LAYERS * 2 * 2 * 8 * 4
"""Layers x (keys and values) x key/value heads x head size x bytes."""
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=5, ignore_eos=True)
NOISY = SamplingParams(temperature=1.0, seed=8, ignore_eos=True)
SOME_IDS = torch.arange(0, VOCAB_SIZE, 2)
TEXT = tuple((7 * index + 3) % VOCAB_SIZE for index in range(40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose last layer adds nothing, so that drafts of the first two are all right."""
    folder = write_model(tmp_path_factory.mktemp("target"), SERVED["llama"], seed=9)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.layers[-1].self_attn.o_proj.weight.zero_()
        model.model.layers[-1].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runner(folder: Path) -> NativeRunner:
    return NativeRunner(load_model(folder), RunnerOptions(kv_bytes=1 << 20, page_tokens=PAGE_TOKENS))


def drafting_engine(
    runner: NativeRunner, exit_layer: int, target_ids: torch.Tensor | None = None, **options: int
) -> TargetEngine:
    method = LayerSkipMethod(runner, exit_layer=exit_layer, target_ids=target_ids)
    return TargetEngine(runner, options=TargetOptions(max_draft_tokens=8, **options), self_drafter=SelfDrafting(method))


def requests(count: int, sampling: SamplingParams = GREEDY, depth: int = 0) -> list[LocalRequest]:
    prompts = [(*TEXT[: 6 + 2 * index], index) for index in range(count)]
    return [LocalRequest(prompt, sampling, 9, self_draft_depth=depth) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ids_are_those_of_plain_decoding_whatever_the_exit(
    sampling: SamplingParams, batch: int, runner: NativeRunner
) -> None:
    plain = generate(TargetEngine(runner), requests(batch, sampling))
    for exit_layer in (1, 2):
        engine = drafting_engine(runner, exit_layer, max_batch_tokens=32)
        drafted = generate(engine, requests(batch, sampling, depth=4))
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]
        assert engine.self_drafting.num_failures == 0
        for result in drafted:
            assert result.num_drafted > 3
            # Layers that add nothing: every draft of the layers before them is right.
            assert exit_layer == 1 or result.num_accepted == result.num_drafted
    assert runner.pool.num_sequences == 0
    runner.pool.check_integrity()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_ids_are_those_of_plain_decoding_where_only_some_can_be_drafted(
    sampling: SamplingParams, runner: NativeRunner
) -> None:
    plain = generate(TargetEngine(runner), requests(4, sampling))
    wanted = {token for result in plain for token in result.tokens}
    assert wanted & set(SOME_IDS.tolist())
    assert wanted - set(SOME_IDS.tolist())
    for exit_layer in (1, 2):
        engine = drafting_engine(runner, exit_layer, SOME_IDS, max_batch_tokens=32)
        drafted = generate(engine, requests(4, sampling, depth=4))
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]
        assert engine.self_drafting.num_failures == 0
        assert sum(result.num_accepted for result in drafted) > 0 or exit_layer == 1


@pytest.mark.parametrize("sampling", [GREEDY, NOISY], ids=["greedy", "sampled"])
def test_a_draft_is_the_best_of_its_ids_under_the_targets_own_noise(
    sampling: SamplingParams, runner: NativeRunner
) -> None:
    method = LayerSkipMethod(runner, exit_layer=2, target_ids=SOME_IDS)
    found = []
    for length in range(4, len(TEXT), 2):
        ((wanted,),) = [
            result.tokens for result in generate(TargetEngine(runner), [LocalRequest(TEXT[:length], sampling, 1)])
        ]
        kv = filled(runner, TEXT[: length - 1])
        drafting = DraftJob("s", TEXT[:length], 1, sampling, target_rows=kv)
        method.advance([drafting])
        (draft,) = drafting.tokens
        kv.free()
        assert draft in SOME_IDS
        # These layers say what the whole model says, so nothing but its ids can make a draft wrong.
        assert (draft == wanted) == (wanted in SOME_IDS)
        found.append(draft == wanted)
    assert {True, False} == set(found)


def test_under_ratio_drafts_are_chosen_without_chance(runner: NativeRunner) -> None:
    ratio = [replace(request, rule=AcceptanceRule.RATIO) for request in requests(2, SAMPLED, depth=3)]
    results = generate(drafting_engine(runner, 2), ratio)
    assert all(0 < result.num_accepted <= result.num_drafted for result in results)
    greedy = [replace(request, sampling=GREEDY) for request in ratio]
    assert all(result.num_accepted == result.num_drafted for result in generate(drafting_engine(runner, 2), greedy))


def test_where_pages_are_short_drafts_are_shorter_and_keep_nobody_waiting(folder: Path) -> None:
    # Room for two of the four texts and a bit: what is drafted ahead is taken back for whoever has no draft.
    options = RunnerOptions(kv_bytes=33 * PAGE_TOKENS * ROW_BYTES, page_tokens=PAGE_TOKENS)
    runner = NativeRunner(load_model(folder), options)
    engine = drafting_engine(runner, 2, max_batch_tokens=24)
    asked = [LocalRequest((index, *TEXT[:30]), GREEDY, 24, self_draft_depth=6) for index in range(4)]
    plain = generate(TargetEngine(runner), [replace(request, self_draft_depth=0) for request in asked])
    drafted = generate(engine, asked)
    assert [result.tokens for result in drafted] == [result.tokens for result in plain]
    assert engine.scheduling.preemptions > 0
    assert engine.self_drafting.num_failures == 0
    runner.pool.check_integrity()


def filled(runner: NativeRunner, tokens: Sequence[int]) -> SequenceKV:
    kv = runner.new_sequence()
    kv.reserve(len(tokens))
    runner.forward([SequencePass(kv, tuple(tokens))])
    kv.commit(len(tokens))
    return kv


def job(kv: SequenceKV | None, context: Sequence[int] = TEXT[:9], depth: int = 3) -> DraftJob:
    return DraftJob("s", context, depth, GREEDY, target_rows=kv)


def test_what_cannot_be_drafted_is_done_with_what_it_has(runner: NativeRunner) -> None:
    method = LayerSkipMethod(runner, exit_layer=2)
    kv = filled(runner, TEXT[:8])
    nowhere, elsewhere, good = job(None), job(kv, TEXT[:7]), job(kv)
    method.advance([nowhere, elsewhere])
    assert nowhere.done
    assert elsewhere.done
    method.advance([good])
    assert (len(good.tokens), good.done, method.kv_len("s")) == (1, False, 0)
    kv.drop_ahead()  # taken back by the scheduler
    method.advance([good])
    assert (len(good.tokens), good.done) == (1, True)
    again = job(kv)
    while not again.done:
        method.advance([again])
    assert len(again.tokens) == len(again.confidences) == 3
    taken = runner.pool.take_pages(runner.pool.pages_available, None)
    full = job(kv, depth=9)
    while not full.done:
        method.advance([full])
    runner.pool.release(taken)
    # As many as the page holds that the draft before has given back.
    assert full.tokens[:3] == again.tokens
    assert len(full.tokens) == PAGE_TOKENS
    kv.free()


class Broken:
    """A target whose first layers give nothing that is finite."""

    def __init__(self, runner: NativeRunner) -> None:
        self.info, self.num_layers = runner.info, runner.num_layers
        self._runner = runner

    def forward_first(self, batch: Sequence[ExitStep], num_layers: int, head: Weight | None = None) -> torch.Tensor:
        return self._runner.forward_first(batch, num_layers, head) * torch.nan

    def head_rows(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._runner.head_rows(token_ids)


@pytest.mark.parametrize("target_ids", [None, SOME_IDS], ids=["all ids", "some ids"])
def test_rows_without_finite_logits_are_not_gone_on_from(target_ids: torch.Tensor | None, runner: NativeRunner) -> None:
    kv = filled(runner, TEXT[:8])
    broken = job(kv)
    LayerSkipMethod(Broken(runner), exit_layer=1, target_ids=target_ids).advance([broken])
    assert (broken.tokens, broken.done, kv.ahead) == ([], True, None)
    kv.free()


@pytest.mark.parametrize("exit_layer", [0, 3, 4])
def test_an_exit_that_leaves_no_layer_is_refused(exit_layer: int, runner: NativeRunner) -> None:
    with pytest.raises(ConfigurationError, match=r"outside \[1, 3\)"):
        LayerSkipMethod(runner, exit_layer=exit_layer)


def test_it_takes_no_memory_and_proposes_real_tokens_only(runner: NativeRunner) -> None:
    info = LayerSkipMethod(runner, exit_layer=1, vocab_limit=60).info
    assert (info.name, info.weights_bytes, info.kv_bytes, info.taps, info.vocab_size) == ("layerskip", 0, 0, None, 60)


def test_the_rows_of_its_ids_are_its_memory_and_those_of_no_token_are_left_out(runner: NativeRunner) -> None:
    method = LayerSkipMethod(runner, exit_layer=1, target_ids=SOME_IDS, vocab_limit=VOCAB_SIZE - 4)
    assert method.info.weights_bytes == 4 * (len(SOME_IDS) - 2) * runner.shared_parts().hidden_size
