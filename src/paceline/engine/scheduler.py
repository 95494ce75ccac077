"""Which rows the next pass computes: for everyone who runs sequences through a model.

    holder = scheduler.register(runner.new_sequence())
    plan = scheduler.plan([Want(holder, tokens, tree)])
    logits = runner.forward([part.sequence for part in plan.parts])
    # for each part: kv.commit, kv.publish; then the next plan

Ranges of a want with T tokens, for a sequence with R rows:

| range | what |
|---|---|
| tokens [0, T) | all tokens of the sequence; its rows [0, R) were computed for the first ones, R < T |
| tokens [R, T) | its chain, to be fed in order, in one part or in several |
| the tree under token T - 1 | fed in the part that ends the chain; may be dropped, since a draft is only speed |

| a want is | when | its share of a pass |
|---|---|---|
| ready | its chain has at most 2 tokens: a plain step, a block | what chunks leave; whole or not at all |
| behind | its chain is longer: a prompt, rows that were lost | `prefill_share`, and what ready wants leave |
| blocked | there was no room for its rows last time | that of its kind, but before the others |

Wants of a kind are served in the order given, blocked ones in order of arrival.

When pages run out, sequences are preempted: their rows are forgotten, their next wants are behind, and what they had
published is often still there to be adopted. Whoever needs pages takes them from sequences that had no want for
`idle_preempt_s`, the longest idle first, then from those that arrived later, the latest first; never from one that is
in the pass already; and only if that gives it all it needs. Otherwise it waits. So the one that arrived first among
those that want something always gets on, if need be when an idle one has been idle for long enough, and nobody waits
for ever. A sequence begins (again) only when there is room for all its tokens, or it would be the next to be preempted.

The scheduler knows sequences, rows and pages. It does not know messages, sampling, or what a token means. Used from the
thread that runs the passes, between them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.engine.kv.pool import KVPool, SequenceKV
from paceline.engine.runner import SequencePass
from paceline.engine.wants import Holder, Part, Plan, Want
from paceline.errors import ConfigurationError
from paceline.speculation.tree import EMPTY_BLOCK, DraftTree

READY_TOKENS = 2
"""Chain of a want that is ready: the pending token, or in a drafter the last accepted draft and the bonus token."""
_PAGE_END_COST = 8
"""A chunk may be shorter by one token in so many, so that it ends with a page."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """How passes are filled.

    Attributes:
        max_batch_tokens: tokens fed in one pass.
        prefill_share: part of a pass that chunks get at least while any waits.
        idle_preempt_s: a sequence without a want for so long may lose its rows to anyone.
    """

    max_batch_tokens: int = 512
    prefill_share: float = 0.25
    idle_preempt_s: float = 1.0

    def __post_init__(self) -> None:
        """Checks that both kinds of wants get on.

        Raises:
            ConfigurationError: one would not; says which values work.
        """
        if not 0 < self.prefill_share < 1:
            raise ConfigurationError(
                f"prefill_share ({self.prefill_share}) must lie between 0 and 1", field="prefill_share"
            )
        if self.max_batch_tokens - self.chunk_tokens < READY_TOKENS:
            raise ConfigurationError(
                f"max_batch_tokens ({self.max_batch_tokens}) with a prefill_share of {self.prefill_share} leaves no "
                f"{READY_TOKENS} tokens for decoding: raise the first or lower the second",
                field="max_batch_tokens",
            )

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a pass that chunks get at least."""
        return max(1, int(self.max_batch_tokens * self.prefill_share))


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """What happened since the scheduler was made.

    Attributes:
        preemptions: sequences that lost their rows to others.
        prefix_queried_tokens: tokens for whose rows the prefix table was asked; once per sequence and prefill.
        prefix_hit_tokens: of those, rows that were there.
    """

    preemptions: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0


class Scheduler:
    """Plans the passes over the sequences of one pool.

    Args:
        pool: whose sequences are registered; it holds the longest one that may come.
        options: how passes are filled.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        pool: KVPool,
        options: SchedulerOptions = SchedulerOptions(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.options = options
        self.clock = clock
        self._holders: dict[Holder, None] = {}  # in order of arrival
        self._num_arrived = 0
        self._preemptions = self._queried_tokens = self._hit_tokens = 0

    @property
    def stats(self) -> SchedulerStats:
        """Counts so far."""
        return SchedulerStats(self._preemptions, self._queried_tokens, self._hit_tokens)

    @property
    def holders(self) -> Sequence[Holder]:
        """All registered sequences in order of arrival."""
        return tuple(self._holders)

    def register(self, kv: SequenceKV) -> Holder:
        """Enters a sequence; it arrives now."""
        self._num_arrived += 1
        holder = Holder(kv, self._num_arrived, self.clock())
        self._holders[holder] = None
        return holder

    def forget(self, holder: Holder) -> None:
        """Ends a sequence and frees its rows. Not while a pass runs that it is in."""
        del self._holders[holder]
        holder.kv.free()

    def adopt(self, holder: Holder, tokens: Sequence[int]) -> int:
        """Attaches published rows of these tokens that continue the sequence's own; returns how many."""
        if not holder.queried:
            holder.queried = True
            self._queried_tokens += len(tokens) - holder.kv.num_rows
        gained = holder.kv.adopt(tokens)
        self._hit_tokens += gained
        return gained

    def missing_pages(self, holder: Holder, num_tokens: int) -> int:
        """Pages that a sequence lacks for the rows of so many tokens."""
        return max(0, math.ceil(num_tokens / self.pool.page_tokens) - len(holder.kv.pages))

    def drop_ahead(self) -> None:
        """Takes the rows ahead of all sequences, which are drafts, and the pages that these take; not during a pass."""
        for holder in self._holders:
            holder.kv.drop_ahead()

    def preempt(self, holders: Sequence[Holder]) -> None:
        """Takes the rows of sequences that are in no pass."""
        for holder in holders:
            holder.preempt()
            self._preemptions += 1

    def plan(self, wants: Sequence[Want]) -> Plan:
        """Chooses the next pass and reserves its rows, preempting sequences where that is needed.

        Args:
            wants: in the order in which they were made.
        """
        return _Planning(self, wants).plan()


class _Planning:
    """One call of `Scheduler.plan`."""

    def __init__(self, scheduler: Scheduler, wants: Sequence[Want]) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._wants = wants
        self._now_s = scheduler.clock()
        self._parts: list[Part] = []
        self._settled: set[Holder] = set()  # in the pass, or preempted for it: not to be touched any more
        self._wanting = {want.holder for want in wants}
        self._blocked: set[Holder] = set()  # found no pages in this pass
        self._ready_tokens = 0
        for holder in self._wanting:
            holder.last_wanted_s = self._now_s

    def plan(self) -> Plan:
        """See `Scheduler.plan`."""
        ready: list[int] = []
        behind: list[int] = []
        for index, want in enumerate(self._wants):
            (ready if want.num_chain <= READY_TOKENS else behind).append(index)
        blocked = [index for index, want in enumerate(self._wants) if want.holder.blocked]
        blocked.sort(key=lambda index: self._wants[index].holder.arrival)
        chunk_left = self._chunk_tokens(ready, behind) if behind else 0
        self._ready_tokens = ready_left = self._scheduler.options.max_batch_tokens - chunk_left
        for index in blocked:
            if self._wants[index].num_chain <= READY_TOKENS:
                ready_left -= self._plan_ready(index, ready_left)
            else:
                chunk_left -= self._plan_chunk(index, chunk_left)
        for index in ready:
            ready_left -= self._plan_ready(index, ready_left)
        chunk_left += ready_left
        for index in behind:
            chunk_left -= self._plan_chunk(index, chunk_left)
        return Plan(tuple(self._parts), 0.0 if self._parts else self._retry_in_s())

    def _chunk_tokens(self, ready: Sequence[int], behind: Sequence[int]) -> int:
        """Tokens of the pass that are kept for wants that are behind."""
        options = self._scheduler.options
        wanted = sum(self._wants[index].num_tokens for index in behind)
        left = options.max_batch_tokens - sum(self._wants[index].num_tokens for index in ready)
        return min(wanted, max(options.chunk_tokens, left))

    def _plan_ready(self, index: int, budget: int) -> int:
        """Makes the part of a ready want if there is room for it; the tokens that it takes of the budget."""
        want = self._wants[index]
        if want.holder in self._settled or want.holder in self._blocked:
            return 0
        # A block that would not even fit if it came first is dropped; another one waits until it comes first.
        tree = want.tree if want.num_tokens <= self._ready_tokens else EMPTY_BLOCK
        if want.num_chain + tree.num_draft_tokens > budget:
            return 0
        return self._add(index, want.num_chain, tree)

    def _plan_chunk(self, index: int, budget: int) -> int:
        """Makes a part of a want that is behind, as long as the budget allows; the tokens that it takes."""
        want = self._wants[index]
        if want.holder in self._settled or want.holder in self._blocked or budget < 1:
            return 0
        self._scheduler.adopt(want.holder, want.tokens)
        if want.num_tokens <= budget:
            return self._add(index, want.num_chain, want.tree)
        # The last token comes with its block.
        length = min(want.num_chain - 1, budget)
        if length < want.num_chain - 1:
            # A sequence adopts rows only where a page begins, so a chunk ends there if that costs little of the pass.
            excess = (want.holder.kv.num_rows + length) % self._pool.page_tokens
            length -= excess if excess * _PAGE_END_COST <= length else 0
        return self._add(index, length, EMPTY_BLOCK) if length else 0

    def _add(self, index: int, num_chain: int, tree: DraftTree) -> int:
        """Puts the next tokens of a want into the pass, if there are pages; the tokens that it takes."""
        want = self._wants[index]
        holder, kv = want.holder, want.holder.kv
        num_rows = num_chain + tree.num_draft_tokens
        if self._lacks(holder, num_rows if holder.started else max(num_rows, want.num_chain)) > 0:
            if not self._find_room(want, num_chain):
                holder.blocked = True
                self._blocked.add(holder)
                return 0
            if self._lacks(holder, num_rows) > 0:
                tree = EMPTY_BLOCK  # nobody loses rows for a draft
        kv.reserve(num_chain + tree.num_draft_tokens)
        complete = num_chain == want.num_chain
        tokens = tuple(want.tokens[kv.num_rows : kv.num_rows + num_chain])
        num_logits = 1 + tree.num_draft_tokens if complete and want.wants_logits else 0
        self._parts.append(Part(index, SequencePass(kv, tokens, tree, num_logits), complete))
        self._settled.add(holder)
        holder.fed(complete=complete)
        return num_chain + tree.num_draft_tokens

    # --- pages --------------------------------------------------------------------------------------------------------

    def _lacks(self, holder: Holder, num_rows: int) -> int:
        """Pages that have to become available before so many rows can be reserved; negative if some are left over.

        Where pages are short, rows ahead of sequences that are not in the pass are given up first: they are drafts.
        """
        needed = holder.kv.pages_to_reserve(num_rows)
        if needed > self._pool.pages_available:
            for other in self._scheduler.holders:
                if other is not holder and other not in self._settled:
                    other.kv.drop_ahead()
        return needed - self._pool.pages_available

    def _find_room(self, want: Want, num_rows: int) -> bool:
        """Makes pages available for rows of a sequence, and for all its tokens if it begins; False if that fails."""
        holder = want.holder
        lacking = self._lacks(holder, num_rows if holder.started else want.num_chain)
        if lacking <= 0:
            return True
        victims = self._victims(holder)
        for count in range(1, len(victims) + 1):
            if self._pool.pages_of([victim.kv for victim in victims[:count]]) >= lacking:
                self._scheduler.preempt(victims[:count])
                self._settled.update(victims[:count])
                return True
        if holder.kv.pages_to_reserve(1) and holder.kv.num_rows < len(holder.kv.pages) * self._pool.page_tokens:
            # The rows end in a page that others hold too. Without these rows no copy of it is needed, and it becomes
            # available when the others let go.
            holder.kv.rollback(holder.kv.num_rows - holder.kv.num_rows % self._pool.page_tokens)
        return False

    def _victims(self, holder: Holder) -> list[Holder]:
        """Sequences that this one may preempt, in the order in which they are taken."""
        others = [
            other
            for other in self._scheduler.holders
            if other is not holder and other not in self._settled and other.kv.pages
        ]
        idle = [other for other in others if other not in self._wanting and self._idle_left_s(other) <= 0]
        later = [other for other in others if other.arrival > holder.arrival and other not in idle]
        return [*sorted(idle, key=lambda other: other.last_wanted_s), *reversed(later)]

    def _idle_left_s(self, holder: Holder) -> float:
        """Time until an idle sequence may be preempted by anyone."""
        return holder.last_wanted_s + self._scheduler.options.idle_preempt_s - self._now_s

    def _retry_in_s(self) -> float:
        idle = [holder for holder in self._scheduler.holders if holder.kv.pages and holder not in self._wanting]
        left_s = [self._idle_left_s(holder) for holder in idle]
        return min((left for left in left_s if left > 0), default=0.0)
