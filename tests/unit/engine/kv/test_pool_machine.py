"""Random work on a small pool against a model that keeps each sequence's rows in lists."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.engine.kv.pool import SequenceKV
from paceline.engine.kv.sequence import page_runs
from paceline.errors import CapacityExceeded
from tests.unit.engine.kv.rows import make_pool, read, write

PAGE_TOKENS = 2
NUM_PAGES = 14
TOKENS = st.integers(0, 1)
TEXTS = st.sampled_from([[0] * 20, [0] * 5 + [1] * 15, [1] * 20])  # few, so that prefixes coincide


@dataclass
class Naive:
    """A sequence as the pool should have it.

    Attributes:
        tokens: committed tokens, one per row.
        stamps: who wrote each row.
        num_published: pages that must be found by others as long as this sequence lives.
        doubtful: it shared pages with a sequence whose rows were discarded; what it publishes may not be found.
    """

    kv: SequenceKV
    tokens: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    num_published: int = 0
    doubtful: bool = False


class PoolMachine(RuleBasedStateMachine):
    """Passes with trees, rollbacks, forks, publishing, adopting, moves and pressure, in random order.

    A row's label stands for all tokens up to it, as real keys and values depend on them; its stamp is new with every
    row written. So a row that is found under the wrong prefix has a wrong label, and a write into a page that others
    read changes a stamp of theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pool = make_pool(NUM_PAGES, PAGE_TOKENS)
        self.sequences: list[Naive] = []
        self.label_of: dict[tuple[int, ...], int] = {}
        self.num_written = 0

    def some(self, data: st.DataObject) -> Naive:
        return data.draw(st.sampled_from(self.sequences))

    def label(self, tokens: list[int]) -> int:
        return self.label_of.setdefault(tuple(tokens), len(self.label_of) + 1)

    def labels(self, tokens: list[int]) -> list[int]:
        return [self.label(tokens[: stop + 1]) for stop in range(len(tokens))]

    def num_pages_needed(self, sequence: Naive, num_new: int) -> int:
        partial = len(sequence.tokens) % PAGE_TOKENS > 0
        copied = partial and self.pool.num_holders(sequence.kv.pages[-1]) > 1
        return -(-(len(sequence.tokens) + num_new) // PAGE_TOKENS) - len(sequence.kv.pages) + copied

    @precondition(lambda self: len(self.sequences) < 5)
    @rule(text=TEXTS, num_tokens=st.integers(0, 12))
    def new(self, text: list[int], num_tokens: int) -> None:
        self.sequences.append(Naive(self.pool.new_sequence()))
        self.adopt_by(self.sequences[-1], text[:num_tokens])

    @precondition(lambda self: self.sequences)
    @rule(
        data=st.data(),
        text=TEXTS,
        num_chain=st.integers(1, 7),
        nodes=st.lists(st.tuples(TOKENS, st.integers(0, 5)), max_size=6),
        published=st.booleans(),
    )
    def run_pass(
        self, data: st.DataObject, text: list[int], num_chain: int, nodes: list[tuple[int, int]], published: bool
    ) -> None:
        """A chain and a tree under its last token; a path of the tree, or a part of the chain, is kept."""
        sequence = self.some(data)
        chain = text[len(sequence.tokens) : len(sequence.tokens) + num_chain] or text[:1]
        needed = self.num_pages_needed(sequence, len(chain) + len(nodes))
        before, available = list(sequence.kv.pages), self.pool.pages_available
        assert sequence.kv.pages_to_reserve(len(chain) + len(nodes)) == max(needed, 0)
        if needed > available:
            message = f"{available} of {NUM_PAGES} pages free .* {needed} more are needed"
            with pytest.raises(CapacityExceeded, match=message):
                sequence.kv.reserve(len(chain) + len(nodes))
            assert sequence.kv.pages == before
            return
        sequence.kv.reserve(len(chain) + len(nodes))
        paths: list[list[int]] = [[]]  # nodes from the root's child down to each node
        for node, (_, parent) in enumerate(nodes, 1):
            paths.append([*paths[min(parent, node - 1)], node])
        prefix = sequence.tokens + chain
        node_tokens = [[nodes[node - 1][0] for node in path] for path in paths]
        written = self.labels(prefix)[len(sequence.tokens) :]
        written += [self.label(prefix + tokens) for tokens in node_tokens[1:]]
        stamps = list(range(self.num_written, self.num_written + len(written)))
        self.num_written += len(written)
        write(self.pool, sequence.kv, written, stamps)
        accepted = data.draw(st.sampled_from(range(len(paths))))
        kept = len(chain) if accepted else data.draw(st.integers(0, len(chain)))
        sequence.kv.commit(kept, paths[accepted])
        sequence.tokens += chain[:kept] + node_tokens[accepted]
        sequence.stamps += stamps[:kept] + [stamps[len(chain) - 1 + node] for node in paths[accepted]]
        if published:
            self.publish_by(sequence)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), num_lost=st.integers(0, 6))
    def rollback(self, data: st.DataObject, num_lost: int) -> None:
        sequence = self.some(data)
        num_rows = max(len(sequence.tokens) - num_lost, 0)
        sequence.kv.rollback(num_rows)
        del sequence.tokens[num_rows:], sequence.stamps[num_rows:]
        sequence.num_published = min(sequence.num_published, num_rows // PAGE_TOKENS)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        self.publish_by(self.some(data))

    def publish_by(self, sequence: Naive) -> None:
        sequence.kv.publish(sequence.tokens)
        self.read_again(sequence)
        if sequence.doubtful:
            return
        sequence.num_published = len(sequence.tokens) // PAGE_TOKENS
        other = self.pool.new_sequence()
        assert other.adopt([*sequence.tokens, 0]) == sequence.num_published * PAGE_TOKENS
        other.free()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), more=st.lists(TOKENS, max_size=7))
    def adopt(self, data: st.DataObject, more: list[int]) -> None:
        sequence = self.some(data)
        self.adopt_by(sequence, sequence.tokens + more)

    def adopt_by(self, sequence: Naive, tokens: list[int]) -> None:
        before = len(sequence.tokens)
        gained = sequence.kv.adopt(tokens)
        assert gained % PAGE_TOKENS == 0
        assert before + gained < len(tokens) or not gained
        if before % PAGE_TOKENS:
            assert gained == 0
            return
        sequence.tokens = tokens[: before + gained]
        self.read_again(sequence)
        if not sequence.doubtful:
            sequence.num_published = len(sequence.tokens) // PAGE_TOKENS
        limit = (len(tokens) - 1) // PAGE_TOKENS
        for other in self.sequences:
            for page in range(before // PAGE_TOKENS, 0 if sequence.doubtful else min(other.num_published, limit)):
                stop = (page + 1) * PAGE_TOKENS
                assert stop <= before + gained or tokens[:stop] != other.tokens[:stop], "a published page is not found"

    def read_again(self, sequence: Naive) -> None:
        """The sequence may hold other pages now: their labels must be its own, their stamps are anybody's."""
        found, stamps = read(self.pool, sequence.kv)
        assert found == self.labels(sequence.tokens)
        sequence.stamps = stamps

    @precondition(lambda self: 0 < len(self.sequences) < 5)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        if len(sequence.tokens) % PAGE_TOKENS and not self.pool.pages_available:
            with pytest.raises(CapacityExceeded, match=f"0 of {NUM_PAGES} pages free"):
                sequence.kv.fork()
            return
        kv = sequence.kv.fork()
        self.sequences.append(
            Naive(kv, list(sequence.tokens), list(sequence.stamps), sequence.num_published, sequence.doubtful)
        )

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def straighten(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        before = len(page_runs(sequence.kv.pages))
        moved = self.pool.straighten(sequence.kv)
        after = len(page_runs(sequence.kv.pages))
        assert after < before if moved else after == before

    @rule(num_pages=st.integers(1, NUM_PAGES))
    def press(self, num_pages: int) -> None:
        """Somebody needs room for a moment: idle pages go."""
        kv = self.pool.new_sequence()
        kv.reserve(min(num_pages, self.pool.pages_available) * PAGE_TOKENS)
        kv.free()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        pages = set(sequence.kv.pages)
        sequence.kv.discard()
        sequence.tokens, sequence.stamps, sequence.num_published, sequence.doubtful = [], [], 0, False
        for other in self.sequences:
            shared = [index for index, page in enumerate(other.kv.pages) if page in pages]
            if shared:
                other.num_published, other.doubtful = min(other.num_published, shared[0]), True

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        sequence = self.some(data)
        self.sequences.remove(sequence)
        sequence.kv.free()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        assert self.pool.num_sequences == len(self.sequences)
        for sequence in self.sequences:
            assert sequence.kv.num_rows == len(sequence.tokens)
            assert read(self.pool, sequence.kv) == (self.labels(sequence.tokens), sequence.stamps)
            assert len(sequence.kv.pages) == -(-len(sequence.tokens) // PAGE_TOKENS)
        assert self.pool.pages_in_use == len({page for sequence in self.sequences for page in sequence.kv.pages})
        assert self.pool.pages_available == NUM_PAGES - self.pool.pages_in_use

    def teardown(self) -> None:
        for sequence in self.sequences:
            sequence.kv.free()
        self.pool.check_integrity()
        assert self.pool.pages_available == NUM_PAGES
        kv = self.pool.new_sequence()
        kv.reserve(NUM_PAGES * PAGE_TOKENS)
        self.pool.check_integrity()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
