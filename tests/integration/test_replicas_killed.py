"""kill -9 for the drafter and then the verifier of one stream: its reader sees neither, the metrics see both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline_gateway.breaker import FailureCause
from paceline_gateway.effects import Lane
from paceline_gateway.round_record import Fallback, RoundRecord

from paceline.engine.simulated.text import SimulatedText
from paceline.generation import Chunk, Finished, GenerationEvent, Started
from paceline.messages import SamplingParams, TokenOrigin
from tests.fakes.toy_runner import cycle_law
from tests.integration.fleet import EOS, Run
from tests.integration.replica_processes import KillableFleet
from tests.integration.scraping import scrape

PROMPT = [1, 2, 3]
MAX_TOKENS = 200
SAMPLING = SamplingParams(temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"return_window_ms": 300, "draft_wait_ceiling_ms": 500}
NO_BLOCK = {Fallback.DRAFTER_LOST, Fallback.NO_DRAFTER, Fallback.LATE_DRAFT}


def expected() -> list[int]:
    """What the table says, without any service."""
    text = SimulatedText(tuple(range(EOS)))
    tokens = list(PROMPT)
    while len(tokens) < len(PROMPT) + MAX_TOKENS:
        tokens.append(text.next_token(text.after(text.start, tokens)[-1]))
    return tokens[len(PROMPT) :]


async def test_a_stream_outlives_its_drafter_and_its_verifier(tmp_path: Path) -> None:
    options: dict[str, Any] = {"method": object, "settings": SETTINGS}
    async with (
        KillableFleet.start(tmp_path, cycle_law([1]), **options) as fleet,
        fleet.client() as client,
    ):
        assert isinstance(fleet, KillableFleet)
        records: list[RoundRecord] = []
        count = fleet.gateway.metrics.round_ended

        def remember(record: RoundRecord) -> None:
            records.append(record)
            count(record)

        fleet.gateway.metrics.round_ended = remember  # type: ignore[method-assign]
        events: list[GenerationEvent] = []
        drafter_killed_at = verifier_killed_at = 0
        async for event in client.generate(fleet.request(PROMPT, max_tokens=MAX_TOKENS, sampling=SAMPLING)):
            events.append(event)
            num_tokens = sum(len(each.token_ids) for each in events if isinstance(each, Chunk))
            if not drafter_killed_at and num_tokens >= 20:
                assert fleet.drafter_pool.loads[fleet.drafter_process.address] == 1
                fleet.drafter_process.kill()
                drafter_killed_at = len(records)
            # The other drafter's drafts are accepted, and so many tokens are left that the stream is in its middle.
            drafts_again = fleet.drafters[1].num_sessions == 1 and accepted_since_gap(records) > 0
            if drafter_killed_at and not verifier_killed_at and drafts_again:
                assert num_tokens < MAX_TOKENS - 20
                assert fleet.verifier_pool.loads[fleet.verifier_process.address] == 1
                fleet.verifier_process.kill()
                verifier_killed_at = len(records)
        run = whole(events)
        assert run.tokens == expected()
        check_drafter(records[drafter_killed_at:verifier_killed_at], fleet, run)
        check_verifier(records[verifier_killed_at:], fleet, run)
        seen = await scrape(fleet.gateway.registry)
        for pool in Lane:
            assert seen.sum("paceline_replica_gap_seconds_count", pool=pool.value) == 1
            assert seen.sum("paceline_replica_failures_total", pool=pool.value, cause="stream_lost") == 1
            assert seen.sum("paceline_replicas", pool=pool.value, state="down") == 1
            assert seen.sum("paceline_replicas", pool=pool.value, state="ready") == 1


def accepted_since_gap(records: list[RoundRecord]) -> int:
    """Accepted drafts from the first draft on that came after a drafter was lost."""
    gaps = [index for index, record in enumerate(records) if record.drafter_gap_s is not None]
    return sum(record.accepted_tokens for record in records[gaps[0] :]) if gaps else 0


def whole(events: list[GenerationEvent]) -> Run:
    started, *chunks, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    run = Run(started, tuple([chunk for chunk in chunks if isinstance(chunk, Chunk)]), finished)
    run.check_counts()
    return run


def check_drafter(records: list[RoundRecord], fleet: KillableFleet, run: Run) -> None:
    """Plain rounds at once, none of which waited longer than a draft may; then drafts of the other one."""
    plain = [record for record in records if record.fallback is not None]
    assert plain
    assert {record.fallback for record in plain} <= NO_BLOCK
    patience_s = SETTINGS["draft_wait_ceiling_ms"] / 1e3
    assert sum(record.times.draft_wait_s for record in plain) <= patience_s + 0.1
    (back,) = [record for record in records if record.drafter_gap_s is not None]
    assert back.drafter_gap_s is not None
    assert back.drafter_gap_s >= SETTINGS["return_window_ms"] / 1e3
    assert run.evidence.drafter == fleet.drafters[1].address
    assert accepted_since_gap(records) > 0
    assert run.origins.count(TokenOrigin.PLAIN) >= len(plain)
    assert fleet.drafter_pool.failures[FailureCause.STREAM_LOST] == 1


def check_verifier(records: list[RoundRecord], fleet: KillableFleet, run: Run) -> None:
    """One gap, as long as the reader stood still; then rounds of the other one, with drafts."""
    (back,) = [record for record in records if record.verifier_gap_s is not None]
    assert back.verifier_gap_s is not None
    assert SETTINGS["return_window_ms"] / 1e3 <= back.verifier_gap_s <= back.since_last_s
    assert run.evidence.verifier == fleet.verifiers[1].address
    assert sum(record.accepted_tokens for record in records[records.index(back) :]) > 0
