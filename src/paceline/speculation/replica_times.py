"""What passes of one verifier and drafts of one drafter take, and how sessions share them. Pure Python.

The times of a replica are shared by all sessions of a gateway that use it.

Sessions that draft leave the verifier for a while. Three things come of it, and sessions settle in whichever of them is
possible and serves most of them:

| rounds are | if drafts take | a round takes |
|---|---|---|
| `together_s` | no longer than the verifier waits for company | the draft of all, then the pass of all |
| `halves_s` | no longer than a pass | two passes of one half each, while the other half drafts |
| `passing_s` | any time | as many passes as go by meanwhile; they are smaller, and a follow-up misses none |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from paceline.speculation.estimates import Level, LinearTime

_LEAST_S = 1e-6
_MAX_SHARE = 10.0
_AT_ONCE_S = 0.003
"""Sessions that are all back so soon miss no pass."""
_BUSY_QUEUE_SHARE = 0.25
"""A verifier whose queue takes so much of a pass, or more, is busy with other sessions."""


class Users:
    """Sessions of this gateway that use a replica; one that is dropped without a word is noticed at the next change.

    Attributes:
        count: how many.
    """

    def __init__(self) -> None:
        self._sessions: WeakSet[object] = WeakSet()
        self.count = 0

    def add(self, session: object) -> None:
        """It uses the replica."""
        self._sessions.add(session)
        self.count = len(self._sessions)

    def discard(self, session: object) -> None:
        """It does not any more."""
        self._sessions.discard(session)
        self.count = len(self._sessions)


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Where the time of one round with a verifier went, in seconds.

    Attributes:
        verify_s: its pass or passes.
        queue_s: waiting for them.
        draft_wait_s: the verifier had nothing to do because a draft was not there.
        self_draft_s: the verifier drafted the next block.
        self_draft_depth: how deep it was asked to; 0 for not at all.
        period_s: from the verdict before to this one; None when something else held the round up.
        batch_sessions: sessions that shared the pass.
        batch_tokens: tokens that it fed.
    """

    verify_s: float
    queue_s: float = 0.0
    draft_wait_s: float = 0.0
    self_draft_s: float = 0.0
    self_draft_depth: int = 0
    period_s: float | None = None
    batch_sessions: int = 1
    batch_tokens: int = 1


class VerifierTimes:
    """What rounds with one verifier cost, as all sessions of a gateway have seen it.

    Args:
        gather_window_s: so long the verifier waits for sessions, if more of them are served that way; and no longer
            than a pass takes.
        max_block_tokens: largest block that any session may send; a pass with more tokens per session reads a prompt.

    Attributes:
        gather_window_s: the same.
        users: sessions of this gateway that use it.
        pass_time: seconds of a pass over its tokens.
        batch_sessions: sessions that share a pass.
        self_draft: seconds of drafting in the verifier over the depth.
    """

    _PLAIN_EVERY = 64
    _PLAIN_AT_MOST_EVERY = 512

    def __init__(self, gather_window_s: float = 0.0, max_block_tokens: int = 64) -> None:
        self.gather_window_s = gather_window_s
        self._max_block_tokens = max_block_tokens
        self.users = Users()
        self._queue_share = Level(16)
        self._away_share = Level(16)
        self._rest_s = Level(16)
        self._blocks_in_a_row = 0.0
        self._plain_every = self._PLAIN_EVERY
        self.pass_time = LinearTime(window=12, prior_share=0.1)
        self.batch_sessions = Level(8)
        self.self_draft = LinearTime(window=8, prior_share=0.8)

    @property
    def plain_due(self) -> bool:
        """Whether no session has decoded plainly for so long that the time of that should be measured anew."""
        return self._blocks_in_a_row >= self._plain_every

    def observe(self, times: PassTimes, num_draft_tokens: int) -> None:
        """Adds a round whose block had so many drafts."""
        sessions = max(times.batch_sessions, 1)
        weight = 1.0 / sessions  # every session of the pass tells of it
        if num_draft_tokens:
            self._blocks_in_a_row += weight
        else:
            if self.plain_due:
                self._plain_every = min(2 * self._plain_every, self._PLAIN_AT_MOST_EVERY)
            self._blocks_in_a_row = 0.0
        tokens = max(times.batch_tokens, 1 + num_draft_tokens)
        if tokens > sessions * (self._max_block_tokens + 1):
            return
        self.pass_time.observe(tokens, times.verify_s, weight)
        self.batch_sessions.observe(sessions, weight)
        if times.verify_s > 0:
            self._queue_share.observe(min(times.queue_s / times.verify_s, _MAX_SHARE), weight)
        if times.self_draft_depth > 0:
            self.self_draft.observe(times.self_draft_depth, max(times.self_draft_s, _LEAST_S), weight)
        if times.period_s is not None:
            known_s = times.verify_s + times.queue_s + times.draft_wait_s + times.self_draft_s
            self._rest_s.observe(max(times.period_s - known_s, 0.0), weight)
            if times.verify_s > 0:
                away_s = max(times.period_s - times.verify_s - times.self_draft_s, 0.0)
                self._away_share.observe(min(away_s / times.verify_s, _MAX_SHARE), weight)

    def round_s(self, num_draft_tokens: float, wait_s: float = 0.0) -> float:
        """Seconds of a round on average if every session that uses the verifier sends so many drafts.

        Args:
            num_draft_tokens: size of the block.
            wait_s: from a verdict to the next block.
        """
        return min(
            self.passing_s(num_draft_tokens, ((1.0, wait_s),)), self.together_s(num_draft_tokens, wait_s, wait_s)
        )

    def passing_s(self, num_draft_tokens: float, waits: Sequence[tuple[float, float]]) -> float:
        """The same where nobody waits for anybody.

        A verifier that is busy runs one pass after another. Sessions that are all back at once are in every pass; one
        that waits for a draft misses a pass, or as many as fit into the draft's time, and those that it is in are
        smaller. So a short draft takes as long as a pass, and one that takes no longer costs no more. Where some wait
        the others miss a pass too: when they are back, those that had waited have just begun one. Only follow-ups miss
        none: they are there before the verdict that they count on.

        Args:
            num_draft_tokens: size of the block.
            waits: from a verdict to the next block, in seconds, each with its share of the rounds. What is left of 1 is
                the share of follow-ups.
        """
        sessions = self.sessions
        rest_s = self._rest_s.get(0.0)
        usual_pass_s = self._usual_pass_s(num_draft_tokens)
        idle_s = rest_s + sum(share * wait_s for share, wait_s in waits)
        passes = 1.0
        if max(wait_s for _, wait_s in waits) + rest_s > _AT_ONCE_S and usual_pass_s > 0.0:
            passes += sum(share * max((wait_s + rest_s) / usual_pass_s, 1.0) for share, wait_s in waits)
        alone_s = self.pass_time.at(1 + num_draft_tokens) + idle_s
        if passes > sessions:
            return alone_s
        return max(passes * self.pass_time.at(sessions / passes * (1 + num_draft_tokens)), alone_s)

    def together_s(self, num_draft_tokens: float, longest_s: float, usual_s: float) -> float:
        """The same where a pass waits for all.

        Args:
            num_draft_tokens: size of the block.
            longest_s: until the last session may be back.
            usual_s: until it is, on average.

        Returns:
            The time; infinity where the verifier does not wait so long.
        """
        rest_s = self._rest_s.get(0.0)
        if longest_s + rest_s > min(self.gather_window_s, self._usual_pass_s(num_draft_tokens)):
            return math.inf
        return usual_s + rest_s + self.pass_time.at(self.sessions * (1 + num_draft_tokens))

    def halves_s(self, num_draft_tokens: float, wait_s: float, slack_s: float) -> float:
        """The same where one half of the sessions is away while the other half is in a pass.

        Args:
            num_draft_tokens: size of the block.
            wait_s: from a verdict to the next block.
            slack_s: so much more than a pass it may be.

        Returns:
            The time; infinity where that is not so: both halves would be away.
        """
        half, away_s = self.sessions / 2, wait_s + self._rest_s.get(0.0)
        pass_s = self.pass_time.at(half * (1 + num_draft_tokens))
        if half < 1.0 or away_s > pass_s + slack_s:
            return math.inf
        return 2.0 * max(pass_s, away_s)

    def _usual_pass_s(self, num_draft_tokens: float) -> float:
        return self.pass_time.at(max(self.sessions / 2, 1.0) * (1 + num_draft_tokens))

    @property
    def sessions(self) -> float:
        """Sessions that use the verifier: those of this gateway.

        If passes have more there are others: those of a pass, and those that wait for the next ones if it is busy.
        """
        if self.batch_sessions.get(0.0) <= self.users.count:
            return float(self.users.count)
        busy = min(self._queue_share.get(0.0) / _BUSY_QUEUE_SHARE, 1.0)
        return self.batch_sessions.get(1.0) * (1.0 + busy * self._away_share.get(0.0))


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Where the time of one draft went, in seconds.

    Attributes:
        took_s: from asking to the answer.
        queue_s: of this, waiting for its first step.
        rest_s: of this, outside the drafter.
        batch_sessions: drafts that shared its steps.
    """

    took_s: float
    queue_s: float = 0.0
    rest_s: float = 0.0
    batch_sessions: int = 1


class DrafterTimes:
    """What drafts of one drafter cost, as all sessions of a gateway have seen it.

    A draft is made step by step, a token each, and a step is shared by all drafts that are on their way. So a draft
    takes the longer the more sessions draft, and whether drafting pays is a question to all of them.

    Attributes:
        step_time: seconds of a step over the drafts that share it.
        users: sessions that may ask for drafts.
    """

    def __init__(self) -> None:
        self.step_time = LinearTime(window=16, prior_share=0.02)
        self.users = Users()
        self._rest_s = Level(8)
        self._batch = Level(8)

    def observe(self, depth: int, times: DraftTimes) -> None:
        """Adds a draft; one that found nothing counts like one of a single token."""
        made_s = max(times.took_s - times.queue_s - times.rest_s, _LEAST_S)
        sessions = max(times.batch_sessions, 1)
        weight = 1.0 / sessions  # every session of the steps tells of them
        self.step_time.observe(sessions, made_s / max(depth, 1), weight)
        self._rest_s.observe(max(times.rest_s, 0.0), weight)
        self._batch.observe(sessions, weight)

    @property
    def sessions(self) -> float:
        """Sessions that share the drafter, those of other gateways included as far as they show."""
        return max(self.users.count, self._batch.get(1.0), 1.0)

    def draft_s(self, depth: int, batch: float, in_step: bool) -> float:
        """From asking to the answer while so many drafts share a step.

        Args:
            depth: tokens of it, one a step.
            batch: drafts that share a step.
            in_step: they begin together; otherwise half a step of others goes before it.
        """
        step_s = self.step_time.at(batch)
        waits_s = 0.0 if in_step else 0.5 * min(batch - 1.0, 1.0) * step_s
        return depth * step_s + waits_s + self._rest_s.get(0.0)
