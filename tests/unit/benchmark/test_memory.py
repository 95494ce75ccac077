from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.benchmark.memory import (
    ROOM_TOKENS,
    FleetMemory,
    ReplicaMemory,
    extra_memory,
    head_row_bytes,
    replica_memory,
)

PLAIN = FleetMemory(ReplicaMemory(500e6, 1000 * 40_000, 1000))


def test_the_metrics_of_a_replica() -> None:
    text = (
        '# TYPE paceline_weights_bytes gauge\npaceline_weights_bytes{model_name="m"} 5e+08\n'
        '# TYPE paceline_kv_bytes gauge\npaceline_kv_bytes{model_name="m"} 4e+07\n'
        '# TYPE paceline_kv_tokens_capacity gauge\npaceline_kv_tokens_capacity{model_name="m"} 1000\n'
    )
    assert replica_memory(text) == PLAIN.verifier


def test_a_drafter_costs_its_weights_and_its_rows() -> None:
    extra = extra_memory(FleetMemory(PLAIN.verifier, ReplicaMemory(100e6, 500 * 10_000, 500)), PLAIN)
    assert extra.weights_mb == pytest.approx(100)
    assert extra.kv_mb == pytest.approx(ROOM_TOKENS * 10_000 / 1e6)


def test_a_head_in_the_verifier_costs_its_weights_its_rows_and_the_target_s_hidden_states() -> None:
    # Of the same memory, rows with hidden states beside them are fewer: 800 of 50 000 bytes. The head's pool is apart.
    inside = FleetMemory(ReplicaMemory(520e6, 1000 * 40_000 + 7e6, 800))
    extra = extra_memory(inside, PLAIN, head_row_bytes=3000)
    assert extra.weights_mb == pytest.approx(20)
    assert extra.kv_mb == pytest.approx(ROOM_TOKENS * (10_000 + 3000) / 1e6)


def test_drafting_that_needs_nothing_costs_nothing() -> None:
    extra = extra_memory(FleetMemory(PLAIN.verifier, ReplicaMemory()), PLAIN)
    assert (extra.weights_mb, extra.kv_mb) == (0, 0)


@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_a_head(tmp_path: Path, nested: bool) -> None:
    layer = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    config = {"transformer_layer_config": layer} if nested else layer
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert head_row_bytes(tmp_path) == 2 * 4 * 3 * 64
    (tmp_path / "config.json").write_text('{"medusa_num_heads": 4}')
    assert head_row_bytes(tmp_path) == 0
