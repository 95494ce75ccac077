"""The demo's pair: SmolLM2 in float32 with its own int8 copy as the drafter."""

from __future__ import annotations

import pytest
import torch

from paceline.benchmark.prompts import DEMO_PROMPTS
from paceline.drafting.build import MethodSettings, RunnerKind, build_method
from paceline.drafting.local import LocalDrafter
from paceline.engine.loader import load_model
from paceline.engine.local import LocalRequest, generate
from paceline.engine.runner_options import RunnerOptions
from paceline.engine.target import TargetEngine
from paceline.engine.transformers_runner import TransformersRunner
from paceline.messages import SamplingParams
from paceline.model_source import resolve
from paceline.text.chat_template import ChatTemplate
from paceline.text.request import ChatMessage
from paceline.text.tokenizer import Tokenizer

TARGET = "smollm2-135m-instruct"


@pytest.mark.real_model
def test_the_int8_copy_is_accepted_most_of_the_time_and_changes_nothing() -> None:
    torch.set_num_threads(1)
    folder = resolve(TARGET)
    tokenizer = Tokenizer.load(folder)
    template = ChatTemplate.load(folder, tokenizer.special_tokens)
    runner = TransformersRunner(load_model(folder), RunnerOptions(kv_bytes=64 << 20))
    engine = TargetEngine(runner, eos_token_ids=tokenizer.eos_token_ids, vocab_size=tokenizer.vocab_size)
    method = build_method(
        MethodSettings(draft_model=TARGET, runner=RunnerKind.ONNX, max_sessions=1, kv_bytes=64 << 20, max_model_len=512)
    )
    assert method.info.tokenizer_hash == tokenizer.fingerprint
    samplings = (SamplingParams(temperature=0.0), SamplingParams(temperature=0.8, top_p=0.95, seed=3))
    num_drafted = num_accepted = 0
    for prompt, sampling in zip(DEMO_PROMPTS[:2], samplings, strict=True):
        ids = tokenizer.encode(template.render([ChatMessage("user", prompt.text)]), add_special_tokens=False)
        plain = generate(engine, [LocalRequest(ids, sampling, 24)])[0]
        drafter = LocalDrafter(method, sampling, len(ids))
        speculative = generate(engine, [LocalRequest(ids, sampling, 24, 4, drafter)])[0]
        drafter.close()
        assert speculative.tokens == plain.tokens
        num_drafted += speculative.num_drafted
        num_accepted += speculative.num_accepted
    # 0.93 over many prompts; stale or shifted rows or other noise would give far less.
    assert num_accepted > 0.7 * num_drafted
