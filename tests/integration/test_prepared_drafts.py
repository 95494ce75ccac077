"""Drafts that are prepared for likely outcomes, in whole services: asked of the drafter, and by a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from paceline_drafter.load import load_replica as load_drafter
from paceline_drafter.servicer import DrafterService, drafter_door
from paceline_drafter.settings import DrafterSettings
from prometheus_client import CollectorRegistry

from paceline.benchmark.scale_load import prompts
from paceline.cli.request import complete
from paceline.drafting.draft_model import DraftModelMethod
from paceline.drafting.method import DraftJob
from paceline.drafting.torch_runner import TorchDraftRunner
from paceline.engine.simulated.pass_time import PassTime
from paceline.engine.simulated.runner import SimulatedModel, SimulatedRunner
from paceline.messages import Draft, Drafted, Open, Opened
from paceline.token_log import TokenLog
from tests.fakes.toy_runner import cycle_law
from tests.integration.fleet import GREEDY, MODEL
from tests.integration.node import Life
from tests.integration.replicas import drafter_replica
from tests.integration.test_scale import PASSES, SimulatedFleet

PROMPT, BLOCK = (5, 6, 7), 4


def _method() -> DraftModelMethod:
    model = SimulatedModel(PassTime(0.0, 0.0), agreement=0.7, candidates=0.6)
    return DraftModelMethod(TorchDraftRunner(SimulatedRunner(model, vocab_size=60, kv_bytes=1 << 20, max_sessions=64)))


def _drafted(method: DraftModelMethod, context: list[int]) -> tuple[int, ...]:
    """What the method drafts after a context, and its second best first token, in a session of its own."""
    method.open("oracle")
    job = DraftJob("oracle", context, BLOCK, GREEDY, num_candidates=2)
    while not job.done:
        method.advance([job])
    method.close("oracle")
    return (*job.tokens, job.candidates[0][1])


async def test_a_draft_after_an_outcome_is_there_when_it_is_asked_for() -> None:
    oracle = _method()
    *block, other = _drafted(oracle, list(PROMPT))

    def draft(draft_id: int, tokens: tuple[int, ...], assumed: tuple[int, ...], depth: int) -> Draft:
        log = TokenLog(tokens)
        catch_up = tokens[len(PROMPT) :]
        return Draft("s", 1, draft_id, len(log), log.hash_at(len(log)), depth, catch_up, assumed)

    async with drafter_replica(_method(), num_outcomes=8) as replica, replica.connect() as link:
        await link.ask(Open("s", 1, PROMPT, len(PROMPT), GREEDY), Opened)
        assert (await link.ask(draft(1, PROMPT, (), BLOCK), Drafted)).block.tokens == tuple(block)
        ahead = await link.ask(draft(2, PROMPT, tuple(block), BLOCK + 1), Drafted)
        assert len(ahead.block.tokens) == BLOCK + 1
        # The first draft is refused; what the target writes is the drafter's second best.
        rejected = (*PROMPT, other)
        found = await link.ask(draft(3, rejected, (), BLOCK), Drafted)
        assert found.block.tokens == _drafted(oracle, list(rejected))[:BLOCK]
        assert (found.timing.forward_us, found.method) == (0, "draft_model")
        assert len(found.confidences) == BLOCK
        assert _foreseen(replica.actor.meter.registry) == BLOCK
        # What nobody has foreseen is drafted.
        unforeseen = (*rejected, *found.block.tokens[:2], (found.block.tokens[2] + 1) % 60, 1)
        late = await link.ask(draft(4, unforeseen, (), BLOCK), Drafted)
        assert late.block.tokens == _drafted(oracle, list(unforeseen))[:BLOCK]
        assert late.timing.forward_us > 0
        assert _foreseen(replica.actor.meter.registry) == BLOCK


def _foreseen(registry: CollectorRegistry) -> float | None:
    return registry.get_sample_value("paceline_foreseen_draft_tokens_total")


class ForeseeingFleet(SimulatedFleet):
    """Drafters that prepare outcomes."""

    def _drafter_life(self, boot_id: str) -> Life[Any]:
        settings = DrafterSettings(
            model=str(self.folder),
            model_name=MODEL,
            simulated_pass_ms=0.2,
            simulated_candidates=0.6,
            prepared_outcomes=8,
            **PASSES,
        )
        replica = load_drafter(settings)
        self.registry = replica.actor.meter.registry
        return Life(replica.actor, DrafterService(drafter_door(), lambda: replica), None)


async def test_a_fleet_writes_the_same_text_and_finds_drafts_prepared(tmp_path: Path) -> None:
    found: dict[type, list[tuple[int, ...]]] = {}
    for kind in (SimulatedFleet, ForeseeingFleet):
        options: dict[str, Any] = {"method": object, "settings": {"draft_wait_floor_ms": 1000}}
        async with kind.start(tmp_path, cycle_law([0]), **options) as fleet, fleet.client() as client:
            starts = prompts(3, fleet.tokenizer.vocab_size)
            asked = [fleet.request(start, max_tokens=40, num_speculative_tokens=BLOCK) for start in starts]
            alone = await complete(client, asked[0])
            together = await asyncio.gather(*(complete(client, request) for request in asked))
            found[kind] = [alone.token_ids, *(run.token_ids for run in together)]
            if isinstance(fleet, ForeseeingFleet):
                assert (_foreseen(fleet.registry) or 0.0) > 0
    assert found[ForeseeingFleet] == found[SimulatedFleet]
