"""How long a round takes and how many tokens it brings, for every way to speculate. Pure Python.

    plain       pass
    in turn     pass over the block + the draft's round trip
    ahead       the longer of both, and a draft's round trip more when the draft was made on a wrong assumption
    verifier    pass over the block + the time in which the verifier drafts the next one

A pass over a block is that of the whole batch, on the assumption that every session of the batch takes blocks of the
same size. So a session charges itself with what its drafts cost the others, and where passes are bound by arithmetic
all of them stop in time. Sessions that wait for drafts miss passes, which are smaller then: see `round_s`.

The times of a replica are shared by all sessions of a gateway that use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from paceline.speculation.estimates import Level, LinearTime

_LEAST_S = 1e-6
_LOAD_ROUNDS = 4
_MAX_SHARE = 10.0
_NO_WAIT = ((1.0, 0.0),)
_AT_ONCE_S = 0.003
"""A session that is back so soon misses no pass."""
_BUSY_QUEUE_SHARE = 0.25
"""A verifier whose queue takes so much of a pass, or more, is busy with other sessions."""


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
        pass_time: seconds of a pass over its tokens.
        batch_sessions: sessions that share a pass.
        self_draft: seconds of drafting in the verifier over the depth.
    """

    _PLAIN_EVERY = 64
    _PLAIN_AT_MOST_EVERY = 512

    def __init__(self, gather_window_s: float = 0.0, max_block_tokens: int = 64) -> None:
        self.gather_window_s = gather_window_s
        self._max_block_tokens = max_block_tokens
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

    def round_s(self, num_draft_tokens: int, waits: Sequence[tuple[float, float]] = _NO_WAIT) -> float:
        """Seconds of a round on average if every session that uses the verifier sends so many drafts.

        A verifier that is busy runs one pass after another. A session that is back at once is in every pass; one that
        waits for a draft misses a pass, or as many as fit into the draft's time, and those that it is in are smaller.
        So a short draft takes as long as a pass, and one that takes no longer costs no more; unless the verifier does
        better by waiting for all.

        Args:
            num_draft_tokens: size of the block.
            waits: from a verdict to the next block, in seconds, each with its share of the rounds.
        """
        sessions = self.sessions
        rest_s = self._rest_s.get(0.0)
        usual_pass_s = self.pass_time.at(max(sessions / 2, 1.0) * (1 + num_draft_tokens))
        passes, idle_s = 0.0, 0.0
        for share, wait_s in waits:
            away_s = wait_s + rest_s
            idle_s += share * away_s
            if away_s <= _AT_ONCE_S or usual_pass_s <= 0.0:
                passes += share
            else:
                passes += share * (1.0 + max(away_s / usual_pass_s, 1.0))
        if passes > sessions:
            return self.pass_time.at(1 + num_draft_tokens) + idle_s
        round_s = passes * self.pass_time.at(sessions / passes * (1 + num_draft_tokens))
        longest_s = max(wait_s for share, wait_s in waits if share > 0.0) + rest_s
        if longest_s <= min(self.gather_window_s, usual_pass_s):
            round_s = min(round_s, longest_s + self.pass_time.at(sessions * (1 + num_draft_tokens)))
        return max(round_s, self.pass_time.at(1 + num_draft_tokens) + idle_s)

    @property
    def sessions(self) -> float:
        """Sessions that use the verifier: those of a pass, and those that wait for the next ones if it is busy."""
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
        self.users: WeakSet[object] = WeakSet()
        self._rest_s = Level(8)
        self._batch = Level(8)

    def observe(self, depth: int, times: DraftTimes) -> None:
        """Adds a draft; one that found nothing counts like one of a single token."""
        made_s = max(times.took_s - times.queue_s - times.rest_s, _LEAST_S)
        self.step_time.observe(max(times.batch_sessions, 1), made_s / max(depth, 1))
        self._rest_s.observe(max(times.rest_s, 0.0))
        self._batch.observe(max(times.batch_sessions, 1))

    @property
    def sessions(self) -> float:
        """Sessions that share the drafter, those of other gateways included as far as they show."""
        return max(len(self.users), self._batch.get(1.0), 1.0)

    def draft_s(self, depth: int, batch: float) -> float:
        """From asking to the answer while so many drafts share a step: half a step of others goes before it."""
        step_s = self.step_time.at(batch)
        return depth * step_s + 0.5 * min(batch - 1.0, 1.0) * step_s + self._rest_s.get(0.0)


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a round brings on average.

    Attributes:
        tokens: tokens that become final.
        seconds: its time.
    """

    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class RoundModel:
    """Expected rounds of one session at one moment.

    Args:
        verifier: times of its verifier.
        drafter: times of its drafter; None where the verifier drafts by itself.
        gains: what each further draft of a block adds to the accepted ones, one more than blocks are large: for a
            chain, the last of them is the chance that a draft made ahead was made on the right assumption.
        tree_depth: of a block that is a tree, drafted as a whole however little of it is sent; 0 for chains.
        proposed_share: how often a draft that was asked for proposed anything.
        slower: rounds with blocks have taken so many times as long as this model says, drafted in turn and ahead.
    """

    def __init__(
        self,
        verifier: VerifierTimes,
        drafter: DrafterTimes | None,
        gains: Sequence[float],
        tree_depth: int = 0,
        proposed_share: float = 1.0,
        slower: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self._verifier = verifier
        self._drafter = drafter
        self._gains = gains
        self._tree_depth = tree_depth
        self._proposed_share = proposed_share
        self._slower = slower

    @property
    def known(self) -> bool:
        """Whether it is known how long passes and drafts take."""
        drafting = self._verifier.self_draft if self._drafter is None else self._drafter.step_time
        return self._verifier.pass_time.known and drafting.known

    def plain(self) -> Expectation:
        """A round without a block."""
        return Expectation(1.0, self._verifier.round_s(0))

    def block(self, size: int, ahead: bool) -> Expectation:
        """A round with a block of so many drafts, at least one, drafted in turn or ahead."""
        tokens = 1.0 + self._proposed_share * sum(self._gains[:size])
        depth = self._tree_depth or size
        if self._drafter is None:
            seconds = self._judged_s(size, _NO_WAIT) + self._verifier.self_draft.at(depth)
        else:
            seconds = self._drafted_s(self._drafter, size, depth, ahead)
        return Expectation(tokens, self._slower[ahead] * seconds)

    def _drafted_s(self, drafter: DrafterTimes, size: int, depth: int, ahead: bool) -> float:
        """Seconds of a round if all sessions of the drafter do the same.

        How many of their drafts share a step depends on how long drafts take, and the other way round.
        """
        agrees = self._proposed_share * self._gains[size] if ahead else 0.0
        others, drafting, seconds = drafter.sessions - 1.0, 0.0, 0.0
        for _ in range(_LOAD_ROUNDS if others > 0.0 else 1):
            draft_s = drafter.draft_s(depth, 1.0 + others * drafting)
            if not ahead:
                seconds = self._judged_s(size, ((1.0, draft_s),))
                busy_s = draft_s
            else:
                ahead_s, pass_s = drafter.draft_s(depth + 1, 1.0 + others * drafting), self._verifier.round_s(size)
                late_s = max(ahead_s - pass_s, 0.0)
                seconds = self._judged_s(size, ((agrees, late_s), (1.0 - agrees, draft_s)))
                # What turns out wrong is dropped as soon as the next draft is asked for.
                busy_s = agrees * ahead_s + (1.0 - agrees) * (min(ahead_s, pass_s) + draft_s)
            drafting = min(busy_s / seconds, 1.0) if seconds > 0.0 else 0.0
        return seconds

    def _judged_s(self, size: int, waits: Sequence[tuple[float, float]]) -> float:
        """Seconds of a round with a block if one was proposed, else without."""
        block_s = self._verifier.round_s(size, waits)
        if self._proposed_share >= 1.0:
            return block_s
        plain_s = self._verifier.round_s(0, waits)
        return plain_s + self._proposed_share * (block_s - plain_s)
