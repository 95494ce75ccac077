"""The verifier over real gRPC: rounds, prefixes, epochs, and blocks that are no good."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from paceline.engine.target import TargetOptions
from paceline.messages import (
    Close,
    Closed,
    Evicted,
    Failed,
    NeedTokens,
    Opened,
    SamplingParams,
    Verified,
    VerifierCommand,
    VerifierEvent,
    Verify,
)
from paceline.runtime.replica_actor import ActorLimits
from paceline.speculation.tree import DraftTree
from paceline.token_log import TokenLog
from paceline.v1 import common_pb2, verifier_pb2
from tests.fakes.toy_runner import ToyRunner, cycle_law, hash_law, poisoned_law
from tests.integration.replicas import GatedRunner, Link, Writer, verifier_replica

CYCLE = (3, 5, 7, 11, 13)
PROMPT = (1, 2, 4)
VerifierLink = Link[VerifierCommand, VerifierEvent]


def cycle_from(position: int, count: int) -> tuple[int, ...]:
    """What the cycle's law writes at positions [position, position + count)."""
    return tuple(CYCLE[index % len(CYCLE)] for index in range(position, position + count))


def toy() -> GatedRunner:
    return GatedRunner(cycle_law(CYCLE))


async def start(link: VerifierLink, writer: Writer) -> Verified:
    """Opens a session and runs its first, plain round."""
    await link.send(writer.open(), writer.verify())
    await link.receive(Opened)
    verdict = await link.receive(Verified)
    writer.log.extend(verdict.tokens)
    return verdict


async def test_plain_round() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        verdict = await start(link, writer)
        assert verdict.tokens == cycle_from(3, 1)
        assert verdict.kv_len == 3
        assert (verdict.timing.batch_sessions, verdict.timing.batch_tokens) == (1, 3)
        assert verdict.timing.total_us >= verdict.timing.forward_us > 0
        assert await link.ask(Close("s", 1), Closed) == Closed("s", 1)


async def test_prompt_longer_than_a_pass_and_its_first_block() -> None:
    runner = toy()
    options = TargetOptions(max_batch_tokens=8, max_draft_tokens=4)
    async with verifier_replica(runner, options=options) as replica, replica.connect() as link:
        writer = Writer.start("s", tuple(range(30)))
        await link.send(writer.open(), writer.verify(DraftTree.chain(cycle_from(30, 2))))
        await link.receive(Opened)
        verdict = await link.receive(Verified)
        assert verdict.tokens == cycle_from(30, 3)
        assert verdict.kv_len == 32
        assert len(runner.passes) > 3


async def test_sessions_of_one_pass_share_a_frame() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writers = [Writer.start(f"s{number}", PROMPT) for number in range(4)]
        for writer in writers:
            await start(link, writer)
        link.frames.clear()
        await link.send(*(writer.verify() for writer in writers))
        verdicts = [await link.receive(Verified) for _ in writers]
        assert [verdict.session for verdict in verdicts] == [writer.name for writer in writers]
        assert link.frames == [4]
        assert runner.passes[-1] == (1, 1, 1, 1)
        assert verdicts[0].timing.batch_sessions == 4


# --- prefixes -------------------------------------------------------------------------------------------------------


async def test_replica_that_is_behind_catches_up() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        writer.log.extend((40, 41, 42))
        need = await link.ask(writer.verify(), NeedTokens)
        assert need == NeedTokens("s", 1, 2, 4)
        writer.round -= 1
        verdict = await link.ask(writer.verify(catch_up=(40, 41, 42)), Verified)
        assert verdict.tokens == cycle_from(7, 1)
        assert verdict.kv_len == 7
        assert verdict.round == 2


async def test_replica_that_is_ahead_crops() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        verdict = await link.ask(writer.verify(DraftTree.chain(cycle_from(4, 3))), Verified)
        assert verdict.kv_len == 7
        writer.log.extend(verdict.tokens[:1])  # the generation's own rules kept one of four
        verdict = await link.ask(writer.verify(), Verified)
        assert verdict.tokens == cycle_from(5, 1)
        assert verdict.kv_len == 5
        assert runner.passes[-1] == (1,)


async def test_replica_that_disagrees_needs_everything() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        writer.log = TokenLog((9, 8, 7, 6))
        need = await link.ask(writer.verify(), NeedTokens)
        assert need.have_len == 0
        writer.round -= 1
        verdict = await link.ask(writer.verify(catch_up=(9, 8, 7, 6)), Verified)
        assert verdict.tokens == cycle_from(4, 1)


async def test_unknown_session_is_evicted() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        assert await link.ask(Writer.start("s", PROMPT).verify(), Evicted) == Evicted("s", 1, 1)
        assert await link.ask(Close("s", 1), Closed) == Closed("s", 1)


# --- rounds ---------------------------------------------------------------------------------------------------------


async def test_replayed_late_and_future_rounds() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        second = writer.verify(DraftTree.chain(cycle_from(4, 2)))
        verdict = await link.ask(second, Verified)
        num_passes = len(runner.passes)
        assert await link.ask(second, Verified) == verdict
        first = Verify("s", 1, 1, 3, TokenLog(PROMPT).hash_at(3))
        await link.send(first)  # late: no answer
        assert await link.ask(second, Verified) == verdict
        assert len(runner.passes) == num_passes
        writer.log.extend(verdict.tokens)
        writer.round = 6  # numbers may be skipped
        assert (await link.ask(writer.verify(), Verified)).round == 7


async def test_duplicates_of_a_running_round_run_once() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        runner.gate.clear()
        command = writer.verify()
        await link.send(command, command)
        await runner.pass_entered()
        await link.send(command)
        runner.gate.set()
        verdict = await link.receive(Verified)
        assert await link.receive(Verified) == verdict  # the one that came while the pass ran
        assert await link.ask(command, Verified) == verdict
        assert len(runner.passes) == 2


async def test_second_verify_beside_a_running_one_is_refused() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        await link.send(writer.verify(), writer.verify())
        refused = await link.receive(Failed)
        assert (refused.command_id, refused.failure.code, refused.failure.field) == (3, "invalid_argument", "round")
        assert (await link.receive(Verified)).round == 2


async def test_need_tokens_and_failed_do_not_consume_the_round() -> None:
    law = poisoned_law(cycle_law(CYCLE), lambda prefix: prefix[-1] == 60)
    async with verifier_replica(ToyRunner(law)) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        good = writer.log.slice(0, 4)
        writer.log.extend((60,))
        bad = writer.verify(catch_up=(60,))
        assert (await link.ask(bad, Failed)).failure.code == "model_error"
        writer.log = TokenLog(good)
        writer.round -= 1
        assert (await link.ask(writer.verify(), Verified)).round == 2


# --- epochs ---------------------------------------------------------------------------------------------------------


async def test_older_epoch_has_no_effect_and_newer_takes_over() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as old, replica.connect() as new:
        writer = Writer.start("s", PROMPT)
        await start(old, writer)
        heir = Writer("s", TokenLog(writer.log.tokens), epoch=2)
        verdict = await new.ask(heir.verify(), Verified)
        assert (verdict.epoch, verdict.round, verdict.tokens) == (2, 1, cycle_from(4, 1))
        for command in (writer.verify(), writer.open(), Close("s", 1)):
            assert (await old.ask(command, Failed)).failure.code == "fenced"
        heir.log.extend(verdict.tokens)
        assert (await new.ask(heir.verify(), Verified)).tokens == cycle_from(5, 1)
        await new.ask(Close("s", 2), Closed)
        assert replica.actor.num_sessions == 0


async def test_open_of_a_newer_epoch_replaces_the_session_and_its_running_verify() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as old, replica.connect() as new:
        writer = Writer.start("s", PROMPT)
        await start(old, writer)
        runner.gate.clear()
        await old.send(writer.verify())
        await runner.pass_entered()
        heir = Writer("s", TokenLog((*PROMPT, 50)), epoch=2)
        await new.send(heir.open(), heir.verify())
        runner.gate.set()
        await new.receive(Opened)
        assert (await new.receive(Verified)).tokens == cycle_from(4, 1)


async def test_open_again_in_the_same_epoch_keeps_rows_and_rounds() -> None:
    runner = toy()
    async with verifier_replica(runner) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        opening = writer.open()
        verdict = await start(link, writer)
        assert (await link.ask(opening, Opened)).kv_len == 3
        writer.round -= 1
        first = Verify("s", 1, 1, 3, writer.log.hash_at(3))
        assert await link.ask(first, Verified) == verdict
        assert len(runner.passes) == 1


# --- commands that make no sense ------------------------------------------------------------------------------------


async def test_malformed_command_hurts_itself_only() -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await start(link, writer)
        bad_tree = verifier_pb2.Verify(
            session="s", epoch=1, round=9, base_len=4, block=common_pb2.DraftTree(tokens=[1, 2], parents=[0, 5])
        )
        good = verifier_pb2.Verify(session="s", epoch=1, round=2, base_len=4, prefix_hash=writer.log.hash_at(4))
        commands = [
            verifier_pb2.VerifierCommand(),
            verifier_pb2.VerifierCommand(verify=bad_tree),
            verifier_pb2.VerifierCommand(verify=good),
        ]
        await link.send_raw(verifier_pb2.VerifierConnectRequest(commands=commands))
        empty = await link.receive(Failed)
        assert (empty.session, empty.failure.field) == ("", "command")
        refused = await link.receive(Failed)
        assert (refused.session, refused.command_id, refused.failure.field) == ("s", 9, "block.parents")
        assert (await link.receive(Verified)).tokens == cycle_from(4, 1)


@pytest.mark.parametrize(
    ("writer", "field"),
    [
        (Writer.start("s", (1, 64)), "prompt"),
        (Writer.start("s", PROMPT, SamplingParams(temperature=float("nan"))), "temperature"),
        (Writer.start("s", PROMPT, SamplingParams(stop_token_ids=(64,))), "stop_token_ids"),
        (Writer.start("s", tuple([1] * 512)), "prompt"),
    ],
)
async def test_open_that_cannot_work_is_refused_by_field(writer: Writer, field: str) -> None:
    async with verifier_replica(toy()) as replica, replica.connect() as link:
        refused = await link.ask(writer.open(), Failed)
        assert (refused.failure.code, refused.failure.field) == ("invalid_argument", field)
        await start(link, Writer.start("next", PROMPT))
        await link.ask(Close("next", 1), Closed)


async def test_session_slots_are_bounded() -> None:
    async with verifier_replica(toy(), limits=ActorLimits(max_sessions=2)) as replica, replica.connect() as link:
        for name in ("a", "b"):
            await link.ask(Writer.start(name, PROMPT).open(), Opened)
        refused = await link.ask(Writer.start("c", PROMPT).open(), Failed)
        assert refused.failure.code == "capacity_exceeded"
        await link.ask(Close("a", 1), Closed)
        await link.ask(Writer.start("c", PROMPT).open(), Opened)


# --- blocks that are no good ----------------------------------------------------------------------------------------


def _blocks(source: random.Random, future: Sequence[int]) -> DraftTree:
    """Garbage, out of the vocabulary, too long, a tree with the truth in it, or the truth."""
    match source.randrange(6):
        case 0:
            return DraftTree.chain([source.randrange(16) for _ in range(source.randrange(9))])
        case 1:
            return DraftTree.chain([*future[: source.randrange(3)], source.choice((-1, 16, 2**31 - 1)), *future])
        case 2:
            return DraftTree.chain([*future, *(source.randrange(16) for _ in range(200))])
        case 3:
            return DraftTree.from_paths([[source.randrange(16), 3], future[:3], [future[0], source.randrange(16)]])
        case 4:
            return DraftTree.chain(future[1:])  # out of order: as if a token had been lost
    return DraftTree.chain(future)


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, seed=5)])
async def test_bad_blocks_and_replays_change_no_output(sampling: SamplingParams) -> None:
    length = 40
    async with verifier_replica(ToyRunner(hash_law(vocab_size=16, seed=2), 16)) as replica, replica.connect() as link:
        plain = Writer.start("plain", PROMPT, sampling)
        await start(link, plain)
        while len(plain.log) < length + 8:
            plain.log.extend((await link.ask(plain.verify(), Verified)).tokens)
        source = random.Random(1)
        writer = Writer.start("speculating", PROMPT, sampling)
        verdict = await start(link, writer)
        while len(writer.log) < length:
            future = plain.log.slice(len(writer.log), len(writer.log) + 4)
            command = writer.verify(_blocks(source, future))
            verdict = await link.ask(command, Verified)
            if source.random() < 0.3:
                assert await link.ask(command, Verified) == verdict  # a duplicate
            assert verdict.kv_len == len(writer.log) + len(verdict.tokens) - 1
            writer.log.extend(verdict.tokens)
        assert list(writer.log.tokens) == list(plain.log.tokens[: len(writer.log)])
