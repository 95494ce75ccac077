"""Which pages hold the rows of which tokens: the table by which sequences find each other's prefixes.

A page of rows depends on all tokens before it, so its key is chained: `key(page i) = hash(key(page i - 1), tokens of
page i)`. Equal keys therefore mean equal tokens from the sequence's first one on, and one look-up per page finds the
longest prefix that exists. The chain starts at a random key, so that nobody can search for colliding texts beforehand.

| word | meaning |
|---|---|
| published page | a page in this table: full, of committed tokens only, never written again while it is here |
| idle page | a published page that no sequence holds; it stays until its room is needed |

A published page's predecessors are always published too: whoever removes one removes what continues it. Idle pages go
in the order in which they were last held. A sequence lets go of its last page first, so a chain loses its tail before
its head.

The table knows keys and pages; how many sequences hold a page is known to the pool (`pool.py`), and what is in a page
to nobody here.
"""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

_KEY_BYTES = 16


@dataclass(frozen=True, slots=True)
class PrefixStats:
    """What prefix sharing did since the pool was made.

    Attributes:
        queried_tokens: tokens for which rows were looked for.
        hit_tokens: rows of them that were found, and not computed again.
        evicted_pages: idle pages that were removed because their room was needed.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    evicted_pages: int = 0


@dataclass(slots=True)
class _Published:
    """A published page: its key, its predecessor's, and the keys of the pages that continue it."""

    page: int
    key: bytes
    parent: bytes
    children: set[bytes] = field(default_factory=set)


class PrefixTable:
    """Published pages by key, and the idle ones among them in order of last use."""

    def __init__(self) -> None:
        self.root = os.urandom(_KEY_BYTES)
        """Key before the first page of every sequence."""
        self._by_key: dict[bytes, _Published] = {}
        self._by_page: dict[int, _Published] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.queried_tokens = 0
        self.hit_tokens = 0
        self.evicted_pages = 0

    @staticmethod
    def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
        """Key of a page of `tokens` after the page with key `parent`."""
        return blake2b(array("q", tokens).tobytes(), key=parent, digest_size=_KEY_BYTES).digest()

    @property
    def num_idle(self) -> int:
        """Published pages that no sequence holds."""
        return len(self._idle)

    @property
    def stats(self) -> PrefixStats:
        """Counts so far."""
        return PrefixStats(self.queried_tokens, self.hit_tokens, self.evicted_pages)

    def page(self, key: bytes) -> int | None:
        """The page published under a key."""
        entry = self._by_key.get(key)
        return None if entry is None else entry.page

    def key(self, page: int) -> bytes | None:
        """The key under which a page is published."""
        entry = self._by_page.get(page)
        return None if entry is None else entry.key

    def publish(self, page: int, key: bytes, parent: bytes) -> None:
        """Enters a page that a sequence holds; its key must be new and its predecessor's published (or the root)."""
        if parent != self.root:
            self._by_key[parent].children.add(key)
        self._by_key[key] = self._by_page[page] = _Published(page, key, parent)

    def remove(self, page: int) -> list[int]:
        """Removes a published page and all that continue it; returns these pages."""
        first = self._by_page[page]
        if first.parent != self.root:
            self._by_key[first.parent].children.discard(first.key)
        removed: list[int] = []
        left = [first]
        while left:
            entry = left.pop()
            left += [self._by_key[child] for child in entry.children]
            del self._by_key[entry.key], self._by_page[entry.page]
            self._idle.pop(entry.page, None)
            removed.append(entry.page)
        return removed

    def rename(self, page: int, new_page: int) -> None:
        """A published page that a sequence holds has been copied to another place."""
        entry = self._by_page.pop(page)
        entry.page = new_page
        self._by_page[new_page] = entry

    def retire(self, page: int) -> bool:
        """No sequence holds the page any more. Returns whether it stays, idle, because it is published."""
        if page not in self._by_page:
            return False
        self._idle[page] = None
        return True

    def revive(self, page: int) -> None:
        """A sequence holds the page again."""
        del self._idle[page]

    def least_recently_used(self) -> int:
        """The idle page to be removed first; there must be one."""
        return next(iter(self._idle))

    def is_idle(self, page: int) -> bool:
        """Whether the page is published and held by no sequence."""
        return page in self._idle

    def check_integrity(self) -> None:
        """Checks that keys, pages, chains and the idle list agree.

        Raises:
            AssertionError: says what is wrong.
        """
        if {entry.page for entry in self._by_key.values()} != set(self._by_page):
            raise AssertionError("published keys and published pages do not match")
        for key, entry in self._by_key.items():
            if entry.key != key or self._by_page[entry.page] is not entry:
                raise AssertionError(f"page {entry.page} is published under two keys")
            if entry.parent != self.root and key not in self._by_key[entry.parent].children:
                raise AssertionError(f"published page {entry.page} is unknown to its predecessor")
            if any(self._by_key[child].parent != key for child in entry.children):
                raise AssertionError(f"published page {entry.page} has a continuation that continues another page")
        if not self._idle.keys() <= self._by_page.keys():
            raise AssertionError(f"pages {sorted(self._idle.keys() - self._by_page.keys())} are idle, not published")
