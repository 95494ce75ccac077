"""Rows of verifier and drafter after every kind of round, over the wire.

At rest, with committed length L: verifier rows = L - 1; of the drafter's rows at most L - 1 are stable.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.messages import Close, Closed, Draft, Drafted, Opened, SamplingParams, Verified
from paceline.speculation.tree import DraftTree
from tests.fakes.scripted_drafter import Script, ScriptedDrafter, perfect, wrong_at
from tests.fakes.toy_runner import ToyRunner, cycle_law
from tests.integration.replicas import Writer, drafter_replica, verifier_replica

CYCLE = (3, 5, 7, 11, 13)
PROMPT = (1, 2, 4)
DEPTH = 4
VOCAB = 64


def law(context: Sequence[int], _sampling: SamplingParams) -> int:
    return CYCLE[len(context) % len(CYCLE)]


def as_chain(tokens: tuple[int, ...]) -> DraftTree:
    return DraftTree.chain(tokens)


def as_tree(tokens: tuple[int, ...]) -> DraftTree:
    """The drafts with a wrong sibling before each, so that an accepted path skips slots."""
    paths = [[*tokens[:depth], (tokens[depth] + 20) % VOCAB] for depth in range(len(tokens))]
    return DraftTree.from_paths([*paths, list(tokens)])


@pytest.mark.parametrize("shape", [as_chain, as_tree])
@pytest.mark.parametrize(
    ("script", "accepted"),
    [
        (perfect(law), DEPTH),
        (wrong_at(law, 0, VOCAB), 0),
        (wrong_at(law, 2, VOCAB), 2),
        (wrong_at(law, DEPTH - 1, VOCAB), DEPTH - 1),
    ],
    ids=["all", "none", "half", "all but one"],
)
async def test_rows_after_each_round(script: Script, accepted: int, shape: object) -> None:
    make = as_chain if shape is as_chain else as_tree
    drafter = ScriptedDrafter(script)
    runner = ToyRunner(cycle_law(CYCLE, VOCAB), VOCAB)
    async with (
        verifier_replica(runner) as target,
        drafter_replica(drafter) as helper,
        target.connect() as verify,
        helper.connect() as draft,
    ):
        writer = Writer.start("s", PROMPT)
        await verify.send(writer.open(), writer.verify())
        await verify.receive(Opened)
        verdict = await verify.receive(Verified)
        await draft.ask(writer.open(), Opened)
        for turn in range(6):
            catch_up = verdict.tokens
            writer.log.extend(verdict.tokens)
            length = len(writer.log)
            assert verdict.kv_len == length - 1

            drafted = await draft.ask(
                Draft("s", 1, turn + 1, length, writer.log.hash_at(length), DEPTH, catch_up=catch_up), Drafted
            )
            # Rows of committed tokens are stable; those of its own drafts go as far as the last but one.
            assert drafted.kv_len == length + DEPTH - 1
            assert drafter.contexts[-1] == tuple(writer.log.tokens)

            verdict = await verify.ask(writer.verify(make(drafted.block.tokens)), Verified)
            assert len(verdict.accepted_path) == accepted
            assert len(verdict.tokens) == accepted + 1
            assert verdict.tokens == tuple(CYCLE[index % 5] for index in range(length, length + accepted + 1))
        await verify.ask(Close("s", 1), Closed)
        await draft.ask(Close("s", 1), Closed)
    assert drafter.fed == {}


async def test_textbook_example_over_the_wire() -> None:
    """A block of five: all accepted gives six tokens; the fourth wrong gives three and the target's own fourth."""
    async with verifier_replica(ToyRunner(cycle_law(CYCLE))) as replica, replica.connect() as link:
        writer = Writer.start("s", PROMPT)
        await link.send(writer.open(), writer.verify())
        await link.receive(Opened)
        writer.log.extend((await link.receive(Verified)).tokens)
        block = DraftTree.chain((13, 3, 5, 7, 11))
        verdict = await link.ask(writer.verify(block), Verified)
        assert (verdict.accepted_path, verdict.tokens) == ((1, 2, 3, 4, 5), (13, 3, 5, 7, 11, 13))
        writer.log.extend(verdict.tokens)
        verdict = await link.ask(writer.verify(DraftTree.chain((3, 5, 7, 60, 13))), Verified)
        assert (verdict.accepted_path, verdict.tokens) == ((1, 2, 3), (3, 5, 7, 11))
        await link.ask(Close("s", 1), Closed)
