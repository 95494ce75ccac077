"""Features at a verifier and at a drafter over real gRPC. A row is the token that it belongs to, and its position."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest
from paceline_drafter.feature_store import FeatureStore
from paceline_verifier.verify_actor import VerifyActor

from paceline import wire
from paceline.drafting.method import DraftJob
from paceline.engine import feature_bytes
from paceline.engine.served_features import ServedFeatures
from paceline.engine.target import TargetEngine
from paceline.messages import (
    Close,
    Closed,
    Drafted,
    FeatureDtype,
    FeatureFormat,
    Features,
    Opened,
    Verified,
)
from paceline.speculation.tree import DraftTree
from paceline.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.fakes.scripted_drafter import ScriptedDrafter, perfect
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.replicas import (
    DrafterReplica,
    GatedRunner,
    VerifierReplica,
    Writer,
    drafter_replica,
    verifier_replica,
    wait_for,
)
from tests.integration.test_drafter_service import draft, law, opening

CYCLE = (3, 5, 7)
PROMPT = [3, 5, 7, 3, 5, 7, 3]
FORM = FeatureFormat("final_norm", 2)


def rows_of(tokens: Sequence[int], first_row: int = 0) -> Features:
    data = b"".join([struct.pack("<ff", tokens[row], row) for row in range(first_row, len(tokens))])
    return Features(first_row, len(tokens) - first_row, 2, FeatureDtype.FLOAT32, data)


def status(error: grpc.aio.AioRpcError) -> grpc.StatusCode:
    return error.code()


# --- the verifier -----------------------------------------------------------------------------------------------------


class ServingEngine(TargetEngine):
    """Serves what the toy stores."""

    def __init__(self, runner: ToyRunner, **arguments: Any) -> None:
        super().__init__(runner, served=ServedFeatures(runner, FORM), **arguments)


async def read(replica: VerifierReplica, *, first_row: int, num_rows: int, epoch: int = 1) -> list[Features]:
    stub = verifier_pb2_grpc.VerifierStub(replica.channel)
    request = verifier_pb2.ReadFeaturesRequest(session="s", epoch=epoch, first_row=first_row, num_rows=num_rows)
    return [wire.features_from_pb(response.features) async for response in stub.ReadFeatures(request)]


async def read_at_once(replica: VerifierReplica, first_row: int, num_rows: int) -> list[Features]:
    assert isinstance(replica.actor, VerifyActor)
    return await replica.actor.read_features("s", 1, first_row, num_rows)


async def test_rows_come_with_the_verdict_and_again_with_its_replay() -> None:
    async with (
        verifier_replica(ToyRunner(cycle_law(CYCLE)), engine_class=ServingEngine) as replica,
        replica.connect() as link,
    ):
        writer = Writer.start("s", PROMPT)
        await link.ask(writer.open(), Opened)
        first = writer.verify(features_from=0)
        verdict = await link.ask(first, Verified)
        assert verdict.features == rows_of(PROMPT)
        assert await link.ask(first, Verified) == verdict
        writer.log.extend(verdict.tokens)
        # The second path of a tree is accepted: its rows were moved together.
        block = DraftTree.from_paths([[9, 9], [7, 3, 8]])
        verdict = await link.ask(writer.verify(block, features_from=len(PROMPT)), Verified)
        assert verdict.tokens == (7, 3, 5)
        writer.log.extend(verdict.tokens)
        assert verdict.features == rows_of(writer.log.tokens[:-1], len(PROMPT))
        assert (await link.ask(writer.verify(), Verified)).features is None


async def test_rows_are_read_in_chunks_and_a_verdict_brings_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_bytes, "MAX_FEATURE_BYTES", 3 * 8)
    async with (
        verifier_replica(ToyRunner(cycle_law(CYCLE)), engine_class=ServingEngine) as replica,
        replica.connect() as link,
    ):
        writer = Writer.start("s", PROMPT)
        await link.ask(writer.open(), Opened)
        assert (await link.ask(writer.verify(features_from=0), Verified)).features == rows_of(PROMPT, 4)
        chunks = await read(replica, first_row=1, num_rows=6)
        assert chunks == [rows_of(PROMPT[:4], 1), rows_of(PROMPT, 4)]
        # All of them from between the same two passes: a session that waits for them decodes plainly.
        assert await read_at_once(replica, 1, 6) == chunks


async def test_no_more_than_a_few_chunks_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature_bytes, "MAX_FEATURE_BYTES", 8)
    async with (
        verifier_replica(ToyRunner(cycle_law(CYCLE)), engine_class=ServingEngine) as replica,
        replica.connect() as link,
    ):
        writer = Writer.start("s", 3 * PROMPT)
        await link.ask(writer.open(), Opened)
        await link.ask(writer.verify(), Verified)
        assert len(await read_at_once(replica, 0, 21)) == 8
        chunks = await read(replica, first_row=0, num_rows=21)
        assert chunks == [rows_of((3 * PROMPT)[: row + 1], row) for row in range(21)]


async def test_a_read_waits_for_the_pass_that_runs() -> None:
    runner = GatedRunner(cycle_law(CYCLE))
    async with verifier_replica(runner, engine_class=ServingEngine) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await link.ask(writer.open(), Opened)
        writer.log.extend((await link.ask(writer.verify(), Verified)).tokens)
        runner.gate.clear()
        await link.send(writer.verify())
        await runner.pass_entered()
        reading = asyncio.create_task(read(replica, first_row=0, num_rows=7))
        await replica.until(lambda: replica.actor.num_waiting == 1)
        assert not reading.done()
        runner.gate.set()
        assert await wait_for(reading) == [rows_of(PROMPT)]
        await link.receive(Verified)


@pytest.mark.parametrize(
    ("request_of", "code", "says"),
    [
        ({"num_rows": 8}, grpc.StatusCode.INVALID_ARGUMENT, "7 rows are computed"),
        ({"first_row": -1}, grpc.StatusCode.INVALID_ARGUMENT, "7 rows are computed"),
        ({"epoch": 2}, grpc.StatusCode.ABORTED, "epoch 1 owns session s"),
    ],
)
async def test_a_read_that_cannot_be_served_says_why(
    request_of: dict[str, int], code: grpc.StatusCode, says: str
) -> None:
    async with (
        verifier_replica(ToyRunner(cycle_law(CYCLE)), engine_class=ServingEngine) as replica,
        replica.connect() as link,
    ):
        with pytest.raises(grpc.aio.AioRpcError, match="not open") as caught:
            await read(replica, first_row=0, num_rows=1)
        assert status(caught.value) is grpc.StatusCode.NOT_FOUND
        writer = Writer.start("s", PROMPT)
        await link.ask(writer.open(), Opened)
        await link.ask(writer.verify(), Verified)
        with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
            await read(replica, **{"first_row": 0, "num_rows": 7} | request_of)
        assert status(caught.value) is code


async def test_a_verifier_that_serves_none_sends_none() -> None:
    async with verifier_replica(ToyRunner(cycle_law(CYCLE))) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await link.ask(writer.open(), Opened)
        assert (await link.ask(writer.verify(features_from=0), Verified)).features is None
        with pytest.raises(grpc.aio.AioRpcError, match="serves no features"):
            await read(replica, first_row=0, num_rows=1)


# --- the drafter ------------------------------------------------------------------------------------------------------

TOKENS = (1, 2, 4, 8, 9)


class Builder(ScriptedDrafter):
    """Drafts only with features, and notes with which.

    Attributes:
        seen: per draft the rows that it had.
    """

    def __init__(self) -> None:
        super().__init__(perfect(law), at_once=True)
        self.seen: list[list[list[float]]] = []

    def advance(self, jobs: Sequence[DraftJob]) -> None:
        for job in jobs:
            if job.features is None:
                job.done = True
            else:
                rows = job.features.read(job.features.first_row, job.features.num_rows)
                self.seen.append(rows.tolist())
        super().advance(jobs)


def seen_rows(tokens: Sequence[int], first_row: int = 0) -> list[list[float]]:
    return [[float(tokens[row]), float(row)] for row in range(first_row, len(tokens))]


async def write(replica: DrafterReplica, *chunks: Features, epoch: int = 1) -> int:
    stub = drafter_pb2_grpc.DrafterStub(replica.channel)
    requests = [
        drafter_pb2.WriteFeaturesRequest(session="s", epoch=epoch, features=wire.features_to_pb(chunk))
        for chunk in chunks
    ]
    return (await stub.WriteFeatures(iter(requests))).num_rows


async def test_a_draft_builds_on_the_rows_that_came_with_it_and_before() -> None:
    method, store = Builder(), FeatureStore(FORM)
    async with drafter_replica(method, features=store) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS[:3]), Opened)
        drafted = await link.ask(draft("s", 1, TOKENS[:3], features=rows_of(TOKENS[:2])), Drafted)
        assert (drafted.block.num_draft_tokens, drafted.features_len) == (4, 2)
        more = draft("s", 2, TOKENS, catch_up=TOKENS[3:], features=rows_of(TOKENS[:4], 1))
        drafted = await link.ask(more, Drafted)
        assert (drafted.block.num_draft_tokens, drafted.features_len) == (4, 4)
        assert method.seen == [seen_rows(TOKENS[:2]), seen_rows(TOKENS[:4])]
        assert store.num_bytes > 0
        await link.ask(Close("s", 1), Closed)
        assert store.num_bytes == 0


async def test_rows_that_are_lacking_can_be_brought_beside_the_stream() -> None:
    method = Builder()
    async with drafter_replica(method, features=FeatureStore(FORM)) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS), Opened)
        lacking = await link.ask(draft("s", 1, TOKENS, features=rows_of(TOKENS[:4], 3)), Drafted)
        assert (lacking.block.num_draft_tokens, lacking.features_len) == (0, 0)
        assert await write(replica, rows_of(TOKENS[:2]), rows_of(TOKENS[:3], 2)) == 3
        drafted = await link.ask(draft("s", 2, TOKENS, features=rows_of(TOKENS[:4], 3)), Drafted)
        assert (drafted.block.num_draft_tokens, drafted.features_len) == (4, 4)
        assert method.seen == [seen_rows(TOKENS[:4])]


async def test_a_session_that_starts_short_is_counted() -> None:
    method = Builder()
    async with drafter_replica(method, features=FeatureStore(FORM)) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS), Opened)
        short = draft("s", 1, TOKENS, features=rows_of(TOKENS[:4], 2), starts_short=True)
        assert (await link.ask(short, Drafted)).block.num_draft_tokens == 4
        assert method.seen == [seen_rows(TOKENS[:4], 2)]
        counted = replica.actor.meter.registry.get_sample_value
        assert counted("paceline_feature_short_starts_total") == 1
        assert (counted("paceline_feature_bytes") or 0) > 0


async def test_rows_of_tokens_that_turn_out_to_be_others_go() -> None:
    method = Builder()
    other = (1, 2, 6, 8, 9)
    async with drafter_replica(method, features=FeatureStore(FORM)) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS), Opened)
        await link.ask(draft("s", 1, TOKENS, features=rows_of(TOKENS[:4])), Drafted)
        drafted = await link.ask(draft("s", 2, other, catch_up=other[1:]), Drafted)
        assert (drafted.block.num_draft_tokens, drafted.features_len) == (0, 2)
        await link.ask(draft("s", 3, other, features=rows_of(other[:4], 2)), Drafted)
        assert method.seen[-1] == seen_rows(other[:4])
        # The same when another owner opens the session with them.
        await link.ask(opening("s", TOKENS, epoch=2), Opened)
        drafted = await link.ask(draft("s", 1, TOKENS, epoch=2), Drafted)
        assert drafted.features_len == 2


async def test_nobody_drafts_ahead_of_what_is_known() -> None:
    method = Builder()
    async with drafter_replica(method, features=FeatureStore(FORM)) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS), Opened)
        await link.ask(draft("s", 1, TOKENS, features=rows_of(TOKENS[:4]), assumed=(5,)), Drafted)
        assert method.seen == [seen_rows(TOKENS[:4])]  # the method sees that the last token's row is not there


@pytest.mark.parametrize(
    ("chunk", "changes", "code", "says"),
    [
        (rows_of(TOKENS), {"epoch": 2}, grpc.StatusCode.ABORTED, "epoch 1 owns session s"),
        (replace(rows_of(TOKENS), width=5, num_rows=2), {}, grpc.StatusCode.INVALID_ARGUMENT, "builds on 2"),
        (replace(rows_of(TOKENS), data=b"x"), {}, grpc.StatusCode.INVALID_ARGUMENT, "have 1 bytes; send 40"),
    ],
)
async def test_rows_that_cannot_be_taken_are_refused(
    chunk: Features, changes: dict[str, int], code: grpc.StatusCode, says: str
) -> None:
    async with drafter_replica(Builder(), features=FeatureStore(FORM)) as replica, replica.connect() as link:
        with pytest.raises(grpc.aio.AioRpcError, match="not open") as caught:
            await write(replica, rows_of(TOKENS))
        assert status(caught.value) is grpc.StatusCode.NOT_FOUND
        await link.ask(opening("s", TOKENS), Opened)
        with pytest.raises(grpc.aio.AioRpcError, match=says) as caught:
            await write(replica, chunk, **changes)
        assert status(caught.value) is code


async def test_a_method_that_builds_on_none_is_sent_none() -> None:
    async with drafter_replica(ScriptedDrafter(perfect(law))) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS), Opened)
        with pytest.raises(grpc.aio.AioRpcError, match="builds on no features"):
            await write(replica, rows_of(TOKENS))


@pytest.mark.parametrize(
    ("parents", "tokens"),
    [
        pytest.param([0, 0, 1], (4, 5, 6), id="a tree goes as it is"),
        pytest.param([0, 0, 1, 3], (4, 5, 6), id="too deep"),
        pytest.param([5, 0, 0], (), id="no tree"),
    ],
)
async def test_trees_are_proposed(parents: list[int], tokens: tuple[int, ...]) -> None:
    class Tree(ScriptedDrafter):
        def advance(self, jobs: Sequence[DraftJob]) -> None:
            for job in jobs:
                job.tokens, job.parents, job.done = [4, 5, 6, 7][: len(parents)], parents, True

    async with drafter_replica(Tree(perfect(law))) as replica, replica.connect() as link:
        await link.ask(opening("s", TOKENS), Opened)
        drafted = await link.ask(draft("s", 1, TOKENS, depth=2), Drafted)
        assert drafted.block == DraftTree(tokens, tuple(parents[: len(tokens)]))
