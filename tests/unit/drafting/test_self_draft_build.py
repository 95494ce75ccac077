"""From a checkpoint's folder to a verifier that drafts by itself: every method, and what is refused before it loads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from paceline.drafting.self_draft_build import SelfDraftSettings, plan_self_drafter
from paceline.engine.loader import load_model
from paceline.engine.local import LocalRequest, generate
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.errors import ConfigurationError, NotFound, PacelineError
from paceline.messages import SamplingParams
from paceline.method_names import METHOD_NAMES, POOL_METHODS, SELF_DRAFT_METHODS
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_models import Architecture, write_model
from tests.unit.drafting.checkpoints import samples

SAMPLES: dict[str, Callable[[], samples.Sample]] = {
    "medusa": samples.medusa_v1,
    "eagle": samples.eagle,
    "eagle3": samples.eagle31,
}
KV_BYTES = 1 << 20
TARGET = Architecture(
    LlamaConfig,
    {
        "vocab_size": samples.VOCAB,
        "hidden_size": samples.HIDDEN,
        "intermediate_size": samples.INNER,
        "num_hidden_layers": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "eos_token_id": samples.VOCAB - 1,
    },
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target for which the samples fit."""
    return write_model(tmp_path_factory.mktemp("target"), TARGET)


def settings(method: str, folder: Path) -> SelfDraftSettings:
    model = str(SAMPLES[method]().write(folder / method)) if method in SAMPLES else ""
    exit_layer = 4 if method == "layerskip" else None
    return SelfDraftSettings(method, model, kv_bytes=KV_BYTES, eagle_topk=2, num_draft_tokens=6, exit_layer=exit_layer)


@pytest.mark.parametrize("method", SELF_DRAFT_METHODS)
def test_every_method_drafts_inside_the_engine_and_changes_no_token(method: str, target: Path, tmp_path: Path) -> None:
    plan = plan_self_drafter(settings(method, tmp_path), target)
    runner = NativeRunner(load_model(target), RunnerOptions(kv_bytes=KV_BYTES, taps=plan.taps))
    drafter = plan.build(runner, Tokenizer.load(target))
    assert drafter.method == method
    without_head = method in {"ngram", "layerskip"}
    assert (drafter.taps is None) == without_head
    assert 0 <= drafter.kv_bytes <= KV_BYTES
    assert (drafter.kv_bytes > 0) == method.startswith("eagle")
    assert (drafter.weights_bytes > 0) == (not without_head)
    engine = TargetEngine(runner, self_drafter=drafter)
    for sampling in (SamplingParams(temperature=0.0, ignore_eos=True), SamplingParams(seed=5, ignore_eos=True)):
        requests = [LocalRequest((3, 1, 4, 1, 5, 9, 2, index), sampling, 7) for index in range(2)]
        plain = generate(engine, requests)
        drafted = generate(engine, [replace(request, self_draft_depth=3) for request in requests])
        assert [result.tokens for result in drafted] == [result.tokens for result in plain]
        assert method == "ngram" or all(result.num_drafted > 3 for result in drafted)
    assert engine.self_drafting.num_failures == 0


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"method": "draft_model"}, "self_draft_method", "name one of"),
        ({"model": ""}, "self_draft_model", "paceline train medusa"),
        ({"model": "/nowhere"}, "self_draft_model", "no folder '/nowhere'"),
        ({"medusa_tree": "derived:17"}, "medusa_tree", "raise max_draft_tokens"),
        ({"medusa_tree": "bush"}, "tree", "bush"),
        ({"method": "eagle", "num_draft_tokens": 17}, "num_draft_tokens", "raise max_draft_tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    changes: dict[str, Any], field: str, message: str, target: Path, tmp_path: Path
) -> None:
    with pytest.raises((ConfigurationError, NotFound), match=message) as caught:
        plan_self_drafter(replace(settings("medusa", tmp_path), **changes), target)
    assert caught.value.field == field


def test_a_checkpoint_of_another_kind_or_another_target_is_refused(target: Path, tmp_path: Path) -> None:
    eagle3 = settings("eagle3", tmp_path)
    with pytest.raises(ConfigurationError, match="kind eagle3: set self_draft_method to that"):
        plan_self_drafter(replace(eagle3, method="eagle"), target)
    with pytest.raises(PacelineError):
        plan_self_drafter(replace(eagle3, method="medusa"), target)
    wider = Architecture(LlamaConfig, {**TARGET.arguments, "hidden_size": 16, "num_hidden_layers": 1})
    with pytest.raises(PacelineError, match="target"):
        plan_self_drafter(eagle3, write_model(tmp_path / "wider", wider))


def test_a_tree_that_the_heads_cannot_fill_counts_with_what_they_can(target: Path, tmp_path: Path) -> None:
    # The classic tree has depth 4 and 63 nodes, three heads make fewer of them.
    classic = replace(settings("medusa", tmp_path), medusa_tree="classic_63")
    with pytest.raises(ConfigurationError, match=r"blocks of \d\d tokens"):
        plan_self_drafter(classic, target)
    assert plan_self_drafter(replace(classic, max_draft_tokens=63), target).taps is not None


def test_names_are_known() -> None:
    assert set(POOL_METHODS) | set(SELF_DRAFT_METHODS) <= set(METHOD_NAMES)
