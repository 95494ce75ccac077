"""Sessions in lockstep share passes of a real verifier, and sessions that wait for pages cost it nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest
import torch

from paceline.engine.runner import SequencePass
from paceline.engine.target import TargetOptions
from paceline.messages import Close, Closed, Opened, Verified
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.integration.replicas import VerifierReplica, Writer, verifier_replica, wait_for

LAW = hash_law(16, seed=3, order=2)
NUM_ROUNDS = 20


class PacedRunner(ToyRunner):
    """A toy whose passes take as long as those of a small model."""

    def forward(self, batch: Sequence[SequencePass], *, wait: bool = True) -> list[torch.Tensor]:
        time.sleep(0.01)
        return super().forward(batch)


async def plain_rounds(replica: VerifierReplica, name: str, num_rounds: int = NUM_ROUNDS) -> list[int]:
    async with replica.connect() as link:
        writer = Writer.start(name, [1, 2, 3])
        await link.ask(writer.open(), Opened)
        for _ in range(num_rounds):
            writer.log.extend((await link.ask(writer.verify(), Verified)).tokens)
        await link.ask(Close(name, 1), Closed)
        return list(writer.log.tokens)


@pytest.mark.parametrize("window_s", [0.0, 0.01])
async def test_two_sessions_in_lockstep_share_their_passes(window_s: float) -> None:
    runner = PacedRunner(LAW, 16)
    async with verifier_replica(runner, gather_window_s=window_s) as replica:
        texts = await wait_for(asyncio.gather(*(plain_rounds(replica, name) for name in ("one", "two"))))
    assert texts[0] == texts[1]
    fed = [sum(num_tokens > 0 for num_tokens in sizes) for sizes in runner.passes]
    assert sum(fed) == 2 * NUM_ROUNDS
    if window_s:
        assert len(runner.passes) < 1.6 * NUM_ROUNDS, "nearly all passes would have one session each"


async def test_a_session_that_waits_for_pages_gets_them_when_another_has_been_idle_for_long_or_has_ended() -> None:
    runner = ToyRunner(LAW, 16, num_pages=8, page_tokens=4, max_model_len=32)
    async with (
        verifier_replica(runner, options=TargetOptions(idle_preempt_s=0.2)) as replica,
        replica.connect() as link,
    ):
        first, second = Writer.start("first", [1] * 20), Writer.start("second", [2] * 4)
        for writer in (first, second):
            await link.ask(writer.open(), Opened)
            writer.log.extend((await link.ask(writer.verify(), Verified)).tokens)
        grown = (*second.log.tokens, *[3] * 12)
        second.log.extend(grown[len(second.log) :])
        length = len(second.log)
        verdict = await link.ask(second.verify(catch_up=second.log.slice(length - 12, length)), Verified)
        assert verdict.timing.queue_us > 20_000, "it had to wait until the first was idle for 0.2 s"
        num_passes = len(runner.passes)
        first.log.extend((await link.ask(first.verify(), Verified)).tokens)
        assert len(runner.passes) == num_passes + 1
        counted = replica.actor.meter.registry.get_sample_value
        assert counted("paceline_num_preemptions_total") == 2, "the first took them back"
        assert (counted("paceline_prefix_cache_queries_total") or 0) >= 20 + 4
        assert counted("paceline_prefix_cache_hits_total") is not None
        for writer in (first, second):
            await link.ask(Close(writer.name, 1), Closed)
