"""Whether a target engine has room for one more session: a slot, and pages for the tokens of all of them at once."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.engine.runner import ModelRunner
from paceline.engine.scheduler import Scheduler
from paceline.engine.target_session import Session
from paceline.engine.wants import Holder
from paceline.errors import CapacityExceeded


class Admission:
    """Lets sessions in as long as all that are open could keep their rows.

    Args:
        scheduler: of the engine.
        runner: the target.
        max_sessions: open sessions.
    """

    def __init__(self, scheduler: Scheduler, runner: ModelRunner, max_sessions: int) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._max_sessions = max_sessions

    def admit(self, tokens: Sequence[int], others: Sequence[Session]) -> Holder:
        """Registers a sequence with the rows that others have computed of its tokens.

        Args:
            tokens: of the session.
            others: all open sessions.

        Raises:
            CapacityExceeded: there is no room for another session.
        """
        if len(others) >= self._max_sessions:
            raise CapacityExceeded(
                f"all {self._max_sessions} session slots of this verifier are taken; try again later"
            )
        pool = self._runner.pool
        holder = self._scheduler.register(self._runner.new_sequence())
        num_cached = self._scheduler.adopt(holder, tokens)
        needed = self._pages_needed(holder, tokens, others)
        if needed > pool.num_pages:
            self._scheduler.drop_ahead()
            needed = self._pages_needed(holder, tokens, others)
        if needed > pool.num_pages:
            self._scheduler.forget(holder)
            raise CapacityExceeded(
                f"the KV pool has {pool.num_pages} pages of {pool.page_tokens} tokens; {len(others)} open "
                f"sessions and this prompt ({len(tokens)} tokens, {num_cached} of them cached) need {needed}; try "
                "again when other sessions have ended"
            )
        return holder

    def _pages_needed(self, holder: Holder, tokens: Sequence[int], others: Sequence[Session]) -> int:
        """Pages for the tokens of all sessions and of one more."""
        own = self._scheduler.missing_pages(holder, len(tokens))
        theirs = sum(self._scheduler.missing_pages(other.holder, len(other.log)) for other in others)
        return self._runner.pool.pages_in_use + own + theirs
