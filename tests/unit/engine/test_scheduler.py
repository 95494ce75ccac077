"""The scheduler's policy, on a runner that insists on the right row at every place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from paceline.engine.scheduler import Scheduler, SchedulerOptions
from paceline.engine.wants import Holder, Plan, Want
from paceline.errors import ConfigurationError
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree
from tests.fakes.toy_runner import ToyRunner, hash_law

VOCAB = 16
LAW = hash_law(VOCAB, seed=9)
PAGE = 4


@dataclass(slots=True)
class Story:
    """A greedy generation: its tokens, and its place in the scheduler."""

    name: str
    holder: Holder
    tokens: list[int]
    length: int
    block: DraftTree = EMPTY_BLOCK

    @property
    def done(self) -> bool:
        return len(self.tokens) >= self.length


@dataclass(slots=True)
class Desk:
    """Everyone who wants something, in the order of their wants, and a clock that stands still."""

    scheduler: Scheduler
    runner: ToyRunner
    now_s: list[float]
    all: dict[str, Story] = field(default_factory=dict)
    queue: list[str] = field(default_factory=list)

    @classmethod
    def make(cls, num_pages: int = 100, budget: int = 16, share: float = 0.25, *, max_model_len: int = 400) -> Desk:
        runner = ToyRunner(LAW, VOCAB, num_pages=num_pages, page_tokens=PAGE, max_model_len=max_model_len)
        now_s = [0.0]
        options = SchedulerOptions(budget, share, idle_preempt_s=1.0)
        return cls(Scheduler(runner.pool, options, clock=lambda: now_s[0]), runner, now_s)

    def add(self, name: str, prompt: Sequence[int], num_tokens: int = 1, *, wants: bool = True) -> Story:
        holder = self.scheduler.register(self.runner.new_sequence())
        self.all[name] = Story(name, holder, list(prompt), len(prompt) + num_tokens)
        if wants:
            self.queue.append(name)
        return self.all[name]

    def plan(self) -> Plan:
        return self.scheduler.plan([Want(story.holder, story.tokens, story.block) for story in self.wanting()])

    def wanting(self) -> list[Story]:
        return [self.all[name] for name in self.queue]

    def step(self) -> dict[str, int]:
        """One pass; tokens fed by sequence, in the order of the pass. Whoever got a token wants the next one."""
        wanting, plan = self.wanting(), self.plan()
        parts = [part.sequence for part in plan.parts]
        assert sum(part.num_tokens for part in parts) <= self.scheduler.options.max_batch_tokens
        for part, logits in zip(plan.parts, self.runner.forward(parts), strict=True):
            story = wanting[part.index]
            kv = story.holder.kv
            kv.commit(len(part.sequence.tokens))
            if part.complete:
                assert logits.shape[0] == 1 + part.sequence.tree.num_draft_tokens
                story.tokens.append(int(logits[0].argmax()))
                self.queue.remove(story.name)
                if not story.done:
                    self.queue.append(story.name)
            kv.publish(story.tokens)
        self.runner.pool.check_integrity()
        return {wanting[part.index].name: part.sequence.num_tokens for part in plan.parts}

    def run(self, limit: int = 1000) -> list[dict[str, int]]:
        """All passes until nobody wants anything."""
        passes = []
        while self.queue:
            passes.append(self.step())
            assert len(passes) < limit, "no end in sight"
        return passes

    def end(self, name: str) -> None:
        self.scheduler.forget(self.all.pop(name).holder)
        if name in self.queue:
            self.queue.remove(name)


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7 + index * index + index // 3) % VOCAB for index in range(length)]


def truth(story: Story, prompt_len: int) -> list[int]:
    tokens = story.tokens[:prompt_len]
    while len(tokens) < len(story.tokens):
        tokens.append(int(LAW(tuple(tokens)).argmax()))
    return tokens


# --- budget and fairness ----------------------------------------------------------------------------------------------


def test_ready_ones_come_first_and_a_chunk_gets_what_they_leave() -> None:
    desk = Desk.make()
    for name in ("one", "two"):
        desk.add(name, prompt(1, 2), 50)
    desk.step()
    desk.add("long", prompt(3, 60))
    assert desk.step() == {"one": 1, "two": 1, "long": 14}
    assert list(desk.step()) == ["one", "two", "long"]


def test_however_many_are_ready_a_chunk_gets_its_share_and_they_take_turns() -> None:
    desk = Desk.make(budget=8, share=0.25)
    for index in range(12):
        desk.add(f"ready-{index}", prompt(index, 2), 100)
    desk.step(), desk.step(), desk.step()
    desk.add("long", prompt(3, 60))
    passes = [desk.step() for _ in range(6)]
    assert all(fed["long"] == 2 and len(fed) == 7 for fed in passes)
    times = [sum(f"ready-{index}" in fed for fed in passes) for index in range(12)]
    assert times == [3] * 12, "6 of 12 in each of 6 passes"


def test_chunks_are_first_come_first_served_and_short_ones_share_a_pass() -> None:
    desk = Desk.make(budget=16)
    desk.add("long", prompt(1, 25))
    for index in range(3):
        desk.add(f"short-{index}", prompt(2 + index, 6))
    assert desk.run() == [
        {"long": 16},
        {"long": 9, "short-0": 6, "short-1": 1},
        {"short-1": 5, "short-2": 6},
    ]


def test_a_chunk_ends_with_a_page_where_that_costs_little() -> None:
    desk = Desk.make(budget=43)
    desk.add("long", prompt(1, 100))
    assert desk.run() == [{"long": 40}, {"long": 40}, {"long": 20}]


def test_a_block_too_large_for_this_pass_waits_and_one_too_large_for_any_is_dropped() -> None:
    desk = Desk.make(budget=8, share=0.5)
    first, second = desk.add("first", prompt(1, 2), 9), desk.add("second", prompt(2, 2), 9)
    desk.step()
    first.block = second.block = DraftTree.chain([1, 2, 3, 4])
    assert [desk.step(), desk.step()] == [{"first": 5}, {"second": 5}]
    desk.add("long", prompt(3, 30))
    assert desk.step() == {"first": 1, "second": 1, "long": 6}, "5 do not fit into the half of 8 that chunks leave"


def test_a_session_is_served_within_a_bound_whatever_arrives_after_it() -> None:
    desk = Desk.make(budget=8, num_pages=400)
    for index in range(6):
        desk.add(f"busy-{index}", prompt(index, 3), 300)
    desk.step()
    late = desk.add("late", prompt(9, 20))
    for number in range(40):
        desk.add(f"later-{number}", prompt(number, 20))
        desk.step()
        if late.done:
            break
    assert late.done
    assert number <= 12


@pytest.mark.parametrize(
    ("options", "field_name"),
    [
        ((3, 0.4), None),
        ((2, 0.25), "max_batch_tokens"),
        ((10, 0.95), "max_batch_tokens"),
        ((512, 0.0), "prefill_share"),
    ],
)
def test_options_that_would_starve_one_kind_are_refused(options: tuple[int, float], field_name: str | None) -> None:
    if field_name is None:
        SchedulerOptions(*options)
        return
    with pytest.raises(ConfigurationError) as caught:
        SchedulerOptions(*options)
    assert caught.value.field == field_name


# --- prefixes ---------------------------------------------------------------------------------------------------------


def test_a_prefix_is_taken_over_as_far_as_it_is_there_even_by_one_that_came_in_the_same_step() -> None:
    desk = Desk.make(budget=16)
    common = prompt(1, 40)
    desk.add("first", [*common, 1, 2]), desk.add("second", [*common, 3])
    passes = desk.run()
    assert passes[0] == {"first": 16}
    assert passes[2:] == [{"first": 10, "second": 6}, {"second": 3}], "32 rows were there when the second began"
    stats = desk.scheduler.stats
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens) == (42 + 41, 32)


def test_without_prefix_caching_everyone_computes_its_own() -> None:
    desk = Desk.make()
    desk.runner.pool.prefixes = None
    for name in ("first", "second"):
        desk.add(name, prompt(1, 30))
    assert sum(sum(fed.values()) for fed in desk.run()) == 60
    assert desk.scheduler.stats.prefix_hit_tokens == 0


# --- preemption -------------------------------------------------------------------------------------------------------


def fill(desk: Desk, name: str, num_pages: int, seed: int) -> Story:
    """A sequence that holds so many pages and wants nothing."""
    story = desk.add(name, prompt(seed, num_pages * PAGE), 1)
    desk.run()
    assert len(story.holder.kv.pages) == num_pages
    return story


def test_the_latest_arrival_gives_way_and_the_earlier_ones_stay() -> None:
    desk = Desk.make(num_pages=8)
    old, middle, young = (
        fill(desk, name, pages, seed) for name, pages, seed in [("a", 2, 1), ("b", 3, 2), ("c", 3, 3)]
    )
    old.length += 1
    desk.queue.append("a")
    assert desk.step() == {"a": 1}
    assert [story.holder.kv.num_rows for story in (old, middle, young)] == [9, 12, 0]
    assert desk.scheduler.stats.preemptions == 1


def test_a_late_one_waits_for_an_early_one_until_that_has_been_idle_for_long() -> None:
    desk = Desk.make(num_pages=6)
    early = fill(desk, "early", 4, 1)
    late = desk.add("late", prompt(2, 12))
    desk.now_s[0] += 0.4
    plan = desk.plan()
    assert not plan.parts
    assert plan.retry_in_s == pytest.approx(0.6)
    assert late.holder.blocked
    desk.now_s[0] += plan.retry_in_s
    assert desk.step() == {"late": 12}
    assert early.holder.kv.num_rows == 0


def test_of_idle_ones_the_longest_idle_goes_first() -> None:
    desk = Desk.make(num_pages=6)
    first, second = fill(desk, "first", 2, 1), fill(desk, "second", 2, 2)
    desk.now_s[0] += 5
    first.length += 1
    desk.queue.append("first")
    assert desk.step() == {"first": 1}
    desk.now_s[0] += 2
    desk.add("late", prompt(3, 8))
    desk.step()
    assert (first.holder.kv.num_rows, second.holder.kv.num_rows) == (9, 0)


def test_nobody_loses_rows_for_a_draft_or_in_vain() -> None:
    desk = Desk.make(num_pages=6)
    old, young = fill(desk, "old", 3, 1), fill(desk, "young", 3, 2)
    old.holder.kv.rollback(11)
    old.tokens, old.block, old.length = old.tokens[:12], DraftTree.chain([1, 2]), 13
    desk.queue.append("old")
    assert desk.step() == {"old": 1}
    assert young.holder.kv.num_rows == 12
    # One who needs more pages than all younger ones hold takes none of them.
    desk.add("late", prompt(5, 16))
    desk.plan()
    assert (old.holder.kv.num_rows, young.holder.kv.num_rows, desk.scheduler.stats.preemptions) == (12, 12, 0)


def test_one_that_is_in_the_pass_is_not_preempted_but_gives_way_in_the_next() -> None:
    desk = Desk.make(num_pages=6, budget=64)
    old = desk.add("old", prompt(1, 9), 50)
    young = desk.add("young", prompt(2, 8), 50)
    desk.step()
    old.holder.kv.rollback(0)
    old.tokens += prompt(3, 6)  # 16 tokens, 4 pages; the young one needs its third page now and is ready, so first
    assert desk.step() == {"young": 1}
    assert old.holder.blocked
    assert desk.step() == {"old": 8}, "and found 8 rows of its own again"
    assert young.holder.kv.num_rows == 0


def test_a_sequence_begins_only_when_all_of_it_fits() -> None:
    desk = Desk.make(num_pages=6, budget=8)
    fill(desk, "early", 4, 1)
    desk.add("late", prompt(2, 12))
    assert desk.plan().parts == ()
    desk.end("early")
    assert desk.step() == {"late": 8}


def test_rows_that_end_in_a_shared_page_do_not_stand_in_the_way_of_the_whole_pool() -> None:
    desk = Desk.make(num_pages=6, max_model_len=24)
    old = fill(desk, "old", 5, 1)
    young = desk.add("young", [*old.tokens[:20], 1], 1)
    desk.run()
    old.holder.kv.rollback(18)  # in a page that both hold
    old.tokens, old.length = [*old.tokens[:18], *prompt(4, 5)], 24
    young.length += 1
    desk.queue += ["young", "old"]
    for _ in range(6):
        desk.step() if desk.queue else None
    assert old.done
    assert old.tokens == truth(old, 23)


@pytest.mark.parametrize("caching", [True, False])
def test_many_in_a_pool_that_holds_two_of_them_all_end_with_their_own_tokens(caching: bool) -> None:
    desk = Desk.make(num_pages=12, budget=12, max_model_len=48)
    if not caching:
        desk.runner.pool.prefixes = None
    stories = [desk.add(f"story-{index}", prompt(index % 5, 10 + index), 12) for index in range(10)]
    for _ in range(2000):
        fed = desk.step()
        assert fed, "somebody always gets on"
        for story in stories:
            if story.done and story.name in desk.all:
                desk.end(story.name)
        if not desk.queue:
            break
    assert desk.queue == []
    assert desk.scheduler.stats.preemptions > 2
    assert [story.tokens for story in stories] == [truth(story, 10 + index) for index, story in enumerate(stories)]
    assert desk.runner.pool.pages_in_use == 0


def test_what_ends_between_passes_is_in_none() -> None:
    desk = Desk.make(budget=8)
    desk.add("gone", prompt(1, 40)), desk.add("stays", prompt(2, 6))
    assert desk.step() == {"gone": 8}
    desk.end("gone")
    assert desk.run() == [{"stays": 6}]


def test_logits_come_only_where_they_are_wanted() -> None:
    desk = Desk.make()
    story = desk.add("fed", prompt(1, 10))
    (part,) = desk.scheduler.plan([Want(story.holder, story.tokens, wants_logits=False)]).parts
    assert (part.complete, part.sequence.num_logits) == (True, 0)
    assert torch.equal(desk.runner.forward([part.sequence])[0], torch.empty(0, VOCAB))
