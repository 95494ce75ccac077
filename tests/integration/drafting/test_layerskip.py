"""layerskip from a trained adapter's folder to a verifier and a drafter, and what its rows are after anything."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from paceline_drafter.load import load_replica as load_drafter
from paceline_drafter.settings import DrafterSettings
from paceline_verifier.load import load_replica as load_verifier
from paceline_verifier.settings import VerifierSettings
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.checkpoints.draft_vocabulary import write_draft_vocabulary
from paceline.drafting.layerskip import LayerSkipMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.self_drafting import SelfDrafting
from paceline.engine.kv.pool import SequenceKV
from paceline.engine.loader import ModelDtype, load_model, own_logits
from paceline.engine.local import LocalRequest, generate
from paceline.engine.native.native_runner import NativeRunner
from paceline.engine.runner import SequencePass
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.shared_parts import load_shared_parts
from paceline.engine.target import TargetEngine, TargetOptions
from paceline.errors import CapacityExceeded, ConfigurationError, ModelError
from paceline.messages import SamplingParams, Verified
from paceline.model_source import resolve
from paceline.quantize import quantize
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from paceline.text.tokenizer import Tokenizer
from tests.fakes.tiny_models import SERVED, VOCAB_SIZE, Architecture, write_model
from tests.unit.drafting.rounds import draft
from tests.unit.engine.rounds import Owner

NUM_LAYERS, EXIT_LAYER, PAGE_TOKENS = 4, 2, 4
ROW_BYTES = NUM_LAYERS * 2 * 2 * 8 * 4
"""Layers x (keys and values) x key/value heads x head size x bytes."""
TARGET = Architecture(LlamaConfig, {**SERVED["llama"].arguments, "num_hidden_layers": NUM_LAYERS})
TEXT = tuple((7 * index + 3) % VOCAB_SIZE for index in range(40))
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, seed=5, ignore_eos=True)


@dataclass(frozen=True)
class Trained:
    """An adapter, its base, and what `peft` makes of the two."""

    base: Path
    adapter: Path
    stock: LlamaForCausalLM

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], num_layers: int = NUM_LAYERS) -> torch.Tensor:
        """Of all tokens after the first layers, without any cache # [len(tokens), vocab_size]"""
        result = self.stock.model(input_ids=torch.tensor([list(tokens)]), use_cache=False, output_hidden_states=True)
        states = result.hidden_states
        normed = states[-1] if num_layers == NUM_LAYERS else self.stock.model.norm(states[num_layers])
        logits: torch.Tensor = self.stock.lm_head(normed)[0]
        return logits


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("layerskip")
    base = write_model(folder / "base", TARGET, seed=4)
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(str(folder / "adapter"))
    (folder / "adapter" / "config.json").write_text(json.dumps({"exit_layer": EXIT_LAYER}))
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(folder / "adapter"))
    return Trained(base, folder / "adapter", cast("LlamaForCausalLM", whole.merge_and_unload()))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def assert_equal(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


def test_the_target_is_base_and_adapter_added_in_memory_alone(trained: Trained) -> None:
    before = (trained.base / "model.safetensors").read_bytes()
    folder = resolve(str(trained.adapter))
    assert_equal(own_logits(load_model(folder).model, TEXT), trained.logits(TEXT))
    for num_layers in (1, EXIT_LAYER):
        cut = load_model(folder, num_layers=num_layers).model
        assert len(cut.model.layers) == num_layers
        assert_equal(own_logits(cut, TEXT), trained.logits(TEXT, num_layers))
    half = load_model(folder, dtype=ModelDtype.BFLOAT16).model
    weight = trained.stock.model.layers[1].mlp.up_proj.weight
    rounded = half.get_parameter("model.layers.1.mlp.up_proj.weight").float()
    torch.testing.assert_close(rounded, weight, rtol=0.02, atol=0.02)
    assert (trained.base / "model.safetensors").read_bytes() == before
    assert Tokenizer.load(folder).fingerprint == Tokenizer.load(trained.base).fingerprint
    with pytest.raises(ConfigurationError, match="9 layers are wanted of a model with 4"):
        load_model(folder, num_layers=9)


def test_a_damaged_adapter_or_another_base_is_refused(trained: Trained, tmp_path: Path) -> None:
    other = write_model(tmp_path / "other", SERVED["llama"])
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for path in trained.adapter.iterdir():
        (adapter / path.name).write_bytes(path.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    with pytest.raises(ModelError, match=r"trained on another model: model\.layers\.3"):
        load_model(resolve(str(adapter)))


def test_what_borrows_parts_of_the_base_alone_refuses_an_adapter_that_changes_them(
    trained: Trained, tmp_path: Path
) -> None:
    name = str(trained.adapter)
    assert load_shared_parts(resolve(name)).num_layers == NUM_LAYERS
    with pytest.raises(ModelError, match="is an adapter on a base"):
        quantize(name)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(trained.base), LoraConfig(target_modules=["lm_head"]))
    model.save_pretrained(str(tmp_path / "head"), save_embedding_layers=False)
    with pytest.raises(ModelError, match="changes lm_head"):
        load_shared_parts(resolve(str(tmp_path / "head")))


def test_a_verifier_and_a_drafter_load_the_same_target_and_draft_alike(trained: Trained) -> None:
    name = str(trained.adapter)
    verifier = load_verifier(VerifierSettings(model=name, kv_cache_bytes=1 << 20, self_draft_method="layerskip"))
    assert verifier.info.methods == ("layerskip",)
    assert (verifier.info.model, verifier.info.drafting_bytes) == ("adapter", 0)
    drafter = load_drafter(DrafterSettings(model=name, kv_cache_bytes=1 << 20, method=("ngram", "layerskip")))
    assert drafter.info.methods == ("ngram", "layerskip")
    assert drafter.info.tokenizer_hash == verifier.info.tokenizer_hash
    assert drafter.info.weights_bytes < verifier.info.weights_bytes

    pooled = build_method(MethodSettings(methods=("layerskip",), draft_model=name, kv_bytes=1 << 20))
    runner = NativeRunner(load_model(resolve(name)), RunnerOptions(kv_bytes=1 << 20))
    inside = LayerSkipMethod(runner, exit_layer=EXIT_LAYER)
    kv = runner.new_sequence()
    kv.reserve(len(TEXT) - 1)
    runner.forward([SequencePass(kv, TEXT[:-1])])
    kv.commit(len(TEXT) - 1)
    pooled.open("s")
    for sampling in (GREEDY, SAMPLED):
        job = DraftJob("s", TEXT, 5, sampling, target_rows=kv)
        while not job.done:
            inside.advance([job])
        assert job.tokens == draft(pooled, "s", TEXT, 5, sampling).tokens
        assert len(job.tokens) == 5
    assert pooled.info.name == "layerskip"


def test_a_target_that_proposes_some_ids_only_is_a_target_like_any_other(trained: Trained, tmp_path: Path) -> None:
    adapter = Path(shutil.copytree(trained.adapter, tmp_path / "adapter"))
    whole = Path(shutil.copytree(trained.base, tmp_path / "whole"))
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps(config | {"exit_layer": EXIT_LAYER}))
    for folder in (adapter, whole):
        write_draft_vocabulary(folder, torch.arange(1, 31))
        name = str(folder)
        verifier = load_verifier(VerifierSettings(model=name, kv_cache_bytes=1 << 20, self_draft_method="layerskip"))
        hidden_size = load_shared_parts(resolve(name)).hidden_size
        assert verifier.info.drafting_bytes == 4 * 30 * hidden_size
        assert verifier.info.vocab_size == VOCAB_SIZE
        # In a drafter the same layers have the whole head.
        pooled = build_method(MethodSettings(methods=("layerskip",), draft_model=name, kv_bytes=1 << 20))
        assert pooled.info.vocab_size == VOCAB_SIZE


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": ("draft_model", "layerskip")}, "cannot be in one chain"),
        ({"runner": RunnerKind.ONNX}, "runner to torch"),
        ({"draft_model": ""}, "layerskip needs a model"),
        ({"exit_layer": NUM_LAYERS}, r"outside \[1, 4\)"),
    ],
)
def test_a_drafter_that_cannot_exit_early_does_not_start(changes: dict[str, Any], said: str, trained: Trained) -> None:
    settings = MethodSettings(methods=("layerskip",), draft_model=str(trained.adapter))
    with pytest.raises(ConfigurationError, match=said):
        build_method(replace(settings, **changes))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"runner": "transformers"}, "needs the native runner"),
        ({"self_draft_model": "somewhere"}, "leave self_draft_model empty"),
        ({"exit_layer": NUM_LAYERS}, r"outside \[1, 4\)"),
    ],
)
def test_a_verifier_that_cannot_exit_early_does_not_start(changes: dict[str, Any], said: str, trained: Trained) -> None:
    name = str(trained.adapter)
    settings: dict[str, Any] = {"model": name, "kv_cache_bytes": 1 << 20, "self_draft_method": "layerskip"}
    with pytest.raises(ConfigurationError, match=said):
        load_verifier(VerifierSettings(**settings | changes))


def test_a_target_that_names_no_exit_layer_needs_the_setting(trained: Trained) -> None:
    settings = VerifierSettings(model=str(trained.base), kv_cache_bytes=1 << 20, self_draft_method="layerskip")
    with pytest.raises(ConfigurationError, match="names no exit layer"):
        load_verifier(settings)
    assert load_verifier(settings.model_copy(update={"exit_layer": 1})).info.methods == ("layerskip",)


class Session(Owner):
    """An owner that knows what plain decoding gives it, and does all kinds of things with what it is given."""

    def __init__(self, engine: TargetEngine, prompt: tuple[int, ...], sampling: SamplingParams, name: str) -> None:
        super().__init__(engine, prompt, sampling, name)
        self.prompt, self.sampling = prompt, sampling
        self.next_block = EMPTY_BLOCK

    def a_block(self, chance: random.Random) -> DraftTree:
        """What was drafted, less or more of it, a tree around it, or something else."""
        drafted = list(self.next_block.tokens)
        other = [chance.randrange(VOCAB_SIZE) for _ in range(3)]
        match chance.randrange(6):
            case 0:
                return DraftTree.chain(drafted[: chance.randint(0, len(drafted))])
            case 1:
                return DraftTree.chain([*drafted[:2], *other])
            case 2:
                return DraftTree.chain(other)
            case 3:
                return DraftTree.from_paths([[*drafted[:3], other[0]], drafted, other])
            case _:
                return self.next_block


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_between_draft_and_verify_ids_and_rows_are_those_of_plain_decoding(
    seed: int, trained: Trained
) -> None:
    chance = random.Random(seed)
    # A few small pages for many sessions, prompts read in chunks, some of them alike: preemptions and prefix hits.
    options = RunnerOptions(kv_bytes=32 * PAGE_TOKENS * ROW_BYTES, page_tokens=PAGE_TOKENS)
    runner = NativeRunner(load_model(resolve(str(trained.adapter))), options)
    method = LayerSkipMethod(runner, exit_layer=1 + seed)
    limits = TargetOptions(max_batch_tokens=20, max_draft_tokens=6, idle_preempt_s=0.0)
    engine = TargetEngine(runner, options=limits, self_drafter=SelfDrafting(method))
    plain = TargetEngine(NativeRunner(load_model(resolve(str(trained.adapter))), RunnerOptions(kv_bytes=1 << 20)))
    sessions: dict[str, Session] = {}
    truth: dict[str, list[int]] = {}
    num_accepted = num_checked = 0
    for number in range(40):
        if len(sessions) < 5:
            others = [chance.randrange(VOCAB_SIZE) for _ in range(chance.choice((0, 2, 9)))]
            prompt = (*TEXT[: chance.choice((6, 14, 22))], *others)
            sampling = chance.choice((GREEDY, replace(SAMPLED, seed=number)))
            name = f"s{number}"
            try:
                sessions[name] = Session(engine, prompt, sampling, name)
            except CapacityExceeded:
                continue
            (result,) = generate(plain, [LocalRequest(prompt, sampling, 40)])
            truth[name] = [*prompt, *result.tokens]
        for session in chance.sample(list(sessions.values()), chance.randint(1, len(sessions))):
            if chance.random() < 0.1:  # the link broke: the session is opened again
                session = sessions[session.name] = reopened(engine, session)
            command = session.command(session.a_block(chance), catch_up=chance.choice((0, 0, 1, 2)))
            assert engine.submit(replace(command, next_depth=chance.randint(0, 4))) is None
        while engine.has_work:
            for answer in engine.step():
                assert isinstance(answer, Verified), answer
                session = sessions[answer.session]
                session.take(answer)
                session.next_block = answer.next_block
                num_accepted += len(answer.accepted_path)
            engine.check_integrity()
        for name, session in list(sessions.items()):
            assert session.tokens == truth[name][: len(session.tokens)]
            num_checked += rows_are_true(runner, engine, session, trained)
            if len(session.tokens) > len(session.prompt) + 24:
                engine.close(name)
                del sessions[name]
    assert engine.self_drafting.num_failures == 0
    assert engine.scheduling.preemptions > 0
    assert engine.scheduling.prefix_hit_tokens > 0
    assert num_accepted > 10
    assert num_checked > 60


def reopened(engine: TargetEngine, session: Session) -> Session:
    """The same session behind another link: its tokens are the prompt now."""
    again = Session(engine, tuple(session.tokens), session.sampling, session.name)
    again.prompt, again.next_block = session.prompt, session.next_block
    return again


def rows_are_true(runner: NativeRunner, engine: TargetEngine, session: Session, trained: Trained) -> bool:
    """Compares the logits over a copy of the session's rows with those of a fresh forward; False where pages lack."""
    kv: SequenceKV = engine._sessions[session.name].kv
    if not kv.num_rows or runner.pool.pages_available < 3:
        return False
    copy = kv.fork()
    copy.reserve(1)
    tokens = [*session.tokens[: kv.num_rows], 5]
    (logits,) = runner.forward([SequencePass(copy, (5,), num_logits=1)])
    copy.free()
    assert_equal(logits[0], trained.logits(tokens)[-1])
    return True
