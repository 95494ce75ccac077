"""Heads in drafters of their own: the target's features travel over real gRPC, and placement changes no token."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import pytest
from paceline_drafter.load import load_replica as load_drafter
from paceline_drafter.servicer import DrafterService, drafter_door
from paceline_drafter.settings import DrafterSettings
from paceline_gateway import feature_book
from paceline_gateway.effects import Lane
from paceline_verifier.load import load_replica as load_verifier
from paceline_verifier.servicer import VerifierService, verifier_door
from paceline_verifier.settings import VerifierSettings
from paceline_verifier.verify_actor import VerifyActor

from paceline.engine import feature_bytes
from paceline.errors import InvalidArgument, PacelineError
from paceline.generation import Chunk, Finished
from paceline.messages import Features, SamplingParams
from tests.fakes.tiny_models import write_model
from tests.fakes.toy_runner import cycle_law
from tests.integration.fleet import MODEL, TIMEOUT_S, Fleet, FleetOptions, Run, generate, until
from tests.integration.node import Life
from tests.unit.drafting.checkpoints import samples
from tests.unit.drafting.test_self_draft_build import TARGET

HEADS: dict[str, Callable[[], samples.Sample]] = {
    "medusa": samples.medusa_v1,
    "eagle": samples.eagle,
    "eagle3": samples.eagle31,
}
COOL = SamplingParams(temperature=0.0, ignore_eos=True)
HOT = SamplingParams(temperature=1.0, ignore_eos=True)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LONG = [(7 * index * index + index) % (samples.VOCAB - 1) for index in range(60)]


class HeadFleet(Fleet):
    """Replicas that are loaded from settings, as services are. The target is tiny and random."""

    def __init__(self, folder: Path, verifier: dict[str, Any], drafter: dict[str, Any], num_verifiers: int = 1) -> None:
        options = FleetOptions(
            method=cast("Any", object) if drafter else None,
            write_model=lambda target: write_model(target, TARGET),
            settings={"draft_wait_floor_ms": 1000, "return_window_ms": 50},
            num_verifiers=num_verifiers,
        )
        self._of_verifier, self._of_drafter = verifier, drafter
        super().__init__(folder, cycle_law([0]), options)

    def _verifier_life(self, boot_id: str) -> Life[Any]:
        settings = VerifierSettings(
            model=str(self.folder),
            model_name=MODEL,
            kv_cache_bytes=1 << 20,
            self_draft_kv_bytes=1 << 20,
            gather_window_ms=0,
            **self._of_verifier,
        )
        replica = load_verifier(settings)
        return Life(replica.actor, VerifierService(verifier_door(), lambda: replica), None)

    def _drafter_life(self, boot_id: str) -> Life[Any]:
        settings = DrafterSettings(model=str(self.folder), model_name=MODEL, kv_cache_bytes=1 << 20, **self._of_drafter)
        replica = load_drafter(settings)
        return Life(replica.actor, DrafterService(drafter_door(), lambda: replica), None)


@contextlib.asynccontextmanager
async def started(fleet: HeadFleet) -> AsyncIterator[HeadFleet]:
    async with contextlib.AsyncExitStack() as stack:
        for node in fleet.nodes:
            stack.push_async_callback(node.close)
            await node.boot()
        fleet.address = await stack.enter_async_context(fleet._serve(fleet.gateway))
        yield fleet


def head_of(folder: Path, method: str) -> str:
    return str(HEADS[method]().write(folder / method))


def in_the_pool(folder: Path, method: str, num_verifiers: int = 1, **drafter: Any) -> HeadFleet:
    head = head_of(folder, method)
    served = head if method == "eagle3" else "final_norm"
    return HeadFleet(
        folder, {"served_features": served}, {"method": method, "draft_head": head, **drafter}, num_verifiers
    )


async def run_all(fleet: HeadFleet, prompt: list[int], **fields: Any) -> list[Run]:
    async with fleet.client() as client:
        return [
            await generate(client, fleet.request(prompt, max_tokens=24, sampling=sampling, seed=11, **fields))
            for sampling in (COOL, HOT)
        ]


@pytest.mark.parametrize("method", HEADS)
async def test_both_placements_give_the_tokens_of_plain_decoding(tmp_path: Path, method: str) -> None:
    tree = {"eagle_topk": 2}
    async with started(in_the_pool(tmp_path, method, **tree)) as fleet:
        plain = await run_all(fleet, PROMPT, num_speculative_tokens=0)
        pool = await run_all(fleet, PROMPT)
    inside = HeadFleet(
        tmp_path / "inside", {"self_draft_method": method, "self_draft_model": head_of(tmp_path, method), **tree}, {}
    )
    async with started(inside) as fleet, fleet.client() as client:
        verifier = await run_all(fleet, PROMPT, method=method)
        (served,) = await client.list_models()
        elsewhere = await generate(client, fleet.request(PROMPT, method="ngram"))
    assert served.methods == (method,)
    assert "no drafter of method 'ngram' is ready" in elsewhere.started.warnings[0]
    assert elsewhere.evidence.draft_tokens == 0
    tokens = [run.tokens for run in plain]
    # The same drafts are made of the same rows, wherever that is.
    assert [run.evidence.accepted_per_position for run in pool] == [
        run.evidence.accepted_per_position for run in verifier
    ]
    assert [run.tokens for run in pool] == [run.tokens for run in verifier] == tokens
    for run in [*pool, *verifier]:
        assert run.started.warnings == ()
        assert run.evidence.methods == (method,)
        assert run.evidence.ahead_hits == 0
        # Every round has a block but the one that reads the prompt, and the last if it has no room for a draft.
        rounds = sum(run.evidence.drafted_per_position[:1])
        assert run.evidence.target_passes - rounds <= 2
        assert run.evidence.drafter_memory_bytes > 0
    for run in verifier:
        assert run.evidence.drafter == ""


async def test_features_of_a_long_prompt_travel_beside_the_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = Reads(monkeypatch)
    async with started(in_the_pool(tmp_path, "eagle3")) as fleet, fleet.client() as client:
        plain = await generate(client, fleet.request(LONG, sampling=HOT, seed=11, num_speculative_tokens=0))
        run = await generate(client, fleet.request(LONG, sampling=HOT, seed=11))
        drafter = fleet.drafters[0].alive.actor
        assert drafter.meter.registry.get_sample_value("paceline_feature_short_starts_total") == 0
    assert run.tokens == plain.tokens
    assert run.evidence.methods == ("eagle3",)
    # All 60 rows of the prompt, in pieces of 8: those that came with its verdict make room for newer ones meanwhile.
    assert reads.rows[:8] == [range(start, min(start + 8, 60)) for start in range(0, 60, 8)]


class Reads:
    """Stands before the verifiers' reading of features.

    Attributes:
        rows: what was read.
        gate: cleared, reads wait.
        error: raised instead; None for none.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[range] = []
        self.waiting = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.error: PacelineError | None = None
        self._read = VerifyActor.read_features
        reads = self

        async def read(actor: VerifyActor, session: str, epoch: int, first_row: int, num_rows: int) -> list[Features]:
            return await reads.read(actor, session, epoch, first_row, num_rows)

        for module in (feature_bytes, feature_book):
            monkeypatch.setattr(module, "MAX_FEATURE_BYTES", 8 * samples.HIDDEN * 4)
        monkeypatch.setattr(VerifyActor, "read_features", read)

    async def read(self, actor: VerifyActor, session: str, epoch: int, first_row: int, num_rows: int) -> list[Features]:
        self.waiting += 1
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        messages = await self._read(actor, session, epoch, first_row, num_rows)
        self.rows += [range(features.first_row, features.end) for features in messages]
        return messages


async def test_decoding_goes_on_plainly_while_features_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    reads.gate.clear()
    async with started(in_the_pool(tmp_path, "eagle3")) as fleet, fleet.client() as client:
        plain = await generate(client, fleet.request(LONG, sampling=HOT, seed=11, num_speculative_tokens=0))
        tokens: list[int] = []
        async for event in client.generate(fleet.request(LONG, sampling=HOT, seed=11), timeout_s=TIMEOUT_S):
            if isinstance(event, Chunk):
                tokens += event.token_ids
                if len(tokens) > 4:
                    reads.gate.set()
        assert isinstance(event, Finished)
    assert tokens == plain.tokens
    assert event.evidence.draft_tokens > 0
    assert event.evidence.draft_wait_ms < 1000


async def test_features_that_cannot_be_read_are_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Reads(monkeypatch)
    reads.error = InvalidArgument("the rows were given to somebody else")
    async with started(in_the_pool(tmp_path, "eagle3")) as fleet, fleet.client() as client:
        plain = await generate(client, fleet.request(LONG, sampling=HOT, seed=11, num_speculative_tokens=0))
        run = await generate(client, fleet.request(LONG, sampling=HOT, seed=11))
        counted = fleet.drafters[0].alive.actor.meter.registry.get_sample_value
        assert counted("paceline_feature_short_starts_total") == 1
    assert run.tokens == plain.tokens
    assert run.evidence.draft_tokens > 0


@pytest.mark.parametrize("lane", list(Lane))
async def test_a_replica_that_dies_while_features_travel_costs_drafts_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lane: Lane
) -> None:
    reads = Reads(monkeypatch)
    reads.gate.clear()
    fleet = in_the_pool(tmp_path, "eagle3", num_verifiers=2)
    async with started(fleet), fleet.client() as client:
        plain = await generate(client, fleet.request(LONG, sampling=HOT, seed=11, num_speculative_tokens=0))
        running = asyncio.create_task(generate(client, fleet.request(LONG, sampling=HOT, seed=11, max_tokens=40)))
        await until(lambda: reads.waiting > 0)
        nodes = fleet.drafters if lane is Lane.DRAFTER else fleet.verifiers
        await next(node for node in nodes if node.num_sessions).kill()
        reads.gate.set()
        run = await running
    assert run.tokens[:20] == plain.tokens


async def test_a_head_of_another_target_or_training_is_refused(tmp_path: Path) -> None:
    served, own = samples.eagle31(), samples.eagle31()
    own.tensors["fc.weight"] = own.tensors["fc.weight"] + 1
    fleet = HeadFleet(
        tmp_path,
        {"served_features": str(served.write(tmp_path / "served"))},
        {"method": "eagle3", "draft_head": str(own.write(tmp_path / "own"))},
    )
    async with started(fleet):
        run = (await run_all(fleet, PROMPT))[0]
    assert run.evidence.draft_tokens == 0
    assert "builds on the target's features" in run.started.warnings[0]
    assert "served_features" in run.started.warnings[0]
