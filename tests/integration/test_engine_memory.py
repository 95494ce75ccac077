"""What key/value rows cost, to the byte, and that a pass works on them where they lie."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from paceline.engine.kv.pool import SequenceKV
from paceline.engine.load_runner import load_runner
from paceline.engine.runner import ModelRunner, SequencePass
from paceline.engine.runner_options import RunnerChoice, RunnerOptions
from paceline.speculation.tree import DraftTree
from tests.fakes.tiny_models import SERVED, Architecture, write_model

CONTEXT = 2048
HEAD_DIM = 64
NUM_LAYERS, NUM_KV_HEADS, FLOAT_BYTES = 3, 2, 4
PLANE_BYTES = CONTEXT * NUM_KV_HEADS * HEAD_DIM * FLOAT_BYTES
"""The keys, or the values, of one layer."""


def allocations(work: Callable[[], object]) -> tuple[int, int]:
    """Bytes of the largest single allocation of some work, and most bytes that it held at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    assert results is not None
    largest = held = most = 0
    for event in results.events():
        if event.name() == "[memory]":
            largest = max(largest, event.nbytes())
            held += event.nbytes()
            most = max(most, held)
    return largest, most


def test_the_meter_sees_a_copy() -> None:
    rows = torch.empty(1000, 64)
    largest, most = allocations(lambda: rows.clone() + rows.clone())
    assert largest == 256_000
    assert most >= 512_000


@pytest.fixture(
    scope="module",
    params=itertools.product(["llama", "mistral_window"], [RunnerChoice.NATIVE, RunnerChoice.TRANSFORMERS]),
    ids=lambda parameters: f"{parameters[0]}-{parameters[1].value}",
)
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    name, choice = request.param
    base = SERVED[name]
    sizes = {"hidden_size": 64, "head_dim": HEAD_DIM, "max_position_embeddings": 2 * CONTEXT}
    folder = write_model(tmp_path_factory.mktemp(name), Architecture(base.config_class, {**base.arguments, **sizes}))
    # Room for two and a half sequences, which share nothing.
    kv_bytes = 5 * 2 * NUM_LAYERS * PLANE_BYTES // 2
    return load_runner(folder, options=RunnerOptions(kv_bytes=kv_bytes, prefix_caching=False, runner=choice))


def fill(runner: ModelRunner, kv: SequenceKV) -> None:
    """Feeds `CONTEXT` tokens in chunks, which write their rows in place too."""
    for start in range(0, CONTEXT, 256):
        tokens = tuple(token % 60 for token in range(start, start + 256))
        kv.reserve(256)
        runner.forward([SequencePass(kv, tokens)])
        kv.commit(256)


def judge_block(runner: ModelRunner, kv: SequenceKV, num_drafts: int) -> None:
    """A pass of a root and a chain of drafts, not kept."""
    kv.reserve(1 + num_drafts)
    runner.forward([SequencePass(kv, (3,), DraftTree.chain(range(num_drafts)), num_logits=1 + num_drafts)])


def test_bytes_per_token_are_exact(runner: ModelRunner) -> None:
    per_token = 2 * NUM_LAYERS * NUM_KV_HEADS * HEAD_DIM * FLOAT_BYTES
    assert runner.info.kv_bytes_per_token == per_token
    assert runner.info.kv_bytes == runner.pool.capacity_tokens * per_token
    assert sum(group.numel() * group.element_size() for group in runner.pool.groups) == runner.info.kv_bytes


@pytest.mark.parametrize("num_drafts", [0, 4])
def test_a_pass_copies_no_layer_s_rows(runner: ModelRunner, num_drafts: int) -> None:
    kv = runner.new_sequence()
    try:
        fill(runner, kv)
        judge_block(runner, kv, num_drafts)  # what is made once is made now
        largest, most = allocations(lambda: judge_block(runner, kv, num_drafts))
    finally:
        kv.free()
    # The largest thing in it are the scores: tokens x heads x rows.
    assert largest < PLANE_BYTES // 4
    assert most < PLANE_BYTES // 2


def test_scattered_pages_cost_no_more_than_one_layer_s_rows_at_a_time(runner: ModelRunner) -> None:
    kv = runner.new_sequence()
    try:
        size = runner.pool.page_tokens
        kv.pages = runner.pool.take_pages(-(-CONTEXT // size) + 1, None)[::-1]
        fill(runner, kv)
        judge_block(runner, kv, 4)
        _, most = allocations(lambda: judge_block(runner, kv, 4))
    finally:
        kv.free()
    assert most < 3 * PLANE_BYTES < NUM_LAYERS * 2 * PLANE_BYTES
