from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from bench.demo import figures_table, verdict
from bench.run import Results, make_plan, make_row, parse_arguments
from bench.run_tables import prompt_table, ratio_table, time_table
from paceline.benchmark.compare import (
    PLAIN,
    Configuration,
    Equality,
    equality,
    prompt_figures,
    request_for,
    where_time_goes,
)
from paceline.benchmark.fleet_runs import FleetRuns
from paceline.benchmark.prompts import DEMO_PROMPTS
from paceline.benchmark.report import write_report
from paceline.cli.request import Completion
from paceline.client import AsyncClient
from paceline.generation import Chunk, Evidence, Finished, Started
from paceline.messages import FinishReason, TokenLogprobs, TokenOrigin
from tests.fakes.scripted_gateway import ScriptedGateway, serving

PROMPT = DEMO_PROMPTS[0]


def completion(token_ids: tuple[int, ...], *, total_ms: float, draft_tokens: int = 0, accepted: int = 0) -> Completion:
    return Completion(
        session="s",
        model="m",
        seed=0,
        warnings=(),
        text="",
        token_ids=token_ids,
        origins=(TokenOrigin.PLAIN,) * len(token_ids),
        durable=True,
        finish_reason=FinishReason.LENGTH,
        stop_string="",
        prompt_tokens=3,
        evidence=Evidence(
            target_passes=2,
            tokens_per_target_pass=len(token_ids) / 2,
            draft_tokens=draft_tokens,
            accepted_tokens=accepted,
            total_ms=total_ms,
            verify_ms=total_ms / 2,
            draft_wait_ms=total_ms / 4,
        ),
    )


def test_ratios_are_medians_of_pairs() -> None:
    plain = [completion((1, 2, 3, 4), total_ms=ms) for ms in (100.0, 400.0, 100.0)]
    fast = [completion((1, 2, 3, 4), total_ms=ms, draft_tokens=4, accepted=3) for ms in (50.0, 100.0, 10.0)]
    figures = prompt_figures("x", plain, fast, [Equality.EQUAL, Equality.NEAR_TIE, Equality.EQUAL])
    assert figures.ratio == pytest.approx(4.0)
    assert figures.plain_tokens_per_second == pytest.approx(40.0)
    assert figures.tokens_per_second == pytest.approx(80.0)
    assert figures.acceptance == pytest.approx(0.75)
    assert figures.equality is Equality.NEAR_TIE


def test_where_time_goes_is_per_token() -> None:
    where = where_time_goes([completion((1, 2), total_ms=100.0), completion((1, 2), total_ms=300.0)])
    assert where.total_ms == pytest.approx(100.0)
    assert where.verify_ms == pytest.approx(50.0)
    assert where.rest_ms == pytest.approx(25.0)


def test_a_plain_request_forbids_drafts_and_is_greedy() -> None:
    plain = request_for(PROMPT, PLAIN)
    assert not plain.speculation.enabled
    assert plain.max_tokens == PROMPT.max_tokens
    fast = request_for(PROMPT, Configuration("K=4", 4), 8)
    assert fast.speculation.enabled
    assert (fast.speculation.num_speculative_tokens, fast.max_tokens) == (4, 8)
    assert plain.sampling.greedy
    assert fast.sampling.greedy


@pytest.mark.parametrize(("gap", "expected"), [(5e-5, Equality.NEAR_TIE), (0.2, Equality.DIFFERENT)])
async def test_a_difference_is_forgiven_only_where_the_best_two_are_close(gap: float, expected: Equality) -> None:
    logprobs = (TokenLogprobs(-0.5, (7, 8), (-0.5, -2.5)), TokenLogprobs(-1.0, (9, 5), (-1.0, -1.0 - gap)))
    gateway = ScriptedGateway(
        (
            Started("s", "m", 3, 0),
            Chunk("ab", (7, 9), (TokenOrigin.PLAIN,) * 2, 5, True, (1, 1), logprobs),
            Finished(FinishReason.LENGTH, 3, 2, Evidence(target_passes=2)),
        )
    )
    with serving(gateway) as address:
        async with AsyncClient(address) as client:
            plain, fast = completion((7, 9, 1), total_ms=1.0), completion((7, 5, 1), total_ms=1.0)
            assert await equality(client, PROMPT, plain, fast) is expected
            (request,) = gateway.requests
            assert (request.max_tokens, request.sampling.top_logprobs) == (2, 2)
            assert await equality(client, PROMPT, plain, plain) is Equality.EQUAL
            shorter = replace(plain, token_ids=(7, 9))
            assert await equality(client, PROMPT, plain, shorter) is Equality.DIFFERENT


def test_the_tables_and_the_report(tmp_path: Path) -> None:
    plan = replace(make_plan(parse_arguments(["--repeats", "1", "--block-sizes", "4"])), prompts=(PROMPT,))
    plain, fast = completion((1, 2), total_ms=100.0), completion((1, 2), total_ms=50.0, draft_tokens=2, accepted=1)
    (way,) = plan.configurations
    found = FleetRuns(
        {(PROMPT.name, PLAIN): [plain], (PROMPT.name, way): [fast]}, {(PROMPT.name, way): [Equality.EQUAL]}
    )
    row = make_row(plan, "draft_model", way, found, {PROMPT.name: 10.0})
    results = Results((row,), 20.0, where_time_goes([plain]), 10.0, 1, 1, 1)
    console = Console(width=120, record=True, file=None)
    with console.capture() as captured:
        for table in (ratio_table(results), prompt_table(results), time_table(results), figures_table(row.prompts)):
            console.print(table)
    text = captured.get()
    assert "2.00x" in text
    assert "4.00x" in text
    written = json.loads(write_report("tested", results, tmp_path).read_text())
    assert written["results"]["rows"][0]["prompts"][0]["equality"] == "equal"
    assert verdict(row.prompts) == "All 1 texts are equal; speculation was 2.00 times as fast (median)."


def test_the_verdict_names_what_differs() -> None:
    figures = prompt_figures(
        "chat", [completion((1,), total_ms=1.0)], [completion((2,), total_ms=1.0)], [Equality.DIFFERENT]
    )
    assert "differ for chat" in verdict([figures])


def test_quick_measures_little_and_the_default_all() -> None:
    quick = make_plan(parse_arguments(["--quick"]))
    assert (quick.methods, quick.block_sizes, quick.repeats, quick.max_tokens) == (("draft_model",), (4,), 1, 48)
    full = make_plan(parse_arguments([]))
    assert full.methods == ("draft_model", "ngram,draft_model")
    assert full.block_sizes == (3, 4, 6, 8)
    assert full.prompts == DEMO_PROMPTS
