"""Pages of rows ahead are drafts': whoever needs pages takes them back before anyone loses rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from paceline.engine.kv.sequence import RowsAhead, SequenceKV
from paceline.engine.scheduler import Scheduler
from paceline.engine.self_draft import SelfDraft, SelfDraftJob
from paceline.engine.target import TargetEngine
from paceline.engine.wants import Want
from paceline.errors import CapacityExceeded
from paceline.speculation.tree import DraftTree
from tests.fakes.toy_runner import ToyRunner, hash_law
from tests.unit.engine.kv.rows import make_pool
from tests.unit.engine.rounds import Owner, run

PAGE_TOKENS = 2


def run_ahead(kv: SequenceKV, num_rows: int) -> None:
    """Rows as a pass through the first layers leaves them."""
    kv.reserve(num_rows)
    kv.ahead = RowsAhead(1, [7] * num_rows, [torch.zeros(1, 1)] * num_rows)


def fill(kv: SequenceKV, num_rows: int) -> None:
    kv.reserve(num_rows)
    kv.commit(num_rows)


def test_a_sequence_that_lacks_pages_takes_those_of_rows_ahead_and_preempts_nobody() -> None:
    pool = make_pool(6, PAGE_TOKENS)
    scheduler = Scheduler(pool)
    first, second = (scheduler.register(pool.new_sequence()) for _ in range(2))
    fill(first.kv, 3)
    fill(second.kv, 2)
    run_ahead(first.kv, 5)  # four pages; the second has one, one is free
    pool.check_integrity()
    plan = scheduler.plan([Want(second, range(4), DraftTree.chain([1, 2]))])
    (part,) = plan.parts
    assert part.sequence.tree.num_draft_tokens == 2, "a draft is worth as much as another"
    assert first.kv.ahead is None
    assert (len(first.kv.pages), first.kv.num_rows, scheduler.stats.preemptions) == (2, 3, 0)
    part.sequence.kv.commit(2)
    pool.check_integrity()


def test_rows_ahead_of_a_sequence_in_the_pass_stay() -> None:
    pool = make_pool(5, PAGE_TOKENS)
    scheduler = Scheduler(pool)
    first, second = (scheduler.register(pool.new_sequence()) for _ in range(2))
    fill(first.kv, 3)
    fill(second.kv, 2)
    run_ahead(first.kv, 3)
    drafted, other = DraftTree.chain([7, 7]), DraftTree.chain([1, 1, 1])
    plan = scheduler.plan([Want(first, range(4), drafted), Want(second, range(4), other)])
    assert [part.sequence.tree.num_draft_tokens for part in plan.parts] == [2, 0]
    assert first.kv.ahead is not None


class Ahead:
    """A drafter that leaves rows ahead and proposes nothing."""

    method, taps, weights_bytes, kv_bytes = "ahead", None, 0, 0

    def draft(self, jobs: Sequence[SelfDraftJob]) -> list[SelfDraft]:
        for job in jobs:
            run_ahead(job.kv, 8)
        return [SelfDraft()] * len(jobs)

    def forget(self, session: str) -> None:
        """Holds nothing."""


def test_a_prompt_is_admitted_where_only_drafts_are_in_its_way() -> None:
    runner = ToyRunner(hash_law(12, seed=1), 12, page_tokens=PAGE_TOKENS, num_pages=8, max_model_len=16)
    engine = TargetEngine(runner, self_drafter=Ahead())
    first = Owner(engine, (1, 2, 3))
    assert engine.submit(replace(first.command(), next_depth=4)) is None
    run(engine)
    assert engine.kv_pages_in_use == 6
    Owner(engine, (4,) * 10, name="second").verify()
    assert engine.kv_len("session") == 3
    with pytest.raises(CapacityExceeded):
        Owner(engine, (5,) * 4, name="third")
    engine.check_integrity()


@pytest.mark.parametrize("damage", ["pages", "shared", "hidden"])
def test_damage_is_found(damage: str) -> None:
    pool = make_pool(6, PAGE_TOKENS)
    kv = pool.new_sequence()
    fill(kv, 3)
    run_ahead(kv, 4)
    pool.check_integrity()
    assert kv.ahead is not None
    if damage == "pages":
        kv.ahead.tokens += [1, 2]
        kv.ahead.hidden += kv.ahead.hidden[:2]
    elif damage == "hidden":
        kv.ahead.hidden.pop()
    else:
        other = pool.new_sequence()
        other.pages = [kv.pages[-1]]
        pool.hold(kv.pages[-1])
    with pytest.raises(AssertionError, match="ahead"):
        pool.check_integrity()
