"""The quantised runner on a tiny model: rewinding is exact, sessions are bounded and do not hurt one another."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.drafting import onnx_runner
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.draft_runner import Feed
from paceline.drafting.method import DraftJob
from paceline.drafting.onnx_runner import DEFAULT_KV_BYTES, OnnxDraftRunner, is_onnx_model
from paceline.engine.sampling import DraftRow, draft_tokens
from paceline.errors import CapacityExceeded, ConfigurationError, ModelError
from paceline.kv_usage import KvUsage
from paceline.messages import SamplingParams
from tests.integration.drafting.conftest import TINY_CONTEXT, TINY_VOCAB
from tests.unit.drafting.rounds import GREEDY, HOT, SAMPLED, draft

PROMPT = (1, 12, 53, 4, 95, 6, 77)
ROW_BYTES = 2 * 2 * 2 * 16 * 4
"""Keys and values of 2 layers with 2 heads of 16 float32 numbers."""


@pytest.fixture(scope="module")
def shared_runner(tiny_onnx_dir: Path) -> OnnxDraftRunner:
    return OnnxDraftRunner(tiny_onnx_dir, max_sessions=3)


@pytest.fixture
def runner(shared_runner: OnnxDraftRunner) -> OnnxDraftRunner:
    for session in list(shared_runner._sessions):
        shared_runner.close(session)
    return shared_runner


def logits_after(runner: OnnxDraftRunner, session: str, keep_rows: int, tokens: Sequence[int]) -> torch.Tensor:
    """The logits after tokens of which the first `keep_rows` are there already."""
    result = runner.forward([Feed(session, tokens, keep_rows)])[0]
    assert result.error is None
    assert result.logits is not None
    return result.logits[0].clone()


def from_nothing(runner: OnnxDraftRunner, tokens: Sequence[int]) -> torch.Tensor:
    """Logits after the tokens, fed one by one into a session that held nothing."""
    runner.open("oracle")
    for row in range(len(tokens)):
        logits = logits_after(runner, "oracle", row, tokens[: row + 1])
    runner.close("oracle")
    return logits


def test_logits_are_the_model_s(runner: OnnxDraftRunner, tiny_llama_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0, -1]
    logits = from_nothing(runner, PROMPT)
    assert logits.shape == (TINY_VOCAB,)
    assert logits.dtype == torch.float32
    # int8 weights and activations: close, not equal
    assert torch.corrcoef(torch.stack([expected, logits]))[0, 1] > 0.99
    assert int(expected.argmax()) == int(logits.argmax())


def test_rewinding_is_exact(runner: OnnxDraftRunner) -> None:
    runner.open("s")
    logits_after(runner, "s", 0, PROMPT)
    for keep_rows in (7, 6, 3, 1, 0):
        tokens = (*PROMPT[:keep_rows], 9, 8, 7)
        rewound = logits_after(runner, "s", keep_rows, tokens)
        assert runner.rows("s") == keep_rows + 3
        torch.testing.assert_close(rewound, from_nothing(runner, tokens), atol=1e-4, rtol=0)
        logits_after(runner, "s", 0, PROMPT)


def test_tokens_fed_together_or_one_by_one_give_the_same(runner: OnnxDraftRunner) -> None:
    runner.open("s")
    torch.testing.assert_close(logits_after(runner, "s", 0, PROMPT), from_nothing(runner, PROMPT), atol=1e-4, rtol=0)


def by_definition(runner: OnnxDraftRunner, context: Sequence[int], depth: int, sampling: SamplingParams) -> list[int]:
    """What a draft should be: every token from a session that held nothing."""
    drafted: list[int] = []
    for _ in range(depth):
        logits = from_nothing(runner, [*context, *drafted])
        choice = draft_tokens(logits[None], [DraftRow(sampling, context, drafted)], vocab_size=TINY_VOCAB)[0]
        assert choice is not None
        drafted.append(choice.token)
    return drafted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HOT], ids=["greedy", "top_p", "hot"])
def test_drafts_and_rows_after_acceptance_none_partial_and_full(
    runner: OnnxDraftRunner, sampling: SamplingParams
) -> None:
    method = DraftModelMethod(runner)
    for accepted in range(4):
        method.open("s")
        drafts = draft(method, "s", PROMPT, 3, sampling).tokens
        assert drafts == by_definition(runner, PROMPT, 3, sampling)
        assert method.kv_len("s") == len(PROMPT) + 2
        extra = next(token for token in range(TINY_VOCAB) if accepted == 3 or token != drafts[accepted])
        committed = (*PROMPT, *drafts[:accepted], extra)
        job = DraftJob("s", committed, 3, sampling)
        method.advance([job])
        assert method.kv_len("s") == len(committed)
        while not job.done:
            method.advance([job])
        assert job.tokens == by_definition(runner, committed, 3, sampling)
        method.check_integrity()
        method.close("s")


def test_superseded_and_assumed_contexts_leave_rows_right(runner: OnnxDraftRunner, tiny_onnx_dir: Path) -> None:
    method = DraftModelMethod(OnnxDraftRunner(tiny_onnx_dir, max_batch_tokens=4))
    method.open("s")
    context = [*PROMPT]
    for steps, dropped, appended in ((1, 0, (5,)), (2, 3, (5, 6)), (4, 0, ()), (1, 6, (8, 9, 10, 11, 12)), (3, 2, ())):
        job = DraftJob("s", tuple(context), 3, GREEDY)
        for _ in range(steps):
            method.advance([job])
        method.check_integrity()
        assert job.tokens == by_definition(runner, context, 3, GREEDY)[: len(job.tokens)]
        context = [*context[: len(context) - dropped], *job.tokens[:1], *appended]
    assert draft(method, "s", context, 3).tokens == by_definition(runner, context, 3, GREEDY)


def test_sessions_in_one_step_equal_sessions_alone(runner: OnnxDraftRunner) -> None:
    method = DraftModelMethod(runner)
    jobs = [DraftJob("a", PROMPT, 4, GREEDY), DraftJob("b", PROMPT[:3], 4, HOT)]
    for job in jobs:
        method.open(job.session)
    while not all(job.done for job in jobs):
        method.advance(jobs)
    for job in jobs:
        assert job.tokens == by_definition(runner, job.context, 4, job.sampling)


def test_sessions_are_bounded_and_buffers_are_used_again(runner: OnnxDraftRunner) -> None:
    method = DraftModelMethod(runner)
    for session in "abc":
        method.open(session)
        draft(method, session, PROMPT, 2)
    with pytest.raises(CapacityExceeded, match="3"):
        method.open("d")
    buffers = {id(generator) for generator in runner._sessions.values()}
    assert len(buffers) == 3
    for session in "abc":
        method.close(session)
        method.close(session)
        assert method.kv_len(session) == 0
    for session in "def":
        method.open(session)
        assert method.kv_len(session) == 0
        draft(method, session, PROMPT, 2)
    assert {id(generator) for generator in runner._sessions.values()} == buffers


def test_an_error_ends_that_session_s_draft_only(runner: OnnxDraftRunner) -> None:
    runner.open("bad")
    runner.open("good")
    logits_after(runner, "bad", 0, PROMPT)
    results = runner.forward([Feed("bad", [*PROMPT[:3], TINY_VOCAB + 5], 3), Feed("good", PROMPT)])
    assert isinstance(results[0].error, ModelError)
    assert results[0].logits is None
    assert runner.rows("bad") == 0
    assert results[1].logits is not None
    assert runner.rows("good") == len(PROMPT)
    torch.testing.assert_close(logits_after(runner, "bad", 0, PROMPT), results[1].logits[0])


def test_drafts_stop_at_the_context_limit(tiny_onnx_dir: Path) -> None:
    limited = OnnxDraftRunner(tiny_onnx_dir, max_sessions=1, max_model_len=16)
    assert limited.info.max_model_len == 16
    method = DraftModelMethod(limited)
    for prompt_len, expected in ((10, 5), (14, 3), (16, 1), (17, 0)):
        method.open("s")
        job = draft(method, "s", tuple(range(3, 3 + prompt_len)), 5)
        assert len(job.tokens) == expected
        method.check_integrity()


def test_sessions_share_the_memory(tiny_onnx_dir: Path) -> None:
    """One session may take all of it; the next one takes it over, and both draft as if they were alone."""
    runner = OnnxDraftRunner(tiny_onnx_dir, kv_bytes=70 * ROW_BYTES + 17, max_model_len=65)
    assert runner.info.kv_bytes == 70 * ROW_BYTES
    method = DraftModelMethod(runner)
    contexts = {session: [first, *range(1, 60)] for session, first in (("a", 61), ("b", 62))}
    jobs = [DraftJob(session, context, 3, GREEDY) for session, context in contexts.items()]
    for session in contexts:
        method.open(session)
    steps = 0
    while not all(job.done for job in jobs):
        method.advance(jobs)
        method.check_integrity()
        assert runner.kv_usage() == KvUsage(65, 70)
        steps += 1
    assert steps == 6
    assert method.kv_len("a") == 0  # "b" took its buffer over
    for job in jobs:
        assert job.tokens == by_definition(runner, job.context, 3, GREEDY)


def test_buffers_grow_with_their_sessions(tiny_onnx_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_runner, "_FIRST_BUFFER_TOKENS", 8)
    runner = OnnxDraftRunner(tiny_onnx_dir, kv_bytes=100 * ROW_BYTES)
    method = DraftModelMethod(runner)
    method.open("s")
    for num_tokens, capacity in ((6, 8), (8, 8), (9, 16), (15, 16), (20, 32)):
        method.advance([DraftJob("s", [*range(num_tokens)], 1, GREEDY)])
        assert runner.kv_usage().used_tokens == capacity
        assert method.kv_len("s") == num_tokens
    grown = runner.forward([Feed("s", [*range(21)], 20)])[0].logits
    assert grown is not None
    torch.testing.assert_close(grown[0], from_nothing(runner, [*range(21)]), atol=1e-4, rtol=0)


def test_what_is_too_small_is_refused(tiny_onnx_dir: Path) -> None:
    with pytest.raises(ConfigurationError, match="the rows of 63 tokens") as caught:
        OnnxDraftRunner(tiny_onnx_dir, kv_bytes=63 * ROW_BYTES)
    assert caught.value.field == "kv_bytes"
    with pytest.raises(ConfigurationError, match="at least 1"):
        OnnxDraftRunner(tiny_onnx_dir, max_batch_tokens=0)


def test_facts(runner: OnnxDraftRunner, tiny_onnx_dir: Path) -> None:
    info = runner.info
    assert (info.vocab_size, info.max_model_len, info.max_sessions) == (TINY_VOCAB, TINY_CONTEXT, 3)
    assert info.weights_bytes == sum(file.stat().st_size for file in tiny_onnx_dir.glob("model.onnx*"))
    assert info.kv_bytes == DEFAULT_KV_BYTES // ROW_BYTES * ROW_BYTES


def test_folders_that_hold_no_such_model_are_refused(tiny_llama_dir: Path, tiny_onnx_dir: Path, tmp_path: Path) -> None:
    assert is_onnx_model(tiny_onnx_dir)
    assert not is_onnx_model(tiny_llama_dir)
    with pytest.raises(ModelError, match=r"genai_config\.json"):
        OnnxDraftRunner(tiny_llama_dir)
    (tmp_path / "genai_config.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(ModelError, match="not a model description"):
        OnnxDraftRunner(tmp_path)
    shutil.copy(tiny_onnx_dir / "genai_config.json", tmp_path)
    with pytest.raises(ModelError, match="cannot be loaded"):
        OnnxDraftRunner(tmp_path)


def test_sessions_take_room_when_they_are_fed(tiny_onnx_dir: Path) -> None:
    runner = OnnxDraftRunner(tiny_onnx_dir, kv_bytes=1000 * ROW_BYTES)
    room = min(256, TINY_CONTEXT)
    runner.open("a")
    runner.open("b")
    assert runner.kv_usage() == KvUsage(0, 1000)
    logits_after(runner, "a", 0, PROMPT)
    assert runner.kv_usage() == KvUsage(room, 1000)
    runner.close("a")
    runner.close("b")
    assert runner.kv_usage().share == 0.0
