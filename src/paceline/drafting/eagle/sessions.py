"""The head's rows of each session, and the rule by which they follow the context.

Row t holds the keys and values of the pair (feature t, token t + 1), at position t. With L tokens of context there are
L - 1 pairs, since the last token's own feature does not exist yet:

| rows | made from | owner |
|---|---|---|
| [first_row, stable) | features of the target | kept as long as the context begins with the same tokens |
| [stable, L - 1) | features of the target | fed next; the last of them at least, unless its state is still known |
| [L - 1, ...) | the head's own states | the draft that is growing; dropped before anything else |

Keeping rows of the last kind would save a little and cost much: the head's states only resemble features, and later
drafts would build on resemblances of resemblances.

A session whose first features were never received starts short, at `first_row`; its positions stay the true ones.

Pages are shared by the pairs they hold, not by tokens alone: the last row of a page depends on the token after it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from paceline.engine.features import FeatureRows
from paceline.engine.kv.pool import KVPool
from paceline.engine.scheduler import Scheduler, SchedulerOptions
from paceline.engine.wants import Holder
from paceline.errors import CapacityExceeded
from paceline.token_log import common_prefix_len

_ID_BITS = 31
"""Token ids are below 2**31; two of them fit into one number."""


@dataclass(slots=True)
class HeadSession:
    """One session's rows.

    Attributes:
        holder: the rows, in the scheduler's table.
        first_row: the row that lies first in the pool.
        tokens: the context whose pairs are fed, or are to be fed.
        pairs: what each row was made of, for sharing; as many as `tokens` has pairs from `first_row` on.
        last_state: of the context's last pair, once it has been fed # [1, hidden_size]
    """

    holder: Holder
    first_row: int = 0
    tokens: list[int] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    last_state: torch.Tensor | None = None

    @property
    def stop_row(self) -> int:
        """Rows [first_row, stop_row) are computed."""
        return self.first_row + self.holder.kv.num_rows

    def restart(self, context: Sequence[int], first_row: int, stop_row: int) -> None:
        """Keeps rows [first_row, stop_row), and takes another context for the pairs after them."""
        if first_row != self.first_row:
            stop_row = first_row
        self.first_row, self.last_state = first_row, None
        self.holder.kv.rollback(stop_row - first_row)
        del self.pairs[stop_row - first_row :]
        self.tokens = list(context)
        known = first_row + len(self.pairs)
        self.pairs += [
            token << _ID_BITS | following
            for token, following in zip(self.tokens[known:], self.tokens[known + 1 :], strict=False)
        ]
        if first_row and known == first_row:
            self.pairs[0] = -1 - self.pairs[0]  # rows without a beginning are nobody else's

    def publish(self) -> None:
        """Lets other sessions find the rows, all of which must be made from features of the target."""
        if not self.first_row:
            self.holder.kv.publish(self.pairs)


class HeadSessions:
    """The sessions of one head.

    Args:
        pool: of their rows.
        max_sessions: sessions at once; 0 for any number: they share the pool.
        max_batch_tokens: most pairs of contexts in a pass.
        vocab_size: ids that the head's embedding knows.

    Attributes:
        scheduler: chooses which pairs of which contexts a pass feeds.
        num_short_starts: how often a session began without its first features.
    """

    def __init__(self, pool: KVPool, *, max_sessions: int, max_batch_tokens: int, vocab_size: int) -> None:
        self._pool = pool
        self._max_sessions = max_sessions
        self._vocab_size = vocab_size
        # A session without a draft under way has no claim to its rows: they are a saving of time.
        self.scheduler = Scheduler(pool, SchedulerOptions(max_batch_tokens=max_batch_tokens, idle_preempt_s=0.0))
        self.num_short_starts = 0
        self._sessions: dict[str, HeadSession] = {}

    def open(self, name: str) -> None:
        """Begins a session without rows; one that is open already begins again.

        Raises:
            CapacityExceeded: no slot is free.
        """
        if self._max_sessions and name not in self._sessions and len(self._sessions) >= self._max_sessions:
            raise CapacityExceeded(f"all {self._max_sessions} draft sessions are taken; try again when one has ended")
        self.close(name)
        self._sessions[name] = HeadSession(self.scheduler.register(self._pool.new_sequence()))

    def close(self, name: str) -> None:
        """Frees a session's rows; unknown ones are closed already."""
        session = self._sessions.pop(name, None)
        if session is not None:
            self.scheduler.forget(session.holder)

    def get(self, name: str) -> HeadSession | None:
        """An open session."""
        return self._sessions.get(name)

    def follow(self, session: HeadSession, context: Sequence[int], features: FeatureRows | None) -> bool:
        """Cuts a session's rows to those that stay valid for a context, so that the pairs after them can be fed.

        Args:
            session: whose rows.
            context: all tokens to draft after.
            features: of the target; rows of all pairs that are to be fed.

        Returns:
            Whether drafting is possible: the last pair's state is known, or its feature is there.
        """
        num_pairs = len(context) - 1
        agreed = common_prefix_len(session.tokens, context)
        stable = min(session.stop_row, agreed - 1)
        if session.last_state is not None and stable == num_pairs == len(session.tokens) - 1:
            session.holder.kv.rollback(num_pairs - session.first_row)
            return True
        if features is None or not features.first_row < num_pairs <= features.num_rows:
            return False
        first_row = min(session.first_row, features.first_row)
        if any(not 0 <= token < self._vocab_size for token in context[agreed:]):
            return False  # the target's vocabulary is larger than the head's, and this context uses it
        session.restart(context, first_row, max(min(stable, num_pairs - 1), first_row))
        if session.stop_row < features.first_row:
            # Another session may have had the features that this one lacks.
            self.scheduler.adopt(session.holder, session.pairs)
        if session.stop_row < features.first_row:
            session.restart(context, features.first_row, features.first_row)
            self.num_short_starts += 1
        return True

    def reserve(self, session: HeadSession, num_rows: int, busy: Collection[HeadSession]) -> bool:
        """Makes room for rows of a draft, in pages of sessions that are not busy where none are free.

        Returns:
            Whether there is room; otherwise nothing has changed.
        """
        kv = session.holder.kv
        lacking = kv.pages_to_reserve(num_rows) - self._pool.pages_available
        if lacking > 0:
            holders = {other.holder for other in busy}
            idle = [holder for holder in self.scheduler.holders if holder.kv.pages and holder not in holders]
            if self._pool.pages_of([holder.kv for holder in idle]) < lacking:
                return False
            for holder in sorted(idle, key=lambda holder: holder.last_wanted_s):
                if kv.pages_to_reserve(num_rows) > self._pool.pages_available:
                    self.scheduler.preempt([holder])
        kv.reserve(num_rows)
        return True

    def check_integrity(self) -> None:
        """Checks pages, and that every session's rows are pairs that are noted for it.

        Raises:
            AssertionError: says what is wrong.
        """
        self._pool.check_integrity()
        for name, session in self._sessions.items():
            if len(session.pairs) != max(len(session.tokens) - 1 - session.first_row, 0):
                raise AssertionError(f"{name} has {len(session.pairs)} pairs for {len(session.tokens)} tokens")
