"""Bookkeeping of one session's drafts: which are open, what they assumed, what is known beyond the committed tokens.

Pure: no clock, no I/O. Times are seconds of one monotonic clock, handed in.

    committed [0, L)    the token log, shared with the session
    tail                drafts under the pending token, made of answers; its top part may be under judgement
    open drafts         at most two: a stale one that is being superseded, and one that may still be of use
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.messages import AcceptanceRule, Draft, Drafted, Features, Timing
from paceline.speculation.tree import DraftTree
from paceline.token_log import TokenLog
from paceline_gateway.tail import EMPTY_TAIL, Tail

MAX_OPEN_DRAFTS = 2
_EWMA_WEIGHT = 0.3


@dataclass(frozen=True, slots=True)
class OpenDraft:
    """A draft that has not been answered.

    Attributes:
        command: as sent; its id names it.
        sent_at: when.
        warm: the drafter had answered before, so its time says something about the next one.
    """

    command: Draft
    sent_at: float
    warm: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What an answered draft brought.

    Attributes:
        sent_at: when it was asked for.
        base_len: committed tokens that it builds on.
        grew: the tail has become longer.
        found_nothing: it was built on the newest known tokens and proposes nothing.
        depth: of what it proposes.
        took_s: from asking to the answer; None where that says nothing of the next one: it read a whole prompt first.
        timing: where the drafter's part of it went.
    """

    sent_at: float
    base_len: int
    grew: bool
    found_nothing: bool
    depth: int
    took_s: float | None
    timing: Timing


class DraftBook:
    """The drafts of one session within one epoch.

    Args:
        session: its name.
        epoch: fencing number of its owner.
        log: its committed tokens; only read here.
        rule: how its blocks are judged.

    Attributes:
        tail: what is known beyond the committed tokens.
        method: who drafted the top of the tail.
        kv_len: rows that the drafter holds, as it said last.
        typical_s: running mean of the time to an answer; None before the second answer of a drafter.
        num_wasted_tokens: draft tokens that were dropped unjudged.
    """

    def __init__(self, session: str, epoch: int, log: TokenLog, rule: AcceptanceRule = AcceptanceRule.MATCH) -> None:
        self._session = session
        self._epoch = epoch
        self._log = log
        self._rule = rule
        self._open: dict[int, OpenDraft] = {}
        self._last_id = 0
        self._known_len = 0
        self._warm = False
        self._nothing_after = -1
        self.tail = EMPTY_TAIL
        self.method = ""
        self._newest_method = ""
        self.kv_len = 0
        self.typical_s: float | None = None
        self.num_wasted_tokens = 0

    @property
    def num_open(self) -> int:
        """Drafts without an answer."""
        return len(self._open)

    @property
    def oldest_sent_at(self) -> float | None:
        """When the oldest open draft was sent."""
        oldest = next(iter(self._open.values()), None)  # they stand in the order in which they were sent
        return None if oldest is None else oldest.sent_at

    @property
    def promising(self) -> bool:
        """Whether an open draft may still bring something: the committed tokens do not contradict it yet."""
        return any(self._may_help(draft.command) for draft in self._open.values())

    def _may_help(self, draft: Draft) -> bool:
        since = self._log.slice(draft.base_len, len(self._log))
        if len(since) <= len(draft.assumed):
            return self._still_assumed(draft.assumed, since)
        overtaken = len(since) - len(draft.assumed)
        return since[: len(draft.assumed)] == draft.assumed and overtaken < draft.max_depth and not self.tail.tokens

    def _still_assumed(self, assumed: tuple[int, ...], since: tuple[int, ...]) -> bool:
        return assumed[: len(since)] == since and assumed[len(since) :] == self.tail.main_path

    def attached(self) -> None:
        """A drafter was told all committed tokens; whatever another one owed is void."""
        self.dropped()
        self._known_len = len(self._log)

    def dropped(self) -> None:
        """The drafter is gone, and its open drafts with it. What it had answered stays."""
        self._open.clear()
        self._warm = False
        self.typical_s = None
        self._nothing_after = -1
        self.kv_len = 0

    def next_context_len(self) -> int:
        """Tokens that the next draft builds on: the committed ones and the tail's main path."""
        return len(self._log) + len(self.tail.main_path)

    def worth_asking(self) -> bool:
        """Whether another draft may be sent now and could tell something new."""
        return (
            len(self._open) < MAX_OPEN_DRAFTS and not self.promising and self._nothing_after != self.next_context_len()
        )

    def request(
        self, max_depth: int, now: float, features: Features | None = None, starts_short: bool = False
    ) -> Draft:
        """The draft that continues the committed tokens and the tail's main path; counts as sent."""
        self._last_id += 1
        base_len = len(self._log)
        draft = Draft(
            session=self._session,
            epoch=self._epoch,
            draft_id=self._last_id,
            base_len=base_len,
            prefix_hash=self._log.hash_at(base_len),
            max_depth=max_depth,
            catch_up=self._log.slice(min(self._known_len, base_len), base_len),
            assumed=self.tail.main_path,
            features=features,
            starts_short=starts_short,
        )
        self._open[draft.draft_id] = OpenDraft(draft, now, self._warm)
        return draft

    def answered(self, event: Drafted, now: float) -> Answer | None:
        """Takes in a proposal.

        Returns:
            None for a draft that is not open: an answer from before a reconnect, or one that came twice.
        """
        draft = self._open.pop(event.draft_id, None)
        if draft is None:
            return None
        took_s = self._note_time(draft, now)
        command = draft.command
        self._known_len = command.base_len
        self.kv_len = event.kv_len
        # A drafter that proposes more than it was asked for is cut: the rest could overrun the generation.
        block = Tail.drafted(event.block, event.draft_probs, self._rule).top(command.max_depth)
        tail = self._tail_with(command, block)
        grew = tail is not None and tail.num_draft_tokens > self.tail.num_draft_tokens
        if tail is None or not grew:
            self.num_wasted_tokens += block.num_draft_tokens
        else:
            newly = tail.num_draft_tokens - self.tail.num_draft_tokens
            self.num_wasted_tokens += max(block.num_draft_tokens - newly, 0)
            if not self.tail.tokens:
                self.method = event.method
            self._newest_method = event.method
            self.tail = tail
        found_nothing = tail is not None and not block.tokens
        if found_nothing:
            self._nothing_after = command.base_len + len(command.assumed)
        return Answer(draft.sent_at, command.base_len, grew, found_nothing, block.tree.max_depth, took_s, event.timing)

    def _tail_with(self, draft: Draft, block: Tail) -> Tail | None:
        """The tail with an answer added; None when the committed tokens contradict the draft or have overtaken it."""
        since = self._log.slice(draft.base_len, len(self._log))
        if len(since) <= len(draft.assumed):
            return self.tail.grafted(block) if self._still_assumed(draft.assumed, since) else None
        if self.tail.tokens or since[: len(draft.assumed)] != draft.assumed or not block.tokens:
            return None
        return block.below(since[len(draft.assumed) :])

    def _note_time(self, draft: OpenDraft, now: float) -> float | None:
        self._warm = True
        if not draft.warm:
            return None  # it had to read the whole prompt, or was asked while that went on
        took = now - draft.sent_at
        self.typical_s = took if self.typical_s is None else self.typical_s + _EWMA_WEIGHT * (took - self.typical_s)
        return took

    def unanswered(self, draft_id: int) -> bool:
        """Forgets an open draft that the drafter refused; says whether it was open."""
        return self._open.pop(draft_id, None) is not None

    def known_to_drafter(self, have_len: int) -> None:
        """The drafter says up to where it agrees with the committed tokens."""
        self._known_len = min(have_len, len(self._log))

    def committed(self, tokens: tuple[int, ...], judged: DraftTree) -> None:
        """Moves the tail's root along tokens that were just appended to the log.

        Args:
            tokens: the committed tokens.
            judged: the block that they are the verdict on; always the top of the tail, or empty.
        """
        num_unjudged = self.tail.num_draft_tokens - judged.num_draft_tokens
        below = self.tail.below(tokens)
        self.method = self._newest_method
        if below is None:
            self.num_wasted_tokens += num_unjudged
            self.tail = EMPTY_TAIL
            self._nothing_after = -1
            return
        # The draft that equals the extra token was of use although it was never judged.
        guessed = 1 if len(tokens) > judged.max_depth else 0
        self.num_wasted_tokens += max(num_unjudged - below.num_draft_tokens - guessed, 0)
        self.tail = below

    def proposed(self, block: Tail, method: str) -> None:
        """Takes in a block that came with the verdict and follows the committed tokens; an empty one says nothing."""
        if not block.tokens:
            return
        self.num_wasted_tokens += self.tail.num_draft_tokens
        self.tail = block
        self.method = self._newest_method = method

    def drop_tail(self) -> None:
        """Forgets the tail: the verifier refused a block of it."""
        self.num_wasted_tokens += self.tail.num_draft_tokens
        self.tail = EMPTY_TAIL
        self._nothing_after = -1
