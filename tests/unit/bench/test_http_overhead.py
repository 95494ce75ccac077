"""The figures of `make bench-http`, from turns that are made up."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import psutil
import pytest

from bench.http_overhead import GRPC, Part, StreamRun, Turn, batches, make_rows, take_turn
from bench.http_stream import text_and_tokens
from paceline.benchmark.prompts import DEMO_PROMPTS, Prompt


def turn(wall_s: float, first_text_s: float, text: str = "a") -> Turn:
    return Turn((StreamRun(first_text_s, wall_s, 100, text),), wall_s, gateway_cpu_s=wall_s / 100)


def test_ratios_are_medians_over_pairs_not_quotients_of_medians() -> None:
    turns = {GRPC: [turn(1, 0.1), turn(10, 1), turn(2, 0.2)], "http": [turn(2, 0.2), turn(10, 1, "b"), turn(2, 0.2)]}
    grpc, http = make_rows(1, turns)
    assert (grpc.way, grpc.ratio_tokens_per_second, grpc.ratio_first_text, grpc.equal_texts) == (GRPC, 1, 1, 3)
    assert grpc.tokens_per_second == 50
    assert grpc.first_text_ms == 200
    assert (http.ratio_tokens_per_second, http.ratio_first_text) == (1, 1)
    assert (http.equal_texts, http.turns) == (2, 3)
    assert grpc.gateway_cpu_ms_per_token == pytest.approx(130 / 300)


def test_the_tokens_of_all_streams_count() -> None:
    together = Turn((StreamRun(0.1, 2, 100, "a"), StreamRun(0.3, 4, 60, "b")), wall_s=4, gateway_cpu_s=0.1)
    assert together.tokens_per_second == 40
    assert together.first_text_s == pytest.approx(0.2)


def test_one_at_a_time_or_all_at_once() -> None:
    assert batches(DEMO_PROMPTS, 1) == tuple([(prompt,) for prompt in DEMO_PROMPTS])
    (batch,) = batches(DEMO_PROMPTS[:2], 5)
    assert [prompt.name for prompt in batch] == [DEMO_PROMPTS[index % 2].name for index in range(5)]


async def test_a_turn_reads_every_stream_to_its_end() -> None:
    async def stream(prompt: Prompt, max_tokens: int) -> AsyncIterator[Part]:
        for part in (("", 0), (prompt.name, 0), ("!", 0), ("", max_tokens)):
            yield part

    done = await take_turn(stream, DEMO_PROMPTS[:2], 7, psutil.Process())
    assert done.texts == tuple([f"{prompt.name}!" for prompt in DEMO_PROMPTS[:2]])
    assert [run.tokens for run in done.streams] == [7, 7]
    assert all(0 < run.first_text_s <= run.total_s <= done.wall_s for run in done.streams)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": None}, ("", 0)),
        ({"choices": [{"delta": {"content": "Hi"}}]}, ("Hi", 0)),
        ({"choices": [{"delta": {}}]}, ("", 0)),
        ({"choices": [], "usage": {"completion_tokens": 5}}, ("", 5)),
    ],
)
def test_what_an_event_tells(event: dict[str, object], expected: Part) -> None:
    assert text_and_tokens(json.dumps(event)) == expected


def test_an_error_in_the_stream_is_no_end() -> None:
    with pytest.raises(ConnectionError, match="a row is not finite"):
        text_and_tokens(json.dumps({"error": {"message": "a row is not finite"}}))
